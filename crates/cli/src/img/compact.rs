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
    Command, Failure, Outcome, Subcommand, cache_mode, fail, install_bulk_lane, not_taken,
    open_failure, rate,
};
use super::rows::{CACHE, FILENAME, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, PROGRESS, QUIET};
use crate::output::Output;
use crate::progress::{Progress, SharedProgress};
use crate::report;
use crate::size::human;
use crate::spec::{CommonArgs, Spec};

pub static COMPACT: Subcommand = Subcommand {
    spec: Spec {
        name: "compact",
        about: "Make an image's file as short as what is allocated in it",
        usage: "\
[-f FMT | --image-opts] [-r RATE] [-t CACHE] [--output FMT] [-p] [-q]
        [--object OBJDEF] FILENAME",
        arguments: &[
            QUIET,
            PROGRESS,
            FORMAT,
            IMAGE_OPTS,
            OUTPUT,
            CACHE,
            "-r, --rate RATE  move so many bytes in a second at most",
            OBJECT,
            FILENAME,
        ],
        examples: "\
vellum compact disk.qcow2
  move what lies at its end into gaps, and cut the file there
vellum ctl compact disk
  the same of a disk that a daemon serves, while its guest goes on
",
        ..Spec::EMPTY
    },
    run,
};

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    cache: CacheMode,
    rate_bytes: u64,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "cache" => arguments.cache = cache_mode("cache", &value)?,
            "rate" => arguments.rate_bytes = rate(&value)?,
            _ => return not_taken(name),
        }
        Ok(())
    })?;
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
