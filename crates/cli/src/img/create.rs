//! `create`: makes a new image.

use std::ffi::OsString;

use vellum_images::create::{self, CreateRequest, ShortStorage};
use vellum_images::create_options::{format_options, not_creatable};
use vellum_io::lane;
use vellum_options::create_options::{asks_for_help, help_text, is_option_list};
use vellum_options::error_text;

use super::activity::{ActivityIndicator, Growth};
use super::command::{Command, Failure, MAX_BYTES, Outcome, check_object, fail, size};
use super::help;
use crate::getopt::{OptionSpec, Shape, Takes, shapes};
use crate::{hint, report};

#[derive(Debug, Clone, Copy)]
enum Opt {
    Help,
    Quiet,
    Format,
    Options,
    Backing,
    BackingFormat,
    Unsafe,
    Object,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Quiet, 'q', "quiet", Takes::Nothing),
    OptionSpec::new(Opt::Format, 'f', "format", Takes::Value),
    OptionSpec::new(Opt::Options, 'o', "options", Takes::Value),
    OptionSpec::new(Opt::Backing, 'b', "backing", Takes::Value),
    OptionSpec::new(Opt::BackingFormat, 'F', "backing-format", Takes::Value),
    OptionSpec::new(Opt::Unsafe, 'u', "backing-unsafe", Takes::Nothing),
    OptionSpec::long(Opt::Object, "object", Takes::Value),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

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

pub fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut request = CreateRequest {
        format: "raw".to_owned(),
        ..CreateRequest::default()
    };
    let (mut quiet, mut is_named) = (false, false);
    let mut parser = command.parser(OPTIONS, args);
    while let Some((option, value)) = parser.next_option()? {
        let value = value.unwrap_or_default();
        match option {
            Opt::Help => return help::subcommand(command),
            Opt::Quiet => quiet = true,
            Opt::Format => (request.format, is_named) = (value, true),
            Opt::Options => add_options(&mut request.options, value)?,
            Opt::Backing => request.backing = Some(value),
            Opt::BackingFormat => request.backing_format = Some(value),
            Opt::Unsafe => request.unchecked_backing = true,
            Opt::Object => check_object(&value)?,
        }
    }
    let mut operands = parser.operands().into_iter();
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
    let code = lane::block_on(make(command, &request, quiet))?;
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
