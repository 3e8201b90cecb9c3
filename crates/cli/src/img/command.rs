//! What all subcommands share: the type of a subcommand, failures, messages, and the parsing of
//! names, sizes and cache modes. The options that several of them have are in `common`.

use std::ffi::OsString;

use vellum_io::lane;
use vellum_options::{CacheMode, ImageSpec, OpenFlags, error_text};

use super::package_name;
use crate::getopt::UsageError;
use crate::size::{self, SizeError};
use crate::spec::{CommonArgs, Spec};
use crate::{hint, report};

/// A subcommand that is being run.
#[derive(Clone, Copy)]
pub struct Command<'a> {
    /// The name that the program was called by.
    pub program: &'a str,
    pub subcommand: &'static Subcommand,
}

/// A subcommand of the image tool.
pub struct Subcommand {
    pub spec: Spec,
    /// Its work, after its name was read.
    pub run: fn(Command<'_>, Vec<OsString>) -> Outcome,
}

/// Why a subcommand did not do its work.
#[derive(Debug)]
pub enum Failure {
    /// Only the help was asked for.
    Help,
    /// Something that stands by itself.
    Message(String),
    /// A wrong command line; the help is pointed to.
    Usage(String),
    /// The same where QEMU's programs do not point to the help, and we do.
    Incomplete(String),
    /// A wrong option, told by the option parser.
    Option(UsageError),
    /// A failure with an exit code other than 1.
    WithCode(Box<Failure>, i32),
}

impl Failure {
    /// The same with this exit code.
    pub fn with_code(self, code: i32) -> Failure {
        Failure::WithCode(Box::new(self), code)
    }

    /// The exit code of the program.
    pub fn code(&self) -> i32 {
        match self {
            Failure::WithCode(_, code) => *code,
            Failure::Help => 0,
            _ => 1,
        }
    }
}

impl From<UsageError> for Failure {
    fn from(error: UsageError) -> Self {
        match error {
            UsageError::Help => Failure::Help,
            UsageError::Wrong(message) => Failure::Usage(message),
            UsageError::Object(message) => Failure::Message(message),
            error => Failure::Option(error),
        }
    }
}

impl From<vellum::Error> for Failure {
    fn from(error: vellum::Error) -> Self {
        Failure::Message(error_text(&error))
    }
}

/// The exit code of a subcommand, or why it has none.
pub type Outcome = Result<i32, Failure>;

impl Command<'_> {
    /// Reads the words behind the subcommand's name, as [`Spec::parse`] does.
    pub fn parse(
        &self,
        words: Vec<OsString>,
        take: impl FnMut(&'static str, String) -> Result<(), Failure>,
    ) -> Result<CommonArgs, Failure> {
        self.subcommand.spec.parse(words, take)
    }

    /// The name as it stands after the program's: the short `bench` is a tool of our own.
    pub fn typed(&self) -> &'static str {
        match self.subcommand.spec.name {
            "bench" if report::is_own_name(self.program) => "img bench",
            name => name,
        }
    }

    /// Reports a failure.
    pub fn report(&self, failure: &Failure) {
        let try_help = || {
            report::eprint_line(&format!(
                "Try '{} {} --help' for more info",
                self.program,
                self.typed()
            ));
        };
        match failure {
            Failure::Help => {}
            Failure::Message(message) => report::error(message),
            Failure::WithCode(failure, _) => self.report(failure),
            Failure::Incomplete(message) => {
                report::error(message);
                if report::is_own_name(self.program) {
                    try_help();
                }
            }
            Failure::Usage(message) => {
                report::error(message);
                try_help();
            }
            Failure::Option(error) => {
                report::eprint_line(&format!("{} {}: {error}", self.program, self.typed()));
                hint::about_option(error, &self.subcommand.spec.options());
                try_help();
            }
        }
    }
}

/// The failure of an option that the specification lists and no code takes.
pub fn not_taken<T>(name: &str) -> Result<T, Failure> {
    Err(UsageError::not_taken(name).into())
}

/// A failure that stands by itself.
pub fn fail<T>(message: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Message(message.into()))
}

/// A command line that lacks something, where QEMU's programs do not point to the help.
pub fn incomplete<T>(message: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Incomplete(message.into()))
}

/// What `qemu-img` says when an image cannot be opened.
pub fn open_failure(name: &str, error: &vellum::Error) -> Failure {
    Failure::Message(format!("Could not open '{name}': {}", error_text(error)))
}

/// The image that the options name, as far as options alone can tell.
pub fn image_spec(
    name: &str,
    image_opts: bool,
    format: Option<&str>,
) -> Result<ImageSpec, Failure> {
    if image_opts && format.is_some() {
        return fail("--image-opts and --format are mutually exclusive");
    }
    let spec = ImageSpec::from_argument(name, image_opts, format);
    let spec = spec.map_err(|error| open_failure(name, &error))?;
    Ok(match image_opts {
        true => spec,
        false => package_name::disk_in(spec),
    })
}

/// The name of the one image that a subcommand takes.
pub fn one_name(operands: &[String]) -> Result<&str, Failure> {
    match operands {
        [name] => Ok(name),
        _ => Err(Failure::Usage("Expecting one image file name".into())),
    }
}

/// Flags for reading an image.
pub fn reading(cache: CacheMode, force_share: bool) -> OpenFlags {
    OpenFlags {
        cache,
        force_share,
        discard: true,
        ..OpenFlags::default()
    }
}

/// Flags for reading all of an image, once.
pub fn reading_once(cache: CacheMode, force_share: bool) -> OpenFlags {
    OpenFlags {
        read_once: true,
        ..reading(cache, force_share)
    }
}

/// Sets up this thread for bulk work. Through the page cache requests are copies
/// between memory and memory, which worker threads share out best; around it
/// they belong into a ring.
pub fn install_bulk_lane(direct: bool) -> Result<(), Failure> {
    if !direct {
        let backend = lane::Backend::Threads;
        lane::install(&lane::LaneOptions {
            backend,
            ..Default::default()
        })?;
    }
    Ok(())
}

/// A size or count within limits, with QEMU's words for what is wrong.
pub fn number(what: &str, text: &str, min: u64, max: u64) -> Result<u64, Failure> {
    within(what, text, size::parse_plain, min, max)
}

/// A number with an optional suffix, within limits.
pub fn size(what: &str, text: &str, min: u64, max: u64) -> Result<u64, Failure> {
    within(what, text, size::parse, min, max)
}

fn within(
    what: &str,
    text: &str,
    parse: fn(&str) -> Result<u64, SizeError>,
    min: u64,
    max: u64,
) -> Result<u64, Failure> {
    // A negative number is a number, but never within the limits.
    let parsed = match text.strip_prefix('-').map(parse) {
        Some(Ok(_)) => Err(SizeError::Range),
        _ => parse(text),
    };
    match parsed {
        Ok(value) if (min..=max).contains(&value) => Ok(value),
        Ok(_) | Err(SizeError::Range) => fail(format!(
            "Invalid {what} specified. Must be between {min} and {max}."
        )),
        Err(SizeError::Invalid) => fail(format!("Invalid {what} specified: '{text}'.")),
    }
}

/// The largest offset and size.
pub const MAX_BYTES: u64 = i64::MAX as u64;

/// The cache mode of a name; `what` says whose it is.
pub fn cache_mode(what: &str, name: &str) -> Result<CacheMode, Failure> {
    match CacheMode::parse(name) {
        Some(mode) => Ok(mode),
        None => fail(format!("Invalid {what} option: {name}")),
    }
}

/// A limit in bytes a second.
pub fn rate(text: &str) -> Result<u64, Failure> {
    match size::parse(text) {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        _ => fail(format!("Invalid rate limit '{text}'")),
    }
}
