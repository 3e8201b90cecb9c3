//! `create`: makes a new image.

use std::ffi::OsString;

use vellum_images::create::{self, CreateRequest, ShortStorage};
use vellum_images::create_options::{format_options, not_creatable};
use vellum_io::lane;
use vellum_options::create_options::{asks_for_help, help_text, is_option_list};
use vellum_options::error_text;

use super::activity::{ActivityIndicator, Growth};
use super::command::{Command, Failure, MAX_BYTES, Outcome, Subcommand, fail, not_taken, size};
use super::rows::{OBJECT, QUIET};
use crate::spec::Spec;
use crate::{hint, report};

pub static CREATE: Subcommand = Subcommand {
    spec: Spec {
        name: "create",
        about: "Make a new image",
        usage: "\
[-f FMT] [-o FMT_OPTS] [-b BACKING_FILENAME [-F BACKING_FMT]]
        [--object OBJDEF] [-u] FILENAME [SIZE[bkKMGTPE]]",
        arguments: &[
            QUIET,
            "-f, --format FMT  the format of the image (raw)",
            "-o, --options FMT_OPTS  options of the format; '-o help' lists them",
            "-b, --backing BACKING_FILENAME  the backing file",
            "-F, --backing-format BACKING_FMT  the format of BACKING_FILENAME",
            "-u, --backing-unsafe  do not look at the backing file",
            OBJECT,
            "FILENAME  the new image; what is there is lost",
            "SIZE  bytes, or with a suffix k, M, G, T, P or E (powers of 1024);\n        the \
             backing file's size if there is one",
        ],
        examples: "\
vellum create -f qcow2 disk.qcow2 20G
  an empty disk, which grows as it is written
vellum create -f qcow2 -b disk.qcow2 -F qcow2 overlay.qcow2
  an overlay: changes go there, the backing file stays as it is
vellum create -f qcow2 -o help
  what -o takes
",
        ..Spec::EMPTY
    },
    run,
};

/// Adds one `-o` text to those before it.
pub fn add_options(all: &mut Option<String>, text: String) -> Result<(), Failure> {
    if !is_option_list(&text) {
        return fail(format!("Invalid option list: {text}"));
    }
    *all = Some(match all.take() {
        Some(before) => format!("{before},{text}"),
        None => text,
    });
    Ok(())
}

/// Prints the options of a format, and those that a named file adds.
pub fn print_option_help(format: &str, filename: Option<&str>) -> Outcome {
    let unknown = || Failure::Message(not_creatable(format));
    match filename {
        Some(filename) => {
            let options = create::options_on(format, filename).ok_or_else(unknown)?;
            report::print(format_args!("Supported options:\n{}", help_text(&options)));
        }
        None => {
            let options = format_options(format).ok_or_else(unknown)?;
            report::print(format_args!(
                "Supported {format} options:\n{}\nThe protocol level may support further options.\n\
                 Specify the target filename to include those options.\n",
                help_text(options)
            ));
        }
    }
    Ok(0)
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut request = CreateRequest::default();
    let common = command.parse(args, |name, value| {
        match name {
            "options" => add_options(&mut request.options, value)?,
            "backing" => request.backing = Some(value),
            "backing-format" => request.backing_format = Some(value),
            "backing-unsafe" => request.unchecked_backing = true,
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let is_named = common.format.is_some();
    request.format = common.format.unwrap_or_else(|| "raw".to_owned());
    let mut operands = common.operands.into_iter();
    let filename = operands.next();
    if request.options.as_deref().is_some_and(asks_for_help) {
        return print_option_help(&request.format, filename.as_deref());
    }
    let Some(filename) = filename else {
        return Err(Failure::Usage("Expecting image file name".into()));
    };
    request.filename = filename;
    request.size_bytes = match operands.next() {
        Some(text) => Some(size("image size", &text, 0, MAX_BYTES)?),
        None => None,
    };
    if let Some(extra) = operands.next() {
        return Err(Failure::Usage(format!("Unexpected argument: {extra}")));
    }
    let code = lane::block_on(make(command, &request, common.quiet))?;
    if !is_named {
        hint::about_raw(&request.filename, "-f");
    }
    Ok(code)
}

async fn make(command: Command<'_>, request: &CreateRequest, quiet: bool) -> Outcome {
    let name = &request.filename;
    let failed = |error: vellum::Error| Failure::Message(format!("{name}: {}", error_text(&error)));
    let settings = create::prepare(request).await.map_err(failed)?;
    if !quiet {
        report::print_line(format_args!(
            "Formatting '{name}', fmt={} {}",
            request.format,
            settings.summary()
        ));
    }
    let size_bytes = settings.integer("size");
    let growth = match settings.text("preallocation") {
        Some("full" | "falloc") => Growth::of(name, size_bytes.unwrap_or(0)),
        _ => None,
    };
    let indicator = ActivityIndicator::new(command.program, quiet, "Reserving space", growth);
    let made = create::make_on(name, &request.format, &settings).await;
    drop(indicator);
    let short = made.map_err(|error| {
        hint::about_space(name, &error, size_bytes);
        failed(error)
    })?;
    if let Some(short) = short.filter(|_| report::is_own() && !quiet) {
        warn_of_short(name, short);
    }
    Ok(0)
}

/// Says that a device or export is too small for all of the image's disk. QEMU's programs do not.
fn warn_of_short(name: &str, short: ShortStorage) {
    let ShortStorage {
        len_bytes,
        full_bytes,
    } = short;
    report::warning(format_args!(
        "'{name}' has {len_bytes} bytes, but the image needs {full_bytes} bytes when all of its \
         disk is written. Writes will fail with 'No space left on device' before that: extend \
         '{name}' to {full_bytes} bytes, or create a smaller disk"
    ));
}
