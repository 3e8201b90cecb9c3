//! `resize`: changes the virtual size of an image.

use std::ffi::OsString;

use vellum::Preallocation;
use vellum_daemon::shown_bitmaps::with_hint;
use vellum_graph::open_device;
use vellum_io::lane;
use vellum_options::options::size_value;
use vellum_options::{ImageSpec, OpenFlags, error_text};

use super::activity::{ActivityIndicator, Growth};
use super::command::{Command, Failure, Outcome, Subcommand, fail, not_taken, open_failure};
use super::rows::{FILENAME, FORMAT, IMAGE_OPTS, OBJECT, QUIET};
use crate::spec::{CommonArgs, Spec};
use crate::{hint, report};

pub static RESIZE: Subcommand = Subcommand {
    spec: Spec {
        name: "resize",
        about: "Change the size of an image",
        usage: "\
[-f FMT | --image-opts] [--preallocation PREALLOC] [--shrink]
        [--object OBJECTDEF] [-q] FILENAME [+-]SIZE[bkKMGTPE]",
        arguments: &[
            QUIET,
            FORMAT,
            IMAGE_OPTS,
            "--shrink  let the image become smaller; what lies beyond its end is lost",
            "--preallocation PREALLOC  how new space is made: off, metadata, falloc or full (off)",
            OBJECT,
            FILENAME,
            "[+-]SIZE[bkKMGTPE]  the new size, or what is added to or taken from the old one",
        ],
        examples: "\
vellum resize disk.qcow2 +10G
  larger by so much
vellum resize --shrink disk.qcow2 5G
  smaller: what lies beyond is lost, so shrink its file systems before
",
        ..Spec::EMPTY
    },
    run,
};

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
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

fn run(command: Command<'_>, mut args: Vec<OsString>) -> Outcome {
    // Taken off before the options are read: `-1G` is a size.
    let size = match args.len() {
        0 | 1 => None,
        _ => args.pop(),
    };
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "preallocation" => match Preallocation::from_name(&value) {
                Some(mode) => arguments.preallocation = mode,
                None => return fail(format!("Invalid preallocation mode '{value}'")),
            },
            "shrink" => arguments.shrink = true,
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let (name, size) = match (arguments.common.operands.as_slice(), &size) {
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
    let spec = arguments.common.image(name)?;
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
    let indicator =
        ActivityIndicator::new(command.program, arguments.common.quiet, "Resizing", growth);
    let resized = device.resize(new_bytes, arguments.preallocation).await;
    let closed = device.close().await;
    drop(indicator);
    resized.map_err(|error| {
        hint::about_space(&spec.name, &error, Some(added_bytes));
        Failure::Message(with_hint(error_text(&error)))
    })?;
    closed?;
    if !arguments.common.quiet {
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
