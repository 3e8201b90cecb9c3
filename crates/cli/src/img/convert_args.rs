//! The command line of `convert`.

use std::ffi::OsString;

use vellum::qcow2::CompressionOptions;

use super::command::{Command, Failure, fail, not_taken, number, size};
use super::convert_stdin::INPUT_FILE;
use super::convert_stdout::DASH;
use super::create::add_options;
use super::rows::{OBJECT, PROGRESS, QUIET, SHARE};
use crate::spec::Spec;

pub const SPEC: Spec = Spec {
    name: "convert",
    about: "Copy images to a new one",
    usage: "\
[-f SRC_FMT|--image-opts] [-T SRC_CACHE] [--bitmaps [--skip-broken-bitmaps]]
        [-o TGT_OPTS|--target-image-opts] [-t TGT_CACHE] [-n]
        [-B BACKING_FILENAME [-F BACKING_FMT]]
        SRC_FILENAME [SRC_FILENAME2 [...]] TGT_FILENAME",
    arguments: &[
        QUIET,
        PROGRESS,
        "-f, --source-format SRC_FMT  the format of the sources",
        "--source-image-opts  the sources are lists of options (excludes --source-format)",
        "--image-opts  the same",
        "-l, --source-snapshot SNAPSHOT_PARAMS  copy this snapshot of the source",
        "-T, --source-cache SRC_CACHE  cache mode of the sources (writeback)",
        "-O, --target-format TGT_FMT  the format of the target (raw)",
        "--target-image-opts  the target is a list of options (with -n; excludes \
             --target-format)",
        "-o, --target-options TGT_OPTS  options of the target's format; '-o help' lists them",
        "-c, --compress  compress the target (qcow2)",
        "-t, --target-cache TGT_CACHE  cache mode of the target (unsafe)",
        "-B, --backing BACKING_FILENAME  the target's backing file",
        "-F, --backing-format BACKING_FMT  the format of BACKING_FILENAME",
        "-n, --no-create  write into a target that exists",
        "--target-is-zero  the target reads as zeroes already (with -n)",
        "-S, --sparse-size SPARSE_SIZE  runs of zeroes from this length on are not written \
             (4k)",
        "--bitmaps  copy the bitmaps too",
        "--skip-broken-bitmaps  leave out those whose content is lost (with --bitmaps)",
        SHARE,
        "-r, --rate RATE  bytes a second at most",
        "-m, --parallel NUM_COROUTINES  requests in flight, 1 to 16 (8)",
        "-C, --copy-range-offloading  let the host copy where it can",
        "--salvage  take what cannot be read as zeroes",
        "-W, --oob-writes  write in any order",
        "--level LEVEL  how hard -c tries, 1 to 22; zlib knows 12",
        "--window 4k|32k  how far -c with zlib looks back (32k)",
        "--journal  keep a journal beside the target, and go on where an interrupted copy \
             with\n        the same arguments has ended",
        "--reproducible  the same content and options give the same bytes, whatever the \
             machine does",
        "--accept-missing  copy zeroes for what a source lacks whose file was cut short",
        OBJECT,
        "SRC_FILENAME  a source",
        "TGT_FILENAME  the target",
    ],
    closing: "\
Called vellum, a target '-' is standard output (qcow2 or raw), and a source '-' standard
input (raw, or any format if it is a file).
",
    examples: "\
vellum convert -p -O qcow2 disk.raw disk.qcow2
  a raw image to a qcow2 one, with a progress bar
vellum convert -c -O qcow2 disk.qcow2 small.qcow2
  compressed
vellum convert -O qcow2 overlay.qcow2 whole.qcow2
  a chain as one image
vellum convert --journal -O qcow2 huge.raw huge.qcow2
  killed? the same line again goes on
vellum convert -O qcow2 disk.raw - | ssh host 'cat > disk.qcow2'
  into a pipe
",
    ..Spec::EMPTY
};

const SECTOR_BYTES: u64 = 512;
const MAX_SPARSE_BYTES: u64 = 16 << 20;
const MAX_PARALLEL: u64 = 16;
/// The highest level that any compression type has.
const MAX_LEVEL: u64 = 22;

/// What `convert` was asked for.
#[derive(Debug, Default)]
pub struct Arguments {
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
        let common = command.parse(words, |name, value| arguments.take(name, value))?;
        Ok(Arguments {
            quiet: common.quiet,
            progress: common.progress,
            force_share: common.force_share,
            source_image_opts: arguments.source_image_opts || common.image_opts,
            names: common.operands,
            ..arguments
        })
    }

    fn take(&mut self, name: &str, value: String) -> Result<(), Failure> {
        match name {
            "source-format" => self.source_format = Some(value),
            "source-image-opts" => self.source_image_opts = true,
            "source-snapshot" => self.source_snapshot = Some(value),
            "source-cache" => self.source_cache = Some(value),
            "target-format" => self.target_format = Some(value),
            "target-image-opts" => self.target_image_opts = true,
            "target-options" => add_options(&mut self.target_options, value)?,
            "target-cache" => self.target_cache = Some(value),
            "compress" => self.compress = true,
            "backing" => self.backing = Some(value),
            "backing-format" => self.backing_format = Some(value),
            "no-create" => self.no_create = true,
            "target-is-zero" => self.target_is_zero = true,
            "sparse-size" => self.sparse_bytes = Some(sparse_size(&value)?),
            "bitmaps" => self.bitmaps = true,
            "skip-broken-bitmaps" => self.skip_broken_bitmaps = true,
            "rate" => self.rate_bytes = Some(size("rate limit", &value, 0, u64::MAX)?),
            "parallel" => {
                self.parallel = Some(number("number of coroutines", &value, 1, MAX_PARALLEL)?);
            }
            "copy-range-offloading" => self.copy_range = true,
            "salvage" => self.salvage = true,
            "oob-writes" => self.out_of_order = true,
            "level" => {
                let level = number("compression level", &value, 1, MAX_LEVEL)?;
                self.compression.level = Some(level as u32);
            }
            "journal" => self.journal = true,
            "reproducible" => self.reproducible = true,
            "accept-missing" => self.accept_missing = true,
            "window" => self.compression.small_window = small_window(&value)?,
            _ => return not_taken(name),
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
