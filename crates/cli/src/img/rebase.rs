//! `rebase`: gives an image another backing file.

use std::ffi::OsString;
use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::qcow2::BackingName;
use vellum::{BlockDevice, ErrorKind};
use vellum_graph::probe::is_format_name;
use vellum_graph::{foreign, open_device};
use vellum_images::chain;
use vellum_io::error::errno_text;
use vellum_io::lane;
use vellum_jobs::copy::{CopyError, CopyOptions, Step};
use vellum_jobs::rebase::{RebaseOptions, rebase};
use vellum_options::{CacheMode, ImageSpec, OpenFlags, error_text};

use super::command::{
    Command, Failure, Outcome, Subcommand, cache_mode, fail, install_bulk_lane, not_taken,
    one_name, open_failure,
};
use super::cut_short;
use super::rows::{CACHE, FILENAME, FORMAT, IMAGE_OPTS, OBJECT, PROGRESS, QUIET, SHARE};
use crate::hint;
use crate::progress::{Progress, ProgressReporter};
use crate::report;
use crate::spec::{CommonArgs, Spec};

pub static REBASE: Subcommand = Subcommand {
    spec: Spec {
        name: "rebase",
        about: "Change the backing file of an image",
        usage: "\
[-f FMT | --image-opts] [-t CACHE] [-q] [-U] [-p]
        [-b BACKING_FILENAME [-F BACKING_FMT] [-T BACKING_CACHE]] [-u]
        [--object OBJDEF] [-c] FILENAME",
        arguments: &[
            QUIET,
            PROGRESS,
            FORMAT,
            IMAGE_OPTS,
            CACHE,
            "-b, --backing BACKING_FILENAME|\"\"  the new backing file, or none",
            "-F, --backing-format BACKING_FMT  the format of BACKING_FILENAME",
            "-T, --backing-cache CACHE  cache mode of the backing files (writeback)",
            "-u, --backing-unsafe  change the name only; nothing is read or copied",
            "-c, --compress  compress what is copied",
            SHARE,
            OBJECT,
            FILENAME,
        ],
        examples: "\
vellum rebase -b new.qcow2 -F qcow2 overlay.qcow2
  another backing file; what it lacks is copied into the overlay
vellum rebase -u -b /new/place/base.qcow2 -F qcow2 overlay.qcow2
  the same one at another place: only the name is changed
vellum rebase -b '' overlay.qcow2
  none: the image stands alone then
",
        ..Spec::EMPTY
    },
    run,
};

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    cache: Option<String>,
    backing: Option<String>,
    backing_format: Option<String>,
    backing_cache: Option<String>,
    change_name_only: bool,
    compress: bool,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "cache" => arguments.cache = Some(value),
            "backing" => arguments.backing = Some(value),
            "backing-format" => arguments.backing_format = Some(value),
            "backing-cache" => arguments.backing_cache = Some(value),
            "backing-unsafe" => arguments.change_name_only = true,
            "compress" => arguments.compress = true,
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let name = one_name(&arguments.common.operands)?;
    if !arguments.change_name_only && arguments.backing.is_none() {
        let message = "Must specify backing file (-b) or use unsafe mode (-u)";
        return Err(Failure::Usage(message.into()));
    }
    let mode = |what, name: &Option<String>| match name {
        Some(name) => cache_mode(what, name),
        None => Ok(CacheMode::default()),
    };
    let cache = mode("cache", &arguments.cache)?;
    let backing_cache = mode("source cache", &arguments.backing_cache)?;
    let spec = arguments.common.image(name)?;
    install_bulk_lane(cache.direct || backing_cache.direct)?;
    lane::block_on(work(command, &spec, [cache, backing_cache], &arguments))
}

async fn work(
    command: Command<'_>,
    spec: &ImageSpec,
    [cache, backing_cache]: [CacheMode; 2],
    arguments: &Arguments,
) -> Outcome {
    let flags = OpenFlags {
        writable: true,
        cache,
        no_backing: arguments.change_name_only,
        read_once: true,
        ..OpenFlags::default()
    };
    let image = open_device(spec, &flags)
        .await
        .map_err(|error| open_failure(&spec.name, &error))?;
    if arguments.compress && image.as_qcow2().is_none() {
        return fail("Compression not supported for this file format");
    }
    if let Some(format) = &arguments.backing_format
        && !is_format_name(format)
    {
        return fail(format!("Invalid format name: '{format}'"));
    }
    if arguments.change_name_only {
        let (wanted, quiet) = (arguments.common.progress, arguments.common.quiet);
        let mut progress = Progress::new(command.program, wanted, quiet, 1.0);
        progress.show(0, 1);
        progress.show(1, 1);
        progress.end();
    } else {
        cut_short::refuse(std::slice::from_ref(&image)).await?;
        let new = open_new(spec, &image, backing_cache, arguments).await?;
        copy(command, &image, new.as_ref(), arguments).await?;
    }
    change_name(&image, arguments).await?;
    image
        .close()
        .await
        .map_err(|error| Failure::Message(error_text(&error)))?;
    Ok(0)
}

/// Opens the new backing file, or finds it in the chain; `None`: there is to be none.
async fn open_new(
    spec: &ImageSpec,
    image: &Arc<dyn BlockDevice>,
    cache: CacheMode,
    arguments: &Arguments,
) -> Result<Option<Arc<dyn BlockDevice>>, Failure> {
    let name = arguments.backing.as_deref().unwrap_or_default();
    if name.is_empty() {
        return Ok(None);
    }
    let full = chain::resolve_backing(image, name).map_err(|error| {
        Failure::Message(format!(
            "Could not resolve backing filename: {}",
            error_text(&error)
        ))
    })?;
    let found = chain::find_backing_by_name_alone(spec, image, &full);
    if let Some(device) = found.map_err(|error| Failure::Message(error_text(&error)))? {
        return Ok(Some(device));
    }
    let flags = OpenFlags {
        cache,
        force_share: arguments.common.force_share,
        read_once: true,
        ..OpenFlags::default()
    };
    let spec = ImageSpec::filename(full).with_format(arguments.backing_format.as_deref());
    let opened = open_device(&spec, &flags).await;
    opened.map(Some).map_err(|error| {
        let cause = error_text(&error);
        Failure::Message(format!("Could not open new backing file '{name}': {cause}"))
    })
}

async fn copy(
    command: Command<'_>,
    image: &Arc<dyn BlockDevice>,
    new: Option<&Arc<dyn BlockDevice>>,
    arguments: &Arguments,
) -> Result<(), Failure> {
    let geometry = image.as_qcow2().map(|image| image.header().geometry());
    let unit_bytes = geometry.map_or(SECTOR_BYTES, |geometry| match arguments.compress {
        true => geometry.cluster_size_bytes(),
        false => geometry.subcluster_size_bytes(),
    });
    let options = RebaseOptions {
        parallel: CopyOptions::default().parallel,
        unit_bytes,
        compress: arguments.compress,
    };
    let old = image.backing();
    let (wanted, quiet) = (arguments.common.progress, arguments.common.quiet);
    let mut reporter = ProgressReporter::new(command.program, wanted, quiet);
    reporter.progress.show(0, 1);
    let copied = rebase(image, old.as_ref(), new, &options, &mut reporter).await;
    if copied.is_ok() {
        reporter.progress.show(1, 1);
    }
    reporter.progress.end();
    copied.map_err(|error| {
        hint::about_space(&image.info().name, &error.cause, Some(reporter.left_bytes));
        failure(error)
    })
}

const SECTOR_BYTES: u64 = 512;

fn failure(error: CopyError) -> Failure {
    report::about_cause(&error.cause);
    let cause = errno_text(error.cause.errno());
    Failure::Message(match error.step {
        Step::Status => format!("error while reading image metadata: {cause}"),
        Step::Read => "error while reading from old backing file".to_owned(),
        Step::ReadShown => "error while reading from new backing file".to_owned(),
        Step::Write => format!("Error while writing to COW image: {cause}"),
    })
}

const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;

async fn change_name(image: &Arc<dyn BlockDevice>, arguments: &Arguments) -> Result<(), Failure> {
    let name = arguments.backing.clone().filter(|name| !name.is_empty());
    let format = arguments.backing_format.clone();
    let shown = arguments.backing.as_deref().unwrap_or("(null)");
    let refuse = |why: &str| {
        fail(format!(
            "Could not change the backing file to '{shown}': {why}"
        ))
    };
    if name.is_some() && format.is_none() {
        return refuse("backing format must be specified");
    }
    let backing = name.map(|name| BackingName { name, format });
    let changed = match image.as_qcow2() {
        Some(qcow2) => qcow2.set_backing_file(backing).await,
        None => foreign::set_backing_file(&**image, backing).await,
    };
    match changed {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::Unsupported => refuse("Operation not supported"),
        Err(error) if error.errno() == ENOSPC => refuse("No space left in the file header"),
        Err(error) if error.errno() == EINVAL => refuse("Invalid argument"),
        Err(error) => refuse(&errno_text(error.errno())),
    }
}
