//! `commit`: writes what an overlay holds into an image below it.

use std::ffi::OsString;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum_graph::{foreign, open_device};
use vellum_images::chain;
use vellum_io::error::errno_text;
use vellum_io::lane;
use vellum_jobs::Speed;
use vellum_jobs::commit::{CommitError, CommitOptions, commit};
use vellum_options::{CacheMode, ImageSpec, OpenFlags, Source, error_text};

use super::command::{
    Command, Failure, MAX_BYTES, Outcome, Subcommand, cache_mode, fail, install_bulk_lane,
    not_taken, one_name, open_failure, size,
};
use super::cut_short;
use super::rows::{FILENAME, FORMAT, IMAGE_OPTS, OBJECT, PROGRESS, QUIET};
use crate::progress::{Progress, ProgressReporter};
use crate::spec::{CommonArgs, Spec};
use crate::{hint, report};

pub static COMMIT: Subcommand = Subcommand {
    spec: Spec {
        name: "commit",
        about: "Write an overlay into its backing file",
        usage: "\
[-f FMT | --image-opts] [-t CACHE_MODE] [-b BASE_IMG] [-d]
        [-r RATE] [--object OBJDEF] FILENAME",
        arguments: &[
            QUIET,
            PROGRESS,
            FORMAT,
            IMAGE_OPTS,
            "-t, --cache CACHE_MODE  cache mode of FILENAME (writeback)",
            "-d, --drop  do not empty FILENAME afterwards",
            "-b, --base BASE_IMG  the image of the chain to commit to, instead of the backing file \
             (implies --drop)",
            "-r, --rate RATE  bytes a second at most",
            OBJECT,
            FILENAME,
        ],
        closing: "
Called vellum, --base must be given, since other images may stand on the file that is changed. If
it is the backing file of FILENAME, the image is emptied unless there is --drop.
",
        examples: "\
vellum commit overlay.qcow2
  write an overlay into its backing file, and empty it
vellum commit -b base.qcow2 overlay.qcow2
  into one further below; the overlay stays as it is
",
        ..Spec::EMPTY
    },
    run,
};

#[derive(Debug)]
struct Arguments {
    common: CommonArgs,
    cache: String,
    /// The image keeps what it holds. [`Arguments::empties_top`] says what is done in the end.
    drop: bool,
    base: Option<String>,
    rate_bytes: Option<u64>,
}

impl Arguments {
    /// Whether the image is emptied in the end. QEMU's tool never does so where a base is named. Under our
    /// own name one always is, so what counts is whether the image shows the base once it is empty.
    fn empties_top(&self, is_own: bool, layers: u32) -> bool {
        let shows_base = self.base.is_none() || is_own && layers == 1;
        shows_base && !self.drop
    }
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments {
        common: CommonArgs::default(),
        cache: "writeback".to_owned(),
        drop: false,
        base: None,
        rate_bytes: None,
    };
    arguments.common = command.parse(args, |name, value| {
        match name {
            "cache" => arguments.cache = value,
            "drop" => arguments.drop = true,
            "base" => arguments.base = Some(value),
            "rate" => arguments.rate_bytes = Some(size("rate limit", &value, 0, MAX_BYTES)?),
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let name = one_name(&arguments.common.operands)?;
    let cache = cache_mode("cache", &arguments.cache)?;
    let spec = arguments.common.image(name)?;
    install_bulk_lane(cache.direct)?;
    lane::block_on(work(command, &spec, cache, &arguments))
}

async fn work(
    command: Command<'_>,
    spec: &ImageSpec,
    cache: CacheMode,
    arguments: &Arguments,
) -> Outcome {
    let (wanted, quiet) = (arguments.common.progress, arguments.common.quiet);
    let mut reporter = ProgressReporter::new(command.program, wanted, quiet);
    let is_own = report::is_own_name(command.program);
    let base = (arguments.base.as_deref(), is_own);
    let found = find_base(spec, cache, base, &mut reporter.progress).await;
    let (layers, base_spec) = match found {
        Ok(found) => found,
        Err(failure) => {
            reporter.progress.end();
            return Err(failure);
        }
    };
    let flags = OpenFlags {
        writable: true,
        cache,
        discard: true,
        ..OpenFlags::default()
    };
    let opened = |name: String| move |error| open_failure(&name, &error);
    let top_flags = OpenFlags {
        unlocked_from: Some(layers),
        read_once: true,
        ..flags.clone()
    };
    let top = open_device(spec, &top_flags)
        .await
        .map_err(opened(spec.name.clone()))?;
    let base = open_device(&base_spec, &flags)
        .await
        .map_err(opened(base_spec.name.clone()))?;
    foreign::keep_identity(&*base);
    let options = CommitOptions {
        layers,
        empty_top: arguments.empties_top(is_own, layers),
        speed: Speed::new(arguments.rate_bytes.unwrap_or(0)),
        ..CommitOptions::default()
    };
    let committed = commit(&top, &base, &options, &mut reporter).await;
    if committed.is_ok() {
        reporter.progress.show(1, 1);
    }
    reporter.progress.end();
    let committed = match committed {
        Ok(()) => foreign::change_identity(&*base)
            .await
            .map_err(CommitError::Flush),
        failed => failed,
    };
    let closed = close(&base).await.and(close(&top).await);
    committed.map_err(|error| {
        hint::about_space(&base_spec.name, error.cause(), Some(reporter.left_bytes));
        failure(spec, error)
    })?;
    closed?;
    if !arguments.common.quiet {
        report::print_line("Image committed.");
    }
    Ok(0)
}

/// Looks for the base: how far below the image it stands, and how to open it. Where it has to be named
/// (`is_needed`), that nothing names it is refused.
async fn find_base(
    spec: &ImageSpec,
    cache: CacheMode,
    (name, is_needed): (Option<&str>, bool),
    progress: &mut Progress,
) -> Result<(u32, ImageSpec), Failure> {
    let flags = OpenFlags {
        cache,
        ..OpenFlags::default()
    };
    let top = open_device(spec, &flags)
        .await
        .map_err(|error| open_failure(&spec.name, &error))?;
    cut_short::refuse(std::slice::from_ref(&top)).await?;
    progress.show(0, 1);
    let found = match name {
        Some(name) => chain::find_backing(&top, name),
        None => top.backing().map(|base| (1, base)),
    };
    match (found, name) {
        (Some((_, base)), None) if is_needed => fail(not_named(spec, &base.info().name)),
        (Some((layers, _)), _) => {
            let base = chain::spec_below(spec, &top, layers);
            let base = base.map_err(|error| Failure::Message(error_text(&error)))?;
            Ok((layers, base))
        }
        (None, Some(name)) => fail(format!(
            "Did not find '{name}' in the backing chain of '{}'",
            spec.name
        )),
        (None, None) => fail("Image does not have a backing file"),
    }
}

/// The refusal to write into a file that only the image's header names: other images may stand on it.
fn not_named(spec: &ImageSpec, base: &str) -> String {
    format!(
        "A commit of '{}' writes into '{base}', which changes every other image that stands on it: if \
         that is meant, name the image to write into with --base '{base}'",
        spec.name
    )
}

async fn close(device: &Arc<dyn BlockDevice>) -> Result<(), Failure> {
    let closed = device.close().await;
    closed.map_err(|error| Failure::Message(error_text(&error)))
}

fn failure(spec: &ImageSpec, error: CommitError) -> Failure {
    report::about_cause(error.cause());
    let cause = errno_text(error.cause().errno());
    Failure::Message(match error {
        CommitError::Empty(error) => {
            let name = match &spec.source {
                Source::Filename(name) if !name.starts_with("json:") => name.as_str(),
                _ => error.target_name().unwrap_or("the image"),
            };
            format!("Failed to empty {name}: {cause}")
        }
        _ => format!("Block job failed: {cause}"),
    })
}
