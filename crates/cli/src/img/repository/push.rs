//! `push`: puts a disk into a repository.

use std::ffi::OsString;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum_graph::open_device;
use vellum_graph::repository::{Named, Tracking, dirty_of};
use vellum_io::lane;
use vellum_options::{CacheMode, ImageSpec, OpenFlags};
use vellum_repository::{DiskName, PushId, PushOptions, Pushed, Repository, Since, push};

use super::super::command::{
    Command, Failure, Outcome, Subcommand, cache_mode, fail, install_bulk_lane, not_taken, number,
    open_failure, reading_once,
};
use super::super::cut_short;
use super::super::rows::{FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, PROGRESS, QUIET, REPOSITORY, SHARE};
use super::{disk_name, failed, manifest_json, named, sizes};
use crate::output::Output;
use crate::progress::Progress;
use crate::report;
use crate::spec::{CommonArgs, Spec};

pub static PUSH: Subcommand = Subcommand {
    spec: Spec {
        name: "push",
        about: "Put a disk into a repository",
        usage: "\
[-f FMT | --image-opts] [--bitmap NAME | --since TAG[@NUMBER] | --full] [--track]
        [--level LEVEL] [--take-over] [-T CACHE_MODE] [-U] [-p] [-q] [--output OUTPUT]
        [--object OBJDEF] DISK REPOSITORY[:TAG]",
        arguments: &[
            QUIET,
            PROGRESS,
            FORMAT,
            IMAGE_OPTS,
            "--track  leave a bitmap in the image that notes what changes from now on",
            "--since TAG[@NUMBER]  read what has changed since then, as the bitmap of that push \
             tells, and fail if there is none",
            "--bitmap NAME  read what this bitmap says has changed since the newest disk of the \
             tag",
            "--full  read everything, although a bitmap is there",
            "--level LEVEL  of zstd, 1 to 19 (3)",
            "--take-over  go on for another push to the tag, which is known to have been killed",
            "-T, --cache CACHE_MODE  cache mode of DISK (writeback)",
            SHARE,
            OUTPUT,
            OBJECT,
            "DISK  what is pushed: any image or disk that is not written to meanwhile",
            REPOSITORY,
            "TAG  the disk's name there (latest)",
        ],
        examples: "\
vellum push --track disk.qcow2 s3://backups/site:vm1
  all of it at first, and after that what has changed
vellum push disk.raw /mnt/backups:vm1
  into a folder; what is there already is not stored again
vellum push --bitmap daily disk.qcow2 /mnt/backups:vm1
  what a bitmap of your own says has changed since the newest one there
",
        ..Spec::EMPTY
    },
    run,
};

const BACKING_UNKNOWN: &str = "all of the disk is read, and so it will be next time: nothing tells whether a layer below has changed \
     (a file that was changed a moment ago, a device, or a server that names no version)";

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    cache: CacheMode,
    bitmap: Option<String>,
    since: Option<String>,
    full: bool,
    track: bool,
    level: Option<i32>,
    take_over: bool,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "cache" => arguments.cache = cache_mode("source cache", &value)?,
            "bitmap" => arguments.bitmap = Some(value),
            "since" => arguments.since = Some(value),
            "full" => arguments.full = true,
            "track" => arguments.track = true,
            "level" => arguments.level = Some(number("level", &value, 1, 19)? as i32),
            "take-over" => arguments.take_over = true,
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let excluding = [
        arguments.bitmap.is_some(),
        arguments.since.is_some(),
        arguments.full,
    ];
    if excluding.iter().filter(|&&given| given).count() > 1 {
        let message = "--bitmap, --since and --full exclude each other";
        return Err(Failure::Usage(message.into()));
    }
    if arguments.track && arguments.common.force_share {
        let message = "--track changes the image, which --force-share leaves to others";
        return Err(Failure::Usage(message.into()));
    }
    let [disk, repository] = arguments.common.operands.as_slice() else {
        let message = "Expecting a disk and a repository";
        return Err(Failure::Usage(message.into()));
    };
    let spec = arguments.common.image(disk)?;
    let named = named(repository)?;
    named.refuse_number()?;
    install_bulk_lane(arguments.cache.direct)?;
    lane::block_on(push_disk(command, &spec, &named, &arguments))
}

async fn push_disk(
    command: Command<'_>,
    spec: &ImageSpec,
    named: &Named,
    arguments: &Arguments,
) -> Outcome {
    let flags = OpenFlags {
        writable: arguments.track,
        ..reading_once(arguments.cache, arguments.common.force_share)
    };
    let device = open_device(spec, &flags).await;
    let device = device.map_err(|error| open_failure(&spec.name, &error))?;
    let pushed = push_open(command, spec, &device, named, arguments).await;
    let closed = device.close().await;
    let pushed = pushed?;
    closed?;
    tell(&pushed, arguments);
    Ok(0)
}

async fn push_open(
    command: Command<'_>,
    spec: &ImageSpec,
    device: &Arc<dyn BlockDevice>,
    named: &Named,
    arguments: &Arguments,
) -> Result<Pushed, Failure> {
    cut_short::refuse(std::slice::from_ref(device)).await?;
    let repository = Repository::open_or_make(named.objects.clone())
        .await
        .map_err(failed)?;
    let tracking = Tracking::of(&**device, named).await?;
    let mut options = PushOptions::new(named.disk.tag.clone())?;
    options.level = arguments.level.unwrap_or(options.level);
    options.take_over = arguments.take_over;
    options.since = since(
        spec,
        device,
        &repository,
        tracking.as_ref(),
        (named, arguments),
    )
    .await?;
    let track = match (arguments.track, &tracking) {
        (false, _) => None,
        // An image of no length can hold none, and nothing can change.
        _ if device.size_bytes() == 0 => None,
        (true, Some(tracking)) if !tracking.is_possible() => {
            if !arguments.common.quiet {
                report::warning(BACKING_UNKNOWN);
            }
            Some(tracking)
        }
        (true, Some(tracking)) => Some(tracking),
        (true, None) => {
            return fail(
                "--track needs a disk in qcow2 without a raw data file: it leaves a bitmap there",
            );
        }
    };
    // What changes from now on is not in what is read.
    if let Some(tracking) = track {
        tracking.begin(options.push).await?;
    }
    let (wanted, quiet) = (arguments.common.progress, arguments.common.quiet);
    let quiet = quiet || arguments.common.output == Output::Json;
    let mut progress = Progress::new(command.program, wanted, quiet, 1.0);
    let pushed = push(&repository, device, &options, |done, total| {
        progress.show(done, total)
    })
    .await;
    progress.end();
    match (&pushed, track) {
        (Ok(_), Some(tracking)) => tracking.keep_only(options.push).await?,
        (Err(_), Some(tracking)) => tracking.give_up(options.push).await,
        (_, None) => {}
    }
    pushed.map_err(failed)
}

/// What has changed since when, as far as that is known.
async fn since(
    spec: &ImageSpec,
    device: &Arc<dyn BlockDevice>,
    repository: &Repository,
    tracking: Option<&Tracking>,
    (named, arguments): (&Named, &Arguments),
) -> Result<Option<Since>, Failure> {
    if arguments.full {
        return Ok(None);
    }
    if let Some(bitmap) = &arguments.bitmap {
        let manifest = repository.look_for(&named.disk).await.map_err(failed)?;
        let Some(manifest) = manifest else {
            return fail(format!(
                "There is no disk '{}' yet that the bitmap could be since: push all of it first",
                named.disk
            ));
        };
        let dirty = dirty_of(spec, &**device, bitmap).await?;
        return Ok(Some(since_push(disk_name(&manifest), manifest.push, dirty)));
    }
    let base = match &arguments.since {
        Some(base) => Some(
            repository
                .find(&DiskName::parse(base)?)
                .await
                .map_err(failed)?,
        ),
        None => repository.look_for(&named.disk).await.map_err(failed)?,
    };
    let Some(base) = base else {
        return Ok(None);
    };
    let dirty = match tracking {
        Some(tracking) => tracking.since(base.push).await?,
        None => None,
    };
    match dirty {
        Some(dirty) => Ok(Some(since_push(disk_name(&base), base.push, dirty))),
        None if arguments.since.is_some() => fail(format!(
            "The image does not know what has changed since '{}': push with --track leaves a bitmap \
             that does",
            disk_name(&base)
        )),
        None => Ok(None),
    }
}

fn since_push(base: DiskName, push: PushId, dirty: Vec<std::ops::Range<u64>>) -> Since {
    Since {
        base,
        push: Some(push),
        dirty,
    }
}

fn tell(pushed: &Pushed, arguments: &Arguments) {
    let manifest = &pushed.manifest;
    match arguments.common.output {
        Output::Json => report::print(format_args!("{:#}\n", manifest_json(manifest))),
        Output::Human if arguments.common.quiet => {}
        Output::Human => {
            let kind = match manifest.base {
                Some(_) => "changes",
                None => "all",
            };
            let name = disk_name(manifest);
            report::print(format_args!("{name}: {kind}; {}\n", sizes(manifest)));
            if pushed.resumed_segments > 0 {
                let count = pushed.resumed_segments;
                report::print(format_args!(
                    "{count} segments of a push that was killed did not need to be sent again\n"
                ));
            }
        }
    }
}
