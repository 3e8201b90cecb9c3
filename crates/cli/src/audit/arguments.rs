//! The command line of `vellum audit`.

use std::ffi::OsString;
use std::time::Duration;

use vellum_graph::probe::is_format_name;
use vellum_images::audit::{Permission, Policy};

use crate::getopt::{OptionSpec, Parser, Shape, Takes, shapes};
use crate::manual::pages::examples;
use crate::output::Output;
use crate::size;

#[derive(Debug, Clone, Copy)]
enum Opt {
    Help,
    Format,
    AllowBacking,
    AllowDataFile,
    AllowProtocols,
    Within,
    MaxSize,
    MaxMemory,
    MaxTime,
    Output,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Format, 'f', "format", Takes::Value),
    OptionSpec::long(Opt::AllowBacking, "allow-backing", Takes::Nothing),
    OptionSpec::long(Opt::AllowDataFile, "allow-data-file", Takes::Nothing),
    OptionSpec::long(Opt::AllowProtocols, "allow-protocols", Takes::Nothing),
    OptionSpec::long(Opt::Within, "within", Takes::Value),
    OptionSpec::long(Opt::MaxSize, "max-size", Takes::Value),
    OptionSpec::long(Opt::MaxMemory, "max-memory", Takes::Value),
    OptionSpec::long(Opt::MaxTime, "max-time", Takes::Value),
    OptionSpec::long(Opt::Output, "output", Takes::Value),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

/// How the tool is called.
const USAGE: &str = "[OPTIONS] FILENAME...";

/// What the options mean.
pub const HELP: &str = "\
  -f, --format FMT          the format that the image is declared to have; content that
                            looks like another one is rejected
  --allow-backing           the image may name a backing file
  --allow-data-file         the image may name an external data file
  --allow-protocols         these may be reached by a protocol, or be a json:{} description
  --within FOLDER           other files must lie below FOLDER, with all links followed
  --max-size SIZE           reject larger disks
  --max-memory SIZE         memory that checking the metadata may take (1G)
  --max-time SECONDS        when to give up, and reject (60)
  --output human|json       how to print
";

/// What the tool is for, in its help and manual.
pub const EXPLAINS: &str = "\
Tells whether an image that nobody vouches for is safe to open. The image is read, never
written, and no other file is opened. It is rejected if it names other files that are not
allowed, breaks a limit, contradicts itself, is of a format that cannot be checked, or is
several formats at once. A reason that an option would take away is followed by that option.
A warning or a note is no reason: that it is encrypted, say, or an archive and no disk.
FILE#DISK is a disk in a package of a virtual machine (OVA).

Of one image --output=json prints an object, of several an array of such objects, in their
order: 'image', 'verdict' (safe, rejected, unreadable), 'findings' with 'level', 'code',
'message' and 'option' (null, or what would allow it), 'references', and what else is known.

Exit codes: 0 safe, 1 the image could not be read, 2 rejected; of several the highest.
";

/// The command line, taken apart.
#[derive(Debug, Default)]
pub struct Arguments {
    pub help: bool,
    pub policy: Policy,
    pub output: Output,
    pub images: Vec<String>,
}

impl Arguments {
    /// Understands the command line, or says why not.
    pub fn parse(words: Vec<OsString>) -> Result<Arguments, String> {
        let mut arguments = Arguments::default();
        let mut parser = Parser::new(OPTIONS, words);
        while let Some((option, value)) = parser.next_option().map_err(|e| e.to_string())? {
            arguments.take(option, value.unwrap_or_default())?;
        }
        arguments.images = parser.operands();
        match arguments.images.is_empty() && !arguments.help {
            true => Err("Expecting an image file name".into()),
            false => Ok(arguments),
        }
    }

    fn take(&mut self, option: Opt, value: String) -> Result<(), String> {
        let policy = &mut self.policy;
        match option {
            Opt::Help => self.help = true,
            Opt::Format if !is_format_name(&value) => {
                return Err(format!("Unknown file format '{value}'"));
            }
            Opt::Format => policy.format = Some(value),
            Opt::AllowBacking => policy.allow_backing = true,
            Opt::AllowDataFile => policy.allow_data_file = true,
            Opt::AllowProtocols => policy.allow_protocols = true,
            Opt::Within => policy.within = Some(value.into()),
            Opt::MaxSize => policy.max_size_bytes = Some(size_of("--max-size", &value)?),
            Opt::MaxMemory => policy.max_memory_bytes = size_of("--max-memory", &value)?,
            Opt::MaxTime => {
                let seconds = value.parse().ok();
                let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                policy.max_time =
                    time.ok_or_else(|| format!("--max-time expects seconds, not '{value}'"))?;
            }
            Opt::Output => self.output = Output::parse(&value).map_err(|e| e.to_string())?,
        }
        Ok(())
    }
}

fn size_of(option: &str, text: &str) -> Result<u64, String> {
    size::parse(text).map_err(|_| format!("{option} expects a size such as 20G, not '{text}'"))
}

/// What `--help` prints.
pub fn help(program: &str) -> String {
    let examples = examples("audit");
    format!(
        "Usage: {program} audit {USAGE}\n\n{EXPLAINS}\nArguments:\n  -h, --help\n{HELP}{examples}"
    )
}

/// The option that allows what was found.
pub fn option_for(permission: Permission) -> &'static str {
    match permission {
        Permission::Backing => "--allow-backing",
        Permission::DataFile => "--allow-data-file",
        Permission::Protocols => "--allow-protocols",
        Permission::Folder => "--within",
        Permission::Size => "--max-size",
        Permission::Memory => "--max-memory",
        Permission::Time => "--max-time",
    }
}
