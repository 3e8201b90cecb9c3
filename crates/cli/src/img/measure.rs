//! `measure`: says how much space a copy of an image would take.

use std::ffi::OsString;

use serde_json::json;
use vellum::qcow2::SnapshotSelector;
use vellum_graph::open_device;
use vellum_images::measure::{Measure, MeasureSource, measure, settings};
use vellum_io::lane;
use vellum_options::{CacheMode, json};

use super::command::{Command, MAX_BYTES, Outcome, fail, incomplete, open_failure, reading, size};
use super::common::{self, CommonArgs};
use super::create::add_options;
use super::{help, snapshot};
use crate::getopt::{OptionSpec, Shape, Takes, shapes};
use crate::output::Output;
use crate::report;

type Opt = common::Opt<Own>;

#[derive(Debug, Clone, Copy)]
enum Own {
    TargetFormat,
    Options,
    Size,
    Snapshot,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    Opt::HELP,
    Opt::FORMAT,
    Opt::IMAGE_OPTS,
    Opt::own(Own::TargetFormat, 'O', "target-format", Takes::Value),
    Opt::own(Own::Options, 'o', "options", Takes::Value),
    Opt::OUTPUT,
    Opt::own(Own::Size, 's', "size", Takes::Value),
    Opt::own(Own::Snapshot, 'l', "snapshot", Takes::Value),
    Opt::FORCE_SHARE,
    Opt::OBJECT,
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    target_format: Option<String>,
    options: Option<String>,
    size_bytes: Option<u64>,
    snapshot: Option<SnapshotSelector>,
}

pub fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    let parsed = common::parse(command, OPTIONS, args, |option, value| {
        match option {
            Own::TargetFormat => arguments.target_format = Some(value),
            Own::Options => add_options(&mut arguments.options, value)?,
            Own::Size => arguments.size_bytes = Some(size("image size", &value, 0, MAX_BYTES)?),
            Own::Snapshot => arguments.snapshot = Some(snapshot::selector(&value)?),
        }
        Ok(())
    })?;
    let Some(common) = parsed else {
        return help::subcommand(command);
    };
    arguments.common = common;
    let operands = &arguments.common.operands;
    if operands.len() > 1 {
        return incomplete("At most one filename argument is allowed.");
    }
    let name = operands.first().map(String::as_str);
    match (name, arguments.size_bytes) {
        (None, Some(_))
            if arguments.common.image_opts
                || arguments.common.format.is_some()
                || arguments.snapshot.is_some() =>
        {
            fail("--image-opts, -f, and -l require a filename argument.")
        }
        (None, None) => incomplete("Either --size N or one filename must be specified."),
        (Some(_), Some(_)) => incomplete("--size N cannot be used together with a filename."),
        _ => lane::block_on(print_measure(&arguments, name)),
    }
}

async fn print_measure(arguments: &Arguments, name: Option<&str>) -> Outcome {
    let device = match name {
        None => None,
        Some(name) => {
            let spec = arguments.common.image(name)?;
            let flags = reading(CacheMode::default(), arguments.common.force_share);
            let opened = open_device(&spec, &flags).await;
            let device = opened.map_err(|error| open_failure(name, &error))?;
            Some(match arguments.snapshot.clone() {
                Some(selector) => snapshot::shown(&device, selector).await?,
                None => device,
            })
        }
    };
    let subject = match (&device, arguments.size_bytes) {
        (Some(device), _) => MeasureSource::Device(device),
        (None, bytes) => MeasureSource::Size(bytes.unwrap_or(0)),
    };
    let format = arguments.target_format.as_deref().unwrap_or("raw");
    if matches!(format, "file" | "host_device") {
        return fail(format!(
            "Block driver '{format}' does not support size measurement"
        ));
    }
    let settings = match settings(format, arguments.options.as_deref()) {
        Ok(settings) => settings,
        Err(error) if error.message().starts_with("Unknown file format") => {
            return Err(error.into());
        }
        Err(error) => {
            report::error(error.message());
            return fail(format!("Invalid options for file format '{format}'"));
        }
    };
    let found = measure(subject, format, &settings).await?;
    report::print(match arguments.common.output {
        Output::Human => human(&found),
        Output::Json => to_json(&found),
    });
    Ok(0)
}

fn human(found: &Measure) -> String {
    let mut text = format!(
        "required size: {}\nfully allocated size: {}\n",
        found.required_bytes, found.full_bytes
    );
    if let Some(bytes) = found.bitmaps_bytes {
        text.push_str(&format!("bitmaps size: {bytes}\n"));
    }
    text
}

fn to_json(found: &Measure) -> String {
    let mut members = json!({
        "required": found.required_bytes,
        "fully-allocated": found.full_bytes,
    });
    if let Some(bytes) = found.bitmaps_bytes {
        members["bitmaps"] = bytes.into();
    }
    json::pretty(&members) + "\n"
}
