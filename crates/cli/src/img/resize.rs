//! `resize`: changes the virtual size of an image.

use std::ffi::OsString;

use vellum::Preallocation;
use vellum_control::options::size_value;
use vellum_control::{ImageSpec, OpenFlags, error_text, open_device};
use vellum_io::lane;

use super::command::{Command, Failure, Outcome, check_object, fail, image_spec, open_failure};
use super::help;
use super::watch::{Growth, Watch};
use crate::getopt::{OptionSpec, Shape, Takes, shapes};
use crate::{hint, report};
use vellum_control::shown_bitmaps::with_hint;

#[derive(Debug, Clone, Copy)]
enum Opt {
    Help,
    Quiet,
    Format,
    ImageOpts,
    Preallocation,
    Shrink,
    Object,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Quiet, 'q', "quiet", Takes::Nothing),
    OptionSpec::new(Opt::Format, 'f', "format", Takes::Value),
    OptionSpec::long(Opt::ImageOpts, "image-opts", Takes::Nothing),
    OptionSpec::long(Opt::Preallocation, "preallocation", Takes::Value),
    OptionSpec::long(Opt::Shrink, "shrink", Takes::Nothing),
    OptionSpec::long(Opt::Object, "object", Takes::Value),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

#[derive(Debug, Default)]
struct Arguments {
    quiet: bool,
    format: Option<String>,
    image_opts: bool,
    preallocation: Preallocation,
    shrink: bool,
}

/// The size that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NewSize {
    Bytes(u64),
    More(u64),
    Less(u64),
}

impl NewSize {
    fn parse(text: &str) -> Result<Self, Failure> {
        let bytes = |text| size_value("size", text).map_err(Failure::from);
        match text.as_bytes().first() {
            Some(b'+') => bytes(&text[1..]).map(NewSize::More),
            Some(b'-') => bytes(&text[1..]).map(NewSize::Less),
            _ => bytes(text).map(NewSize::Bytes),
        }
    }

    /// The size that it comes to; `None`: none that an image can have.
    fn of(self, old_bytes: u64) -> Option<u64> {
        let new_bytes = match self {
            NewSize::Bytes(bytes) => Some(bytes),
            NewSize::More(bytes) => old_bytes.checked_add(bytes),
            NewSize::Less(bytes) => old_bytes.checked_sub(bytes),
        };
        new_bytes.filter(|&bytes| bytes > 0 && i64::try_from(bytes).is_ok())
    }
}

pub fn run(command: Command<'_>, mut args: Vec<OsString>) -> Outcome {
    // Taken off before the options are read: `-1G` is a size.
    let size = match args.len() {
        0 | 1 => None,
        _ => args.pop(),
    };
    let mut arguments = Arguments::default();
    let mut parser = command.parser(OPTIONS, args);
    while let Some((option, value)) = parser.next_option()? {
        let value = value.unwrap_or_default();
        match option {
            Opt::Help => return help::subcommand(command),
            Opt::Quiet => arguments.quiet = true,
            Opt::Format => arguments.format = Some(value),
            Opt::ImageOpts => arguments.image_opts = true,
            Opt::Preallocation => match Preallocation::from_name(&value) {
                Some(mode) => arguments.preallocation = mode,
                None => return fail(format!("Invalid preallocation mode '{value}'")),
            },
            Opt::Shrink => arguments.shrink = true,
            Opt::Object => check_object(&value)?,
        }
    }
    let operands = parser.operands();
    let (name, size) = match (operands.as_slice(), &size) {
        ([name], Some(size)) => (name, size),
        ([] | [_], _) => {
            let message = "Expecting image file name and size";
            return Err(Failure::Usage(message.into()));
        }
        _ => {
            let message = "Extra argument(s) in command line";
            return Err(Failure::Usage(message.into()));
        }
    };
    if std::path::Path::new(size).exists() {
        hint::later(format!(
            "the size stands behind the name: vellum resize {} {name}",
            size.to_string_lossy()
        ));
    }
    let size = NewSize::parse(&size.to_string_lossy())?;
    let spec = image_spec(name, arguments.image_opts, arguments.format.as_deref())?;
    lane::block_on(resize(command, &spec, size, &arguments))
}

async fn resize(
    command: Command<'_>,
    spec: &ImageSpec,
    size: NewSize,
    arguments: &Arguments,
) -> Outcome {
    let flags = OpenFlags {
        writable: true,
        resize: true,
        discard: true,
        ..OpenFlags::default()
    };
    let device = open_device(spec, &flags)
        .await
        .map_err(|error| open_failure(&spec.name, &error))?;
    let old_bytes = device.size_bytes();
    let Some(new_bytes) = size.of(old_bytes) else {
        return fail("New image size must be positive");
    };
    if new_bytes <= old_bytes && arguments.preallocation != Preallocation::Off {
        return fail("Preallocation can only be used for growing images");
    }
    if new_bytes < old_bytes && !arguments.shrink {
        report::error("Use the --shrink option to perform a shrink operation.");
        report::warning(
            "Shrinking an image will delete all data beyond the shrunken image's end. Before \
             performing such an operation, make sure there is no important data there.",
        );
        return Ok(1);
    }
    let added_bytes = new_bytes.saturating_sub(old_bytes);
    let growth = match arguments.preallocation {
        Preallocation::Full | Preallocation::Falloc => Growth::of(&spec.name, added_bytes),
        Preallocation::Off | Preallocation::Metadata => None,
    };
    let watch = Watch::new(command.program, arguments.quiet, "Resizing", growth);
    let resized = device.resize(new_bytes, arguments.preallocation).await;
    let closed = device.close().await;
    drop(watch);
    resized.map_err(|error| {
        hint::about_space(&spec.name, &error, Some(added_bytes));
        Failure::Message(with_hint(error_text(&error)))
    })?;
    closed?;
    if !arguments.quiet {
        report::print_line("Image resized.");
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_may_be_relative() {
        let of = |text: &str| NewSize::parse(text).expect("a size").of(10 << 20);
        assert_eq!(of("5M"), Some(5 << 20));
        assert_eq!(of("+5M"), Some(15 << 20));
        assert_eq!(of("-5M"), Some(5 << 20));
        assert_eq!(of("-10M"), None);
        assert_eq!(of("-11M"), None);
        assert_eq!(of("0"), None);
        assert_eq!(of("8E"), None);
        assert!(NewSize::parse("").is_err() && NewSize::parse("--1").is_err());
    }
}
