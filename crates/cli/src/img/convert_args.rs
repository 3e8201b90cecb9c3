//! The command line of `convert`.

use std::ffi::OsString;

use vellum::qcow2::CompressionOptions;

use super::command::{Command, Failure, check_object, fail, number, size};
use super::convert_stdin::INPUT_FILE;
use super::convert_stdout::DASH;
use super::create::add_options;
use crate::getopt::{OptionSpec, Shape, Takes, shapes};

#[derive(Debug, Clone, Copy)]
enum Opt {
    Help,
    Quiet,
    Progress,
    SourceFormat,
    SourceImageOpts,
    SourceSnapshot,
    SourceCache,
    TargetFormat,
    TargetImageOpts,
    TargetOptions,
    TargetCache,
    Compress,
    Backing,
    BackingFormat,
    NoCreate,
    TargetIsZero,
    SparseSize,
    Bitmaps,
    SkipBrokenBitmaps,
    ForceShare,
    Rate,
    Parallel,
    CopyRange,
    Salvage,
    OutOfOrder,
    Object,
    Level,
    Window,
    Journal,
    Reproducible,
    AcceptMissing,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Quiet, 'q', "quiet", Takes::Nothing),
    OptionSpec::new(Opt::Progress, 'p', "progress", Takes::Nothing),
    OptionSpec::new(Opt::SourceFormat, 'f', "source-format", Takes::Value),
    OptionSpec::long(Opt::SourceImageOpts, "source-image-opts", Takes::Nothing),
    OptionSpec::long(Opt::SourceImageOpts, "image-opts", Takes::Nothing),
    OptionSpec::new(Opt::SourceSnapshot, 'l', "source-snapshot", Takes::Value),
    OptionSpec::new(Opt::SourceCache, 'T', "source-cache", Takes::Value),
    OptionSpec::new(Opt::TargetFormat, 'O', "target-format", Takes::Value),
    OptionSpec::long(Opt::TargetImageOpts, "target-image-opts", Takes::Nothing),
    OptionSpec::new(Opt::TargetOptions, 'o', "target-options", Takes::Value),
    OptionSpec::new(Opt::TargetCache, 't', "target-cache", Takes::Value),
    OptionSpec::new(Opt::Compress, 'c', "compress", Takes::Nothing),
    OptionSpec::new(Opt::Backing, 'B', "backing", Takes::Value),
    OptionSpec::new(Opt::BackingFormat, 'F', "backing-format", Takes::Value),
    OptionSpec::new(Opt::NoCreate, 'n', "no-create", Takes::Nothing),
    OptionSpec::long(Opt::TargetIsZero, "target-is-zero", Takes::Nothing),
    OptionSpec::new(Opt::SparseSize, 'S', "sparse-size", Takes::Value),
    OptionSpec::long(Opt::Bitmaps, "bitmaps", Takes::Nothing),
    OptionSpec::long(
        Opt::SkipBrokenBitmaps,
        "skip-broken-bitmaps",
        Takes::Nothing,
    ),
    OptionSpec::new(Opt::ForceShare, 'U', "force-share", Takes::Nothing),
    OptionSpec::new(Opt::Rate, 'r', "rate", Takes::Value),
    OptionSpec::new(Opt::Parallel, 'm', "parallel", Takes::Value),
    OptionSpec::new(Opt::CopyRange, 'C', "copy-range-offloading", Takes::Nothing),
    OptionSpec::long(Opt::Salvage, "salvage", Takes::Nothing),
    OptionSpec::new(Opt::OutOfOrder, 'W', "oob-writes", Takes::Nothing),
    OptionSpec::long(Opt::Object, "object", Takes::Value),
    // Ours. No option of QEMU's begins like them but --rate, whose abbreviation --r has become
    // ambiguous; the others stay what they are.
    OptionSpec::long(Opt::Level, "level", Takes::Value),
    OptionSpec::long(Opt::Window, "window", Takes::Value),
    OptionSpec::long(Opt::Journal, "journal", Takes::Nothing),
    OptionSpec::long(Opt::Reproducible, "reproducible", Takes::Nothing),
    OptionSpec::long(Opt::AcceptMissing, "accept-missing", Takes::Nothing),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

const SECTOR_BYTES: u64 = 512;
const MAX_SPARSE_BYTES: u64 = 16 << 20;
const MAX_PARALLEL: u64 = 16;
/// The highest level that any compression type has.
const MAX_LEVEL: u64 = 22;

/// What `convert` was asked for.
#[derive(Debug, Default)]
pub struct Arguments {
    pub help: bool,
    pub quiet: bool,
    pub progress: bool,
    pub source_format: Option<String>,
    pub source_image_opts: bool,
    pub source_snapshot: Option<String>,
    pub source_cache: Option<String>,
    pub target_format: Option<String>,
    pub target_image_opts: bool,
    pub target_options: Option<String>,
    pub target_cache: Option<String>,
    pub compress: bool,
    pub backing: Option<String>,
    pub backing_format: Option<String>,
    pub no_create: bool,
    pub target_is_zero: bool,
    /// `-S`; 0 writes everything.
    pub sparse_bytes: Option<u64>,
    pub bitmaps: bool,
    pub skip_broken_bitmaps: bool,
    pub force_share: bool,
    pub rate_bytes: Option<u64>,
    pub parallel: Option<u64>,
    pub copy_range: bool,
    pub salvage: bool,
    pub out_of_order: bool,
    pub compression: CompressionOptions,
    pub journal: bool,
    pub reproducible: bool,
    /// Zeroes may take the place of what a file that was cut short lacks.
    pub accept_missing: bool,
    /// The sources, and the target last.
    pub names: Vec<String>,
}

impl Arguments {
    /// Reads the command line.
    pub fn parse(command: Command<'_>, words: Vec<OsString>) -> Result<Arguments, Failure> {
        let mut arguments = Arguments::default();
        let mut parser = command.parser(OPTIONS, words);
        while let Some((option, value)) = parser.next_option()? {
            arguments.take(option, value.unwrap_or_default())?;
            if arguments.help {
                return Ok(arguments);
            }
        }
        arguments.names = parser.operands();
        Ok(arguments)
    }

    fn take(&mut self, option: Opt, value: String) -> Result<(), Failure> {
        match option {
            Opt::Help => self.help = true,
            Opt::Quiet => self.quiet = true,
            Opt::Progress => self.progress = true,
            Opt::SourceFormat => self.source_format = Some(value),
            Opt::SourceImageOpts => self.source_image_opts = true,
            Opt::SourceSnapshot => self.source_snapshot = Some(value),
            Opt::SourceCache => self.source_cache = Some(value),
            Opt::TargetFormat => self.target_format = Some(value),
            Opt::TargetImageOpts => self.target_image_opts = true,
            Opt::TargetOptions => add_options(&mut self.target_options, value)?,
            Opt::TargetCache => self.target_cache = Some(value),
            Opt::Compress => self.compress = true,
            Opt::Backing => self.backing = Some(value),
            Opt::BackingFormat => self.backing_format = Some(value),
            Opt::NoCreate => self.no_create = true,
            Opt::TargetIsZero => self.target_is_zero = true,
            Opt::SparseSize => self.sparse_bytes = Some(sparse_size(&value)?),
            Opt::Bitmaps => self.bitmaps = true,
            Opt::SkipBrokenBitmaps => self.skip_broken_bitmaps = true,
            Opt::ForceShare => self.force_share = true,
            Opt::Rate => self.rate_bytes = Some(size("rate limit", &value, 0, u64::MAX)?),
            Opt::Parallel => {
                self.parallel = Some(number("number of coroutines", &value, 1, MAX_PARALLEL)?);
            }
            Opt::CopyRange => self.copy_range = true,
            Opt::Salvage => self.salvage = true,
            Opt::OutOfOrder => self.out_of_order = true,
            Opt::Object => check_object(&value)?,
            Opt::Level => {
                let level = number("compression level", &value, 1, MAX_LEVEL)?;
                self.compression.level = Some(level as u32);
            }
            Opt::Journal => self.journal = true,
            Opt::Reproducible => self.reproducible = true,
            Opt::AcceptMissing => self.accept_missing = true,
            Opt::Window => self.compression.small_window = small_window(&value)?,
        }
        Ok(())
    }

    /// Gives the file on standard input its name.
    pub fn name_input(&mut self) {
        for name in self.names.iter_mut().filter(|name| *name == DASH) {
            INPUT_FILE.clone_into(name);
        }
    }

    /// Refuses what contradicts itself, in QEMU's order and words.
    pub fn check(&self) -> Result<(), Failure> {
        let refusals = [
            (
                self.compress && self.copy_range,
                "Cannot enable copy offloading when -c is used",
            ),
            (
                self.sparse_bytes.is_some() && self.copy_range,
                "Cannot enable copy offloading when -S is used",
            ),
            (
                self.salvage && self.copy_range,
                "Cannot use copy offloading in salvaging mode",
            ),
            (
                self.target_image_opts && !self.no_create,
                "--target-image-opts requires use of -n flag",
            ),
            (
                self.no_create && self.target_options.is_some(),
                "-o has no effect when skipping image creation",
            ),
            (
                self.target_is_zero && !self.no_create,
                "--target-is-zero requires use of -n flag",
            ),
            (
                self.skip_broken_bitmaps && !self.bitmaps,
                "Use of --skip-broken-bitmaps requires --bitmaps",
            ),
            (
                self.compression != CompressionOptions::default() && !self.compress,
                "--level and --window require use of -c flag",
            ),
            (
                self.reproducible && (self.out_of_order || self.copy_range || self.no_create),
                "--reproducible excludes -W, -C and -n: where the data goes would depend on time or \
                 on the target",
            ),
        ];
        match refusals.into_iter().find(|(refused, _)| *refused) {
            Some((_, message)) => fail(message),
            None => Ok(()),
        }
    }
}

fn small_window(text: &str) -> Result<bool, Failure> {
    match text {
        "4k" => Ok(true),
        "32k" => Ok(false),
        _ => fail(format!(
            "Invalid compression window specified: '{text}'. Valid windows are 4k and 32k."
        )),
    }
}

fn sparse_size(text: &str) -> Result<u64, Failure> {
    let bytes = match crate::size::parse(text) {
        Err(crate::size::SizeError::Invalid) => {
            return fail(format!(
                "Invalid buffer size for sparse output specified: '{text}'."
            ));
        }
        Err(crate::size::SizeError::Range) => u64::MAX,
        Ok(bytes) => bytes,
    };
    if bytes % SECTOR_BYTES != 0 || bytes > MAX_SPARSE_BYTES {
        return fail(format!(
            "Invalid buffer size for sparse output specified. Valid sizes are multiples of \
             {SECTOR_BYTES} up to {MAX_SPARSE_BYTES}. Select 0 to disable sparse detection (fully \
             allocates output)."
        ));
    }
    Ok(bytes)
}
