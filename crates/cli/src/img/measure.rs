//! `measure`: says how much space a copy of an image would take.

use std::ffi::OsString;

use serde_json::json;
use vellum::qcow2::SnapshotSelector;
use vellum_graph::open_device;
use vellum_images::measure::{Measure, MeasureSource, measure, settings};
use vellum_io::lane;
use vellum_options::{CacheMode, json};

use super::command::{
    Command, MAX_BYTES, Outcome, Subcommand, fail, incomplete, not_taken, open_failure, reading,
    size,
};
use super::create::add_options;
use super::rows::{FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, SHARE};
use super::snapshot;
use crate::output::Output;
use crate::report;
use crate::spec::{CommonArgs, Spec};

pub static MEASURE: Subcommand = Subcommand {
    spec: Spec {
        name: "measure",
        about: "Tell what a copy would take",
        usage: "\
[-f FMT|--image-opts] [-o OPTIONS] [-O OUTPUT_FMT]
       [--output OFMT] [--object OBJDEF] [-l SNAPSHOT_PARAM]
       (--size SIZE | FILENAME)",
        arguments: &[
            "-O, --target-format FMT  the format of the copy (raw)",
            "-o, --options OPTIONS  options of that format",
            "-s, --size SIZE  an image of this size, without content",
            "FILENAME  the image that would be copied",
            FORMAT,
            IMAGE_OPTS,
            "-l, --snapshot SNAPSHOT  its state in this snapshot",
            OUTPUT,
            SHARE,
            OBJECT,
        ],
        examples: "\
vellum measure -O qcow2 disk.raw
  what a copy would take
vellum measure -O qcow2 --size 1T
  what an empty disk would
",
        ..Spec::EMPTY
    },
    run,
};

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    target_format: Option<String>,
    options: Option<String>,
    size_bytes: Option<u64>,
    snapshot: Option<SnapshotSelector>,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "target-format" => arguments.target_format = Some(value),
            "options" => add_options(&mut arguments.options, value)?,
            "size" => arguments.size_bytes = Some(size("image size", &value, 0, MAX_BYTES)?),
            "snapshot" => arguments.snapshot = Some(snapshot::selector(&value)?),
            _ => return not_taken(name),
        }
        Ok(())
    })?;
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
