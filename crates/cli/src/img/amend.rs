//! `amend`: changes options of an image.

use std::ffi::OsString;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use vellum::qcow2::amend::ProgressSink;
use vellum_control::create_options::{asks_for_help, help_text};
use vellum_control::{CacheMode, ImageSpec, OpenFlags, amend, open_device};
use vellum_io::lane;

use super::command::{
    Command, Failure, Outcome, cache_mode, check_object, fail, image_spec, open_failure,
};
use super::create::add_options;
use super::help;
use crate::getopt::{OptionSpec, Shape, Takes, shapes};
use crate::progress::Progress;
use crate::{hint, report};

/// Smaller steps of the progress, in percent, are not printed.
const MIN_STEP_PERCENT: f64 = 1.0;

#[derive(Debug, Clone, Copy)]
enum Opt {
    Help,
    Quiet,
    Progress,
    Format,
    ImageOpts,
    Options,
    Cache,
    Force,
    Object,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    OptionSpec::new(Opt::Help, 'h', "help", Takes::Nothing),
    OptionSpec::new(Opt::Quiet, 'q', "quiet", Takes::Nothing),
    OptionSpec::new(Opt::Progress, 'p', "progress", Takes::Nothing),
    OptionSpec::new(Opt::Format, 'f', "format", Takes::Value),
    OptionSpec::long(Opt::ImageOpts, "image-opts", Takes::Nothing),
    OptionSpec::new(Opt::Options, 'o', "options", Takes::Value),
    OptionSpec::new(Opt::Cache, 't', "cache", Takes::Value),
    OptionSpec::long(Opt::Force, "force", Takes::Nothing),
    OptionSpec::long(Opt::Object, "object", Takes::Value),
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

#[derive(Debug, Default)]
struct Arguments {
    quiet: bool,
    progress: bool,
    format: Option<String>,
    image_opts: bool,
    options: Option<String>,
    cache: Option<String>,
    force: bool,
}

pub fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    let mut parser = command.parser(OPTIONS, args);
    while let Some((option, value)) = parser.next_option()? {
        let value = value.unwrap_or_default();
        match option {
            Opt::Help => return help::subcommand(command),
            Opt::Quiet => arguments.quiet = true,
            Opt::Progress => arguments.progress = true,
            Opt::Format => arguments.format = Some(value),
            Opt::ImageOpts => arguments.image_opts = true,
            Opt::Options => add_options(&mut arguments.options, value)?,
            Opt::Cache => arguments.cache = Some(value),
            Opt::Force => arguments.force = true,
            Opt::Object => check_object(&value)?,
        }
    }
    let Some(options) = arguments.options.clone() else {
        return Err(Failure::Usage("Must specify options (-o)".into()));
    };
    let meter = Meter::new(command, &arguments);
    let outcome = look(parser.operands(), &options, &arguments, &meter);
    meter.end();
    outcome
}

/// Progress that the engine tells, and that ends with the tool whatever happens.
#[derive(Clone)]
struct Meter(Arc<Mutex<Option<Progress>>>);

impl Meter {
    fn new(command: Command<'_>, arguments: &Arguments) -> Self {
        let (wanted, quiet) = (arguments.progress, arguments.quiet);
        let progress = Progress::new(command.program, wanted, quiet, MIN_STEP_PERCENT);
        Meter(Arc::new(Mutex::new(Some(progress))))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Progress>> {
        self.0.lock()
    }

    fn show(&self, done: u64, total: u64) {
        if let Some(progress) = self.lock().as_mut() {
            progress.show(done, total);
        }
    }

    fn end(&self) {
        if let Some(progress) = self.lock().take() {
            progress.end();
        }
    }
}

fn look(operands: Vec<String>, options: &str, arguments: &Arguments, meter: &Meter) -> Outcome {
    if let Some(format) = arguments
        .format
        .as_deref()
        .filter(|_| asks_for_help(options))
    {
        return print_option_help(format);
    }
    let [name] = operands.as_slice() else {
        return fail("Expecting one image file name");
    };
    let cache = match &arguments.cache {
        None => CacheMode::default(),
        Some(name) => cache_mode("cache", name)?,
    };
    let spec = image_spec(name, arguments.image_opts, arguments.format.as_deref())?;
    lane::block_on(change(&spec, cache, options, arguments, meter))
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
    meter: &Meter,
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
        meter.show(0, 1);
        let amended = volume.change_keys(change).await;
        meter.show(1, 1);
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
    meter.show(0, 1);
    let sink = meter.clone();
    let sink: ProgressSink = Arc::new(move |done, total| sink.show(done, total));
    let amended = image.amend(options, Some(sink)).await;
    meter.show(1, 1);
    let closed = device.close().await;
    amended.inspect_err(|error| hint::about_space(&spec.name, error, None))?;
    closed?;
    Ok(0)
}
