//! The command line of `vellum serve`. Options that `vellum nbd` and `vellum mount` have too are
//! written as there.

use std::ffi::OsString;

use vellum_export::vhost_user_blk::{Options as VhostUserOptions, SERIAL_BYTES};
use vellum_options::{Aio, CacheMode, DetectZeroes};

use crate::getopt::{OptionSpec, Parser, Shape, Takes, shapes};
use crate::server::Failure;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Id {
    Help,
    Version,
    Nbd,
    ExportName,
    Shared,
    VhostUser,
    Queues,
    Serial,
    Fuse,
    AllowOther,
    ReadOnly,
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
    Quiet,
    Fork,
    PidFile,
}

const OPTIONS: &[OptionSpec<Id>] = &[
    OptionSpec::new(Id::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Id::Version, 'V', "version", Takes::Nothing),
    OptionSpec::long(Id::Nbd, "nbd", Takes::Value),
    OptionSpec::new(Id::ExportName, 'x', "export-name", Takes::Value),
    OptionSpec::new(Id::Shared, 'e', "shared", Takes::Value),
    OptionSpec::long(Id::VhostUser, "vhost-user", Takes::Value),
    OptionSpec::long(Id::Queues, "queues", Takes::Value),
    OptionSpec::long(Id::Serial, "serial", Takes::Value),
    OptionSpec::long(Id::Fuse, "fuse", Takes::Value),
    OptionSpec::long(Id::AllowOther, "allow-other", Takes::Nothing),
    OptionSpec::new(Id::ReadOnly, 'r', "read-only", Takes::Nothing),
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
    OptionSpec::new(Id::Quiet, 'q', "quiet", Takes::Nothing),
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
    Serve,
    Help,
    Version,
}

/// The command line, taken apart and checked.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) action: Action,
    pub(super) image: String,
    /// Sockets and the file by which the disk is to be had: at least one.
    pub(super) nbd: Option<String>,
    pub(super) vhost_user: Option<String>,
    pub(super) fuse: Option<String>,
    pub(super) export_name: String,
    /// How many NBD clients are served at once; 0: any number.
    pub(super) shared: Option<usize>,
    pub(super) queues: Option<u16>,
    pub(super) serial: Option<String>,
    pub(super) allow_other: bool,
    pub(super) read_only: bool,
    /// Changes are thrown away.
    pub(super) temporary: bool,
    pub(super) snapshot: Option<String>,
    pub(super) format: Option<String>,
    pub(super) image_opts: bool,
    pub(super) cache: CacheMode,
    pub(super) aio: Option<Aio>,
    /// Discards do not give space back.
    pub(super) keep_space: bool,
    pub(super) detect_zeroes: DetectZeroes,
    /// Do not print how to use the disk.
    pub(super) quiet: bool,
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
            if arguments.action != Action::Serve {
                return Ok(arguments);
            }
        }
        let Ok([image]) = <[String; 1]>::try_from(parser.operands()) else {
            return fail("Expecting one image file name\nTry 'vellum serve --help' for more info");
        };
        arguments.image = image;
        arguments.check()?;
        Ok(arguments)
    }

    fn take(&mut self, id: Id, value: String) -> Result<(), Failure> {
        match id {
            Id::Help => self.action = Action::Help,
            Id::Version => self.action = Action::Version,
            Id::Nbd => self.nbd = Some(value),
            Id::ExportName => self.export_name = value,
            Id::Shared => self.shared = Some(number(&value, "--shared")?),
            Id::VhostUser => self.vhost_user = Some(value),
            Id::Queues => self.queues = Some(number(&value, "--queues")?),
            Id::Serial => self.serial = Some(value),
            Id::Fuse => self.fuse = Some(value),
            Id::AllowOther => self.allow_other = true,
            Id::ReadOnly => self.read_only = true,
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
            Id::Quiet => self.quiet = true,
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
        if self.nbd.is_none() && self.vhost_user.is_none() && self.fuse.is_none() {
            return fail(
                "Nothing says where the disk is to be had: --nbd SOCKET, --vhost-user SOCKET or \
                 --fuse FILE",
            );
        }
        if self.image_opts && self.format.is_some() {
            return fail("--image-opts and -f are mutually exclusive");
        }
        if self.detect_zeroes == DetectZeroes::Unmap && self.keep_space {
            return fail("--detect-zeroes=unmap is not allowed with --discard=ignore");
        }
        for (given, name, needed, without) in [
            (
                self.shared.is_some(),
                "--shared",
                "--nbd",
                self.nbd.is_none(),
            ),
            (
                !self.export_name.is_empty(),
                "--export-name",
                "--nbd",
                self.nbd.is_none(),
            ),
            (
                self.queues.is_some(),
                "--queues",
                "--vhost-user",
                self.vhost_user.is_none(),
            ),
            (
                self.serial.is_some(),
                "--serial",
                "--vhost-user",
                self.vhost_user.is_none(),
            ),
            (
                self.allow_other,
                "--allow-other",
                "--fuse",
                self.fuse.is_none(),
            ),
        ] {
            if given && without {
                return fail(format!("{name} is of no use without {needed}"));
            }
        }
        let most = VhostUserOptions::MAX_QUEUES;
        if self.queues.is_some_and(|count| count == 0 || count > most) {
            return fail(format!("--queues takes a number from 1 to {most}"));
        }
        if self
            .serial
            .as_ref()
            .is_some_and(|text| text.len() > SERIAL_BYTES)
        {
            return fail(format!("--serial takes at most {SERIAL_BYTES} bytes"));
        }
        if self.snapshot.is_some() {
            self.read_only = true;
        }
        Ok(())
    }
}

fn number<T: std::str::FromStr>(text: &str, name: &str) -> Result<T, Failure> {
    text.parse()
        .map_err(|_| Failure::message(format!("Invalid value '{text}' for {name}")))
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
        let line = "--nbd n.sock --vhost-user v.sock --queues 4 --fuse disk a.qcow2";
        let arguments = parse(line).expect("valid");
        assert_eq!(arguments.image, "a.qcow2");
        assert_eq!(arguments.queues, Some(4));
        assert!(!arguments.read_only && !arguments.keep_space && arguments.shared.is_none());
        assert!(parse("-l one --fuse disk a").expect("valid").read_only);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (line, message) in [
            (
                "a",
                "Nothing says where the disk is to be had: --nbd SOCKET, --vhost-user SOCKET or \
                 --fuse FILE",
            ),
            (
                "--nbd s --queues 2 a",
                "--queues is of no use without --vhost-user",
            ),
            ("--fuse f -e 2 a", "--shared is of no use without --nbd"),
            (
                "--nbd s --allow-other a",
                "--allow-other is of no use without --fuse",
            ),
            (
                "--vhost-user s --queues 65 a",
                "--queues takes a number from 1 to 64",
            ),
            (
                "--vhost-user s --queues x a",
                "Invalid value 'x' for --queues",
            ),
            (
                "--nbd s --image-opts -f raw a",
                "--image-opts and -f are mutually exclusive",
            ),
        ] {
            assert_eq!(parse(line).err().as_deref(), Some(message), "{line}");
        }
        assert!(parse("--nbd s").is_err());
    }
}
