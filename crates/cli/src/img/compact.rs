//! `compact`: makes an image's file as short as what is allocated in it.

use std::ffi::OsString;
use std::sync::Arc;

use serde_json::json;
use vellum::BlockDevice;
use vellum::qcow2::AsQcow2;
use vellum_graph::open_device;
use vellum_images::compact::{Compacted, compact};
use vellum_io::lane;
use vellum_jobs::job::JobControl;
use vellum_options::{CacheMode, ImageSpec, OpenFlags, error_text};

use super::command::{
    Command, Failure, Outcome, cache_mode, fail, install_bulk_lane, open_failure, rate,
};
use super::common::{self, CommonArgs};
use super::help;
use crate::getopt::{OptionSpec, Shape, Takes, shapes};
use crate::output::Output;
use crate::progress::{Progress, SharedProgress};
use crate::report;
use crate::size::human;

type Opt = common::Opt<Own>;

#[derive(Debug, Clone, Copy)]
enum Own {
    Cache,
    Rate,
}

const OPTIONS: &[OptionSpec<Opt>] = &[
    Opt::HELP,
    Opt::QUIET,
    Opt::PROGRESS,
    Opt::FORMAT,
    Opt::IMAGE_OPTS,
    Opt::OUTPUT,
    Opt::own(Own::Cache, 't', "cache", Takes::Value),
    Opt::own(Own::Rate, 'r', "rate", Takes::Value),
    Opt::OBJECT,
];

/// The options, as completions and manuals show them.
pub fn options() -> Vec<Shape> {
    shapes(OPTIONS)
}

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    cache: CacheMode,
    rate_bytes: u64,
}

pub fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    let parsed = common::parse(command, OPTIONS, args, |option, value| {
        match option {
            Own::Cache => arguments.cache = cache_mode("cache", &value)?,
            Own::Rate => arguments.rate_bytes = rate(&value)?,
        }
        Ok(())
    })?;
    let Some(common) = parsed else {
        return help::subcommand(command);
    };
    arguments.common = common;
    let spec = arguments.common.one_image()?;
    install_bulk_lane(arguments.cache.direct)?;
    lane::block_on(open_and_compact(command, &spec, &arguments))
}

async fn open_and_compact(
    command: Command<'_>,
    spec: &ImageSpec,
    arguments: &Arguments,
) -> Outcome {
    let flags = OpenFlags {
        writable: true,
        cache: arguments.cache,
        no_backing: true,
        ..OpenFlags::default()
    };
    let device = open_device(spec, &flags).await;
    let device = device.map_err(|error| open_failure(&spec.name, &error))?;
    let (wanted, quiet) = (arguments.common.progress, arguments.common.quiet);
    let progress = SharedProgress::new(Progress::new(command.program, wanted, quiet, 1.0));
    let done = compact_device(&device, arguments, &progress).await;
    progress.end();
    let closed = device.close().await;
    let (done, cluster_bytes) = done?;
    closed.map_err(|error| Failure::Message(error_text(&error)))?;
    match arguments.common.output {
        Output::Json => report::print_line(to_json(&spec.name, &done)),
        Output::Human if quiet => {}
        Output::Human => report::print(to_text(&done, cluster_bytes)),
    }
    Ok(0)
}

async fn compact_device(
    device: &Arc<dyn BlockDevice>,
    arguments: &Arguments,
    progress: &SharedProgress,
) -> Result<(Compacted, u64), Failure> {
    let Some(image) = device.as_qcow2() else {
        return fail("Images of this format are not compacted: convert makes a short one");
    };
    let control = JobControl::new();
    control.speed().set(arguments.rate_bytes);
    let show = |done_bytes, total_bytes| progress.show(done_bytes, total_bytes);
    let done = compact(image, &control, show).await;
    let done = done
        .map_err(|error| Failure::Message(format!("Compaction failed: {}", error_text(&error))))?;
    Ok((done, image.header().geometry().cluster_size_bytes()))
}

fn to_text(done: &Compacted, cluster_bytes: u64) -> String {
    let progress = &done.progress;
    let mut text = format!(
        "The file had {}, and has {}; {} were moved.\n",
        human(progress.old_file_bytes),
        human(progress.file_bytes),
        human(progress.moved_bytes)
    );
    if let Some(leaks) = done.leaks_text(cluster_bytes) {
        text += &format!("{leaks}.\n");
    }
    text
}

fn to_json(name: &str, done: &Compacted) -> String {
    let report = json!({
        "filename": name,
        "old-file-bytes": done.progress.old_file_bytes,
        "file-bytes": done.progress.file_bytes,
        "moved-bytes": done.progress.moved_bytes,
        "leaked-bytes": done.leaked_bytes,
    });
    serde_json::to_string_pretty(&report).unwrap_or_default()
}
