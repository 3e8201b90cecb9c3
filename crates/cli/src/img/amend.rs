//! `amend`: changes options of an image.

use std::ffi::OsString;
use std::sync::Arc;

use vellum::luks::AsLuks;
use vellum::qcow2::AsQcow2;
use vellum::qcow2::amend::ProgressSink;
use vellum_graph::open_device;
use vellum_images::amend;
use vellum_io::lane;
use vellum_options::create_options::{asks_for_help, help_text};
use vellum_options::{CacheMode, ImageSpec, OpenFlags};

use super::command::{Command, Failure, Outcome, cache_mode, fail, open_failure};
use super::common::{self, CommonArgs};
use super::create::add_options;
use super::help;
use crate::getopt::{OptionSpec, Shape, Takes, shapes};
use crate::progress::{Progress, SharedProgress};
use crate::{hint, report};

/// Smaller steps of the progress, in percent, are not printed.
const MIN_STEP_PERCENT: f64 = 1.0;

type Opt = common::Opt<Own>;

#[derive(Debug, Clone, Copy)]
enum Own {
    Options,
    Cache,
    Force,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    Opt::HELP,
    Opt::QUIET,
    Opt::PROGRESS,
    Opt::FORMAT,
    Opt::IMAGE_OPTS,
    Opt::own(Own::Options, 'o', "options", Takes::Value),
    Opt::own(Own::Cache, 't', "cache", Takes::Value),
    Opt::own_long(Own::Force, "force", Takes::Nothing),
    Opt::OBJECT,
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    options: Option<String>,
    cache: Option<String>,
    force: bool,
}

pub fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    let parsed = common::parse(command, OPTIONS, args, |option, value| {
        match option {
            Own::Options => add_options(&mut arguments.options, value)?,
            Own::Cache => arguments.cache = Some(value),
            Own::Force => arguments.force = true,
        }
        Ok(())
    })?;
    let Some(common) = parsed else {
        return help::subcommand(command);
    };
    arguments.common = common;
    let Some(options) = arguments.options.clone() else {
        return Err(Failure::Usage("Must specify options (-o)".into()));
    };
    let (wanted, quiet) = (arguments.common.progress, arguments.common.quiet);
    let progress = Progress::new(command.program, wanted, quiet, MIN_STEP_PERCENT);
    let progress = SharedProgress::new(progress);
    let outcome = look(&options, &arguments, &progress);
    progress.end();
    outcome
}

fn look(options: &str, arguments: &Arguments, progress: &SharedProgress) -> Outcome {
    if let Some(format) = arguments
        .common
        .format
        .as_deref()
        .filter(|_| asks_for_help(options))
    {
        return print_option_help(format);
    }
    let [name] = arguments.common.operands.as_slice() else {
        return fail("Expecting one image file name");
    };
    let cache = match &arguments.cache {
        None => CacheMode::default(),
        Some(name) => cache_mode("cache", name)?,
    };
    let spec = arguments.common.image(name)?;
    lane::block_on(change(&spec, cache, options, arguments, progress))
}

fn print_option_help(format: &str) -> Outcome {
    let options = amend::options_of(format)?;
    report::print(format_args!(
        "Amend options for '{format}':\n{}",
        help_text(options)
    ));
    Ok(0)
}

async fn change(
    spec: &ImageSpec,
    cache: CacheMode,
    options: &str,
    arguments: &Arguments,
    progress: &SharedProgress,
) -> Outcome {
    let flags = OpenFlags {
        writable: true,
        cache,
        ..OpenFlags::default()
    };
    let device = open_device(spec, &flags)
        .await
        .map_err(|error| open_failure(&spec.name, &error))?;
    let format = device.info().format;
    if asks_for_help(options) {
        return print_option_help(format);
    }
    if let Some(volume) = device.as_luks() {
        let change = amend::parse_luks(options, arguments.force)?;
        progress.show(0, 1);
        let amended = volume.change_keys(change).await;
        progress.show(1, 1);
        let closed = device.close().await;
        amended?;
        closed?;
        return Ok(0);
    }
    let Some(image) = device.as_qcow2() else {
        return fail(format!(
            "Format driver '{format}' does not support option amendment"
        ));
    };
    let options = amend::parse(options, arguments.force, || image.check_key_slots())?;
    progress.show(0, 1);
    let sink = progress.clone();
    let sink: ProgressSink = Arc::new(move |done, total| sink.show(done, total));
    let amended = image.amend(options, Some(sink)).await;
    progress.show(1, 1);
    let closed = device.close().await;
    amended.inspect_err(|error| hint::about_space(&spec.name, error, None))?;
    closed?;
    Ok(0)
}
