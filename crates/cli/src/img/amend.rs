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

use super::command::{
    Command, Failure, Outcome, Subcommand, cache_mode, fail, not_taken, open_failure,
};
use super::create::add_options;
use super::rows::{CACHE, FILENAME, FORMAT, IMAGE_OPTS, OBJECT, PROGRESS, QUIET};
use crate::progress::{Progress, SharedProgress};
use crate::spec::{CommonArgs, Spec};
use crate::{hint, report};

/// Smaller steps of the progress, in percent, are not printed.
const MIN_STEP_PERCENT: f64 = 1.0;

pub static AMEND: Subcommand = Subcommand {
    spec: Spec {
        name: "amend",
        about: "Change options of an image",
        usage: "\
[-f FMT | --image-opts] [-t CACHE] [--force] [-p] [-q]
        [--object OBJDEF] -o OPTIONS FILENAME",
        arguments: &[
            QUIET,
            PROGRESS,
            FORMAT,
            IMAGE_OPTS,
            CACHE,
            "-o, --options OPTIONS  what to change; '-o help' lists it",
            "--force  do what may lose access to the data",
            OBJECT,
            FILENAME,
        ],
        examples: "\
vellum amend -o help -f qcow2
  what can be changed
vellum amend -o compat=1.1 disk.qcow2
  make an image of version 2 one of version 3
",
        ..Spec::EMPTY
    },
    run,
};

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    options: Option<String>,
    cache: Option<String>,
    force: bool,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "options" => add_options(&mut arguments.options, value)?,
            "cache" => arguments.cache = Some(value),
            "force" => arguments.force = true,
            _ => return not_taken(name),
        }
        Ok(())
    })?;
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
