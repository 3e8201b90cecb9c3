//! `scrub`: compares an image's file with its checksums, sums what has none, and repairs what the
//! backing file still has.

use std::ffi::OsString;
use std::sync::Arc;

use serde_json::{Value, json};
use vellum::BlockDevice;
use vellum::qcow2::AsQcow2;
use vellum::qcow2::checksums::{DamagedRange, ScrubReport};
use vellum_graph::open_device;
use vellum_images::scrub;
use vellum_images::scrub::Repairs;
use vellum_io::lane;
use vellum_jobs::job::JobControl;
use vellum_options::{CacheMode, ImageSpec, OpenFlags, error_text};

use super::command::{
    Command, Failure, Outcome, Subcommand, cache_mode, fail, install_bulk_lane, not_taken,
    open_failure, rate,
};
use super::rows::{FILENAME, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, PROGRESS, QUIET, SOURCE_CACHE};
use crate::output::Output;
use crate::progress::{Progress, SharedProgress};
use crate::report;
use crate::size::human;
use crate::spec::{CommonArgs, Spec};

pub static SCRUB: Subcommand = Subcommand {
    spec: Spec {
        name: "scrub",
        about: "Compare an image's file with its checksums",
        usage: "\
[-f FMT | --image-opts] [--repair [--force] | --read-only] [-r RATE]
        [-T CACHE_MODE] [--output FMT] [-p] [-q] [--object OBJDEF] FILENAME",
        arguments: &[
            QUIET,
            PROGRESS,
            FORMAT,
            IMAGE_OPTS,
            OUTPUT,
            SOURCE_CACHE,
            "-r, --rate RATE  read so many bytes in a second at most",
            "--repair  write what has changed on disk anew if the backing file has it",
            "--force  also where another program may have written, and what it wrote is newer",
            "--read-only  change nothing: what has no checksum gets none",
            OBJECT,
            FILENAME,
        ],
        examples: "\
vellum scrub --image-opts driver=qcow2,file.filename=disk.qcow2,checksums=on
  begin to keep checksums, of all that is there
vellum scrub disk.qcow2
  name what has changed on disk since
vellum scrub --repair overlay.qcow2
  and write anew what the backing file has as well
",
        exits: "\
0  nothing has changed on disk, or it is repaired
1  it could not be scrubbed, perhaps because it has no checksums
2  bytes have changed on disk
",
        ..Spec::EMPTY
    },
    run,
};

/// Exit code: bytes have changed on disk and are not repaired.
const DAMAGED: i32 = 2;

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    cache: CacheMode,
    rate_bytes: Option<u64>,
    repair: bool,
    force: bool,
    read_only: bool,
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "cache" => arguments.cache = cache_mode("cache", &value)?,
            "rate" => arguments.rate_bytes = Some(rate(&value)?),
            "force" => arguments.force = true,
            "repair" => arguments.repair = true,
            "read-only" => arguments.read_only = true,
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let spec = arguments.common.one_image()?;
    if arguments.repair && arguments.read_only {
        return Err(Failure::Usage("--repair excludes --read-only".into()));
    }
    if arguments.force && !arguments.repair {
        return Err(Failure::Usage("--force is for --repair".into()));
    }
    install_bulk_lane(arguments.cache.direct)?;
    lane::block_on(open_and_compare(command, &spec, &arguments))
}

async fn open_and_compare(
    command: Command<'_>,
    spec: &ImageSpec,
    arguments: &Arguments,
) -> Outcome {
    let flags = OpenFlags {
        writable: !arguments.read_only,
        cache: arguments.cache,
        no_backing: !arguments.repair,
        ..OpenFlags::default()
    };
    let device = open_device(spec, &flags).await;
    let device = device.map_err(|error| open_failure(&spec.name, &error))?;
    let (wanted, quiet) = (arguments.common.progress, arguments.common.quiet);
    let progress = SharedProgress::new(Progress::new(command.program, wanted, quiet, 1.0));
    let found = compare(&device, arguments, &progress).await;
    progress.end();
    let closed = device.close().await;
    let found = found?;
    closed.map_err(|error| Failure::Message(error_text(&error)))?;
    match arguments.common.output {
        Output::Json => report::print_line(to_json(&spec.name, &found)),
        Output::Human if quiet => {}
        Output::Human => report::print(to_text(&found)),
    }
    Ok(match found.left_bytes() {
        0 => 0,
        _ => DAMAGED,
    })
}

async fn compare(
    device: &Arc<dyn BlockDevice>,
    arguments: &Arguments,
    progress: &SharedProgress,
) -> Result<ScrubReport, Failure> {
    let Some(image) = device.as_qcow2() else {
        return fail("Images of this format have no checksums");
    };
    let control = JobControl::new();
    control.speed().set(arguments.rate_bytes.unwrap_or(0));
    let repairs = match (arguments.repair, arguments.force) {
        (false, _) => Repairs::None,
        (true, false) => Repairs::Damage,
        (true, true) => Repairs::All,
    };
    let show = |done_bytes, total_bytes| progress.show(done_bytes, total_bytes);
    let found = scrub::scrub(image, repairs, &control, show).await;
    let found =
        found.map_err(|error| Failure::Message(format!("Scrub failed: {}", error_text(&error))))?;
    // Nobody gives it up.
    found.ok_or_else(|| Failure::Message("Scrub was cancelled".to_owned()))
}

fn to_text(found: &ScrubReport) -> String {
    let mut text = String::new();
    for DamagedRange {
        file,
        guest,
        is_repaired,
    } in &found.damaged
    {
        let guest = match guest {
            Some(guest) => format!("disk {:#014x}-{:#014x}", guest.start, guest.end),
            None => "metadata, free space or a snapshot".to_owned(),
        };
        let end = match is_repaired {
            true => ", repaired",
            false => "",
        };
        text += &format!(
            "file {:#014x}-{:#014x}  {guest}{end}\n",
            file.start, file.end
        );
    }
    text += &format!(
        "{} compared, {} had no checksum\n",
        human(found.compared_bytes),
        human(found.new_bytes)
    );
    text += &match (found.damaged_bytes, found.left_bytes()) {
        (0, _) => "Nothing has changed on disk.\n".to_owned(),
        (all, 0) => format!("{} had changed on disk and are repaired.\n", human(all)),
        (all, left) => format!(
            "{} have changed on disk, {} of them are not repaired.\n",
            human(all),
            human(left)
        ),
    };
    if found.may_be_newer && found.left_bytes() > 0 {
        text += "The file was modified since Vellum closed it, or it was not closed: another program may have written \
                 these bytes, and a repair would bring back older ones (--repair --force does; checksums=off keeps \
                 what is there).\n";
    }
    text
}

fn to_json(name: &str, found: &ScrubReport) -> String {
    let range = |range: &std::ops::Range<u64>| json!({"start": range.start, "end": range.end});
    let damaged: Vec<Value> = found
        .damaged
        .iter()
        .map(|damaged| {
            json!({
                "file": range(&damaged.file),
                "guest": damaged.guest.as_ref().map(range),
                "repaired": damaged.is_repaired,
            })
        })
        .collect();
    let report = json!({
        "filename": name,
        "compared-bytes": found.compared_bytes,
        "new-bytes": found.new_bytes,
        "damaged-bytes": found.damaged_bytes,
        "left-bytes": found.left_bytes(),
        "may-be-newer": found.may_be_newer,
        "damaged": damaged,
    });
    serde_json::to_string_pretty(&report).unwrap_or_default()
}
