//! The command line of `vellum mount`. Options that `vellum nbd` has too are written as there.

use std::ffi::OsString;

use vellum_export::fuse::Transport;
use vellum_options::{Aio, CacheMode, DetectZeroes};

use crate::getopt::{OptionSpec, Parser, Shape, Takes, shapes};
use crate::server::Failure;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Id {
    Help,
    Version,
    ReadOnly,
    Growable,
    AllowOther,
    IoUring,
    Snapshot,
    LoadSnapshot,
    Format,
    ImageOpts,
    Object,
    NoCache,
    Cache,
    Aio,
    Discard,
    DetectZeroes,
    Fork,
    PidFile,
}

const OPTIONS: &[OptionSpec<Id>] = &[
    OptionSpec::new(Id::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Id::Version, 'V', "version", Takes::Nothing),
    OptionSpec::new(Id::ReadOnly, 'r', "read-only", Takes::Nothing),
    OptionSpec::long(Id::Growable, "growable", Takes::Nothing),
    OptionSpec::long(Id::AllowOther, "allow-other", Takes::Nothing),
    OptionSpec::long(Id::IoUring, "io-uring", Takes::Value),
    OptionSpec::new(Id::Snapshot, 's', "snapshot", Takes::Nothing),
    OptionSpec::new(Id::LoadSnapshot, 'l', "load-snapshot", Takes::Value),
    OptionSpec::new(Id::Format, 'f', "format", Takes::Value),
    OptionSpec::long(Id::ImageOpts, "image-opts", Takes::Nothing),
    OptionSpec::long(Id::Object, "object", Takes::Value),
    OptionSpec::new(Id::NoCache, 'n', "nocache", Takes::Nothing),
    OptionSpec::long(Id::Cache, "cache", Takes::Value),
    OptionSpec::long(Id::Aio, "aio", Takes::Value),
    OptionSpec::long(Id::Discard, "discard", Takes::Value),
    OptionSpec::long(Id::DetectZeroes, "detect-zeroes", Takes::Value),
    OptionSpec::long(Id::Fork, "fork", Takes::Nothing),
    OptionSpec::long(Id::PidFile, "pid-file", Takes::Value),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

/// What the program is asked to do.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    #[default]
    Mount,
    Help,
    Version,
}

/// The command line, taken apart and checked.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) action: Action,
    pub(super) image: String,
    pub(super) mountpoint: String,
    pub(super) read_only: bool,
    pub(super) growable: bool,
    pub(super) allow_other: bool,
    /// How requests come from the kernel.
    pub(super) transport: Transport,
    /// Changes are thrown away.
    pub(super) temporary: bool,
    pub(super) snapshot: Option<String>,
    pub(super) format: Option<String>,
    pub(super) image_opts: bool,
    pub(super) cache: CacheMode,
    pub(super) aio: Option<Aio>,
    /// Holes that are punched give their space back.
    pub(super) keep_space: bool,
    pub(super) detect_zeroes: DetectZeroes,
    pub(super) fork: bool,
    pub(super) pid_file: Option<String>,
}

fn fail<T>(message: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Message(message.into()))
}

impl Arguments {
    /// Takes a command line (without the program's name) apart.
    pub(super) fn parse(words: Vec<OsString>) -> Result<Self, Failure> {
        let mut arguments = Arguments::default();
        let mut parser = Parser::new(OPTIONS, words);
        while let Some((id, value)) = parser.next_option()? {
            arguments.take(id, value.unwrap_or_default())?;
            if arguments.action != Action::Mount {
                return Ok(arguments);
            }
        }
        arguments.check()?;
        let Ok([image, mountpoint]) = <[String; 2]>::try_from(parser.operands()) else {
            return fail(
                "Expecting an image and the file that it is to appear as\nTry 'vellum mount \
                 --help' for more info",
            );
        };
        (arguments.image, arguments.mountpoint) = (image, mountpoint);
        Ok(arguments)
    }

    fn take(&mut self, id: Id, value: String) -> Result<(), Failure> {
        match id {
            Id::Help => self.action = Action::Help,
            Id::Version => self.action = Action::Version,
            Id::ReadOnly => self.read_only = true,
            Id::Growable => self.growable = true,
            Id::AllowOther => self.allow_other = true,
            Id::IoUring => {
                self.transport = match value.as_str() {
                    "auto" => Transport::Auto,
                    "off" => Transport::Device,
                    "on" => Transport::IoUring,
                    _ => return fail(format!("Invalid io-uring mode '{value}'")),
                }
            }
            Id::Snapshot => self.temporary = true,
            Id::LoadSnapshot => self.snapshot = Some(value),
            Id::Format => self.format = Some(value),
            Id::ImageOpts => self.image_opts = true,
            Id::Object => return crate::object::add(&value).map_err(Failure::from),
            Id::NoCache => return self.set_cache("none"),
            Id::Cache => return self.set_cache(&value),
            Id::Aio => match Aio::parse(&value) {
                Some(aio) => self.aio = Some(aio),
                None => return fail(format!("Invalid aio mode '{value}'")),
            },
            Id::Discard => match value.as_str() {
                "ignore" | "off" => self.keep_space = true,
                "unmap" | "on" => self.keep_space = false,
                _ => return fail(format!("Invalid discard mode `{value}'")),
            },
            Id::DetectZeroes => match DetectZeroes::parse(&value) {
                Some(mode) => self.detect_zeroes = mode,
                None => return fail(format!("Invalid detect-zeroes mode `{value}'")),
            },
            Id::Fork => self.fork = true,
            Id::PidFile => self.pid_file = Some(value),
        }
        Ok(())
    }

    fn set_cache(&mut self, name: &str) -> Result<(), Failure> {
        match CacheMode::parse(name) {
            Some(mode) => self.cache = mode,
            None => return fail(format!("Invalid cache mode `{name}'")),
        }
        Ok(())
    }

    /// Combinations that make no sense.
    fn check(&mut self) -> Result<(), Failure> {
        if self.image_opts && self.format.is_some() {
            return fail("--image-opts and -f are mutually exclusive");
        }
        if self.detect_zeroes == DetectZeroes::Unmap && self.keep_space {
            return fail("--detect-zeroes=unmap is not allowed with --discard=ignore");
        }
        if self.snapshot.is_some() {
            self.read_only = true;
        }
        if self.read_only && self.growable {
            return fail("--growable is of no use where nothing can be written");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, String> {
        let words = line.split_whitespace().map(OsString::from).collect();
        Arguments::parse(words).map_err(|failure| match failure {
            Failure::Message(text) => text,
            other => format!("{other:?}"),
        })
    }

    #[test]
    fn a_usual_command_line_is_understood() {
        let arguments = parse("--growable -f qcow2 disk.qcow2 disk").expect("valid");
        assert_eq!(arguments.image, "disk.qcow2");
        assert_eq!(arguments.mountpoint, "disk");
        assert!(arguments.growable && !arguments.read_only && !arguments.keep_space);
        assert!(parse("-l one a b").expect("valid").read_only);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (line, message) in [
            (
                "--image-opts -f raw a b",
                "--image-opts and -f are mutually exclusive",
            ),
            (
                "-r --growable a b",
                "--growable is of no use where nothing can be written",
            ),
            ("--io-uring=yes a b", "Invalid io-uring mode 'yes'"),
            ("--cache=foo a b", "Invalid cache mode `foo'"),
            ("--aio=foo a b", "Invalid aio mode 'foo'"),
            ("--discard=foo a b", "Invalid discard mode `foo'"),
        ] {
            assert_eq!(parse(line).err().as_deref(), Some(message), "{line}");
        }
        assert!(parse("only-one").is_err());
    }
}
