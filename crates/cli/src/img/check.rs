//! `check`: looks for inconsistencies in an image's metadata, and repairs them.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::sync::Arc;

use serde_json::{Map, Value};
use vellum::qcow2::check::{
    CheckOptions, CheckReport, Finding, FindingKind, Fix, check, cut_short, drop_write_log, repair,
};
use vellum::qcow2::checksums::name_of_checksums;
use vellum::qcow2::info::live_write_log;
use vellum::qcow2::{AsQcow2, read_header};
use vellum::{BlockDevice, Error, Storage};
use vellum_format::features::{Autoclear, Incompatible};
use vellum_graph::node::file_policy::FilePolicy;
use vellum_graph::{foreign, open_device};
use vellum_io::error::errno_text;
use vellum_io::lane;
use vellum_options::{CacheMode, ImageSpec, OpenFlags, json};

use crate::output::Output;
use crate::progress::{Progress, SharedProgress};
use crate::report;
use crate::spec::{CommonArgs, Spec};
use crate::terminal::{harmless, quoted};

use super::command::{
    Command, Failure, Outcome, Subcommand, cache_mode, fail, not_taken, open_failure, reading,
};
use super::ova;
use super::rows::{FILENAME, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, QUIET, SHARE, SOURCE_CACHE};

pub static CHECK: Subcommand = Subcommand {
    spec: Spec {
        name: "check",
        about: "Look for damage in an image",
        usage: "\
[-f FMT | --image-opts] [-T CACHE_MODE] [-r leaks|all|log|drop-log]
        [-U] [--output human|json] [--object OBJDEF] FILENAME",
        arguments: &[
            QUIET,
            FORMAT,
            IMAGE_OPTS,
            SOURCE_CACHE,
            SHARE,
            OUTPUT,
            "-r, --repair leaks|all|log|drop-log  repair what is lost only, or everything, or \
             bring back what the write log\n        holds, as the other two do first, or give that \
             up (excludes --force-share)",
            OBJECT,
            FILENAME,
        ],
        closing: "\
Exit codes: 0 sound, 1 the check failed, 2 damaged, 3 leaks only, 63 nothing to check.
",
        examples: "\
vellum check disk.qcow2
  look only
vellum check -r leaks disk.qcow2
  give lost space back
vellum check -r all disk.qcow2
  repair what can be repaired; keep a copy before
vellum check -r log disk.qcow2
  bring back what the write log holds after a crash
vellum check -r drop-log disk.qcow2
  do without the writes in a write log that is lost
",
        exits: "\
0  nothing is wrong, or everything was repaired
1  the check could not be done to its end
2  there is damage
3  clusters are lost, which costs space and nothing else
63  images of this format cannot be checked
",
        ..Spec::EMPTY
    },
    run,
};

/// Exit codes: damage, leaks only, and formats that have nothing to check.
const CORRUPT: i32 = 2;
const LEAKS: i32 = 3;
const NOT_SUPPORTED: i32 = 63;

#[derive(Debug, Default)]
struct Arguments {
    common: CommonArgs,
    repair: Option<Repair>,
    cache: CacheMode,
}

/// What `-r` asks for. Each but one begins with what the image's write log holds: a repair must
/// not change an image whose newest bytes are elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Repair {
    /// Nothing more.
    Log,
    /// Not even that: the log's writes are given up.
    DropLog,
    Fix(Fix),
}

impl Arguments {
    fn fix(&self) -> Option<Fix> {
        match self.repair {
            Some(Repair::Fix(fix)) => Some(fix),
            _ => None,
        }
    }

    fn is_talkative(&self) -> bool {
        self.common.output == Output::Human && !self.common.quiet
    }
}

fn run(command: Command<'_>, args: Vec<OsString>) -> Outcome {
    let mut arguments = Arguments::default();
    arguments.common = command.parse(args, |name, value| {
        match name {
            "repair" => arguments.repair = Some(repair_of(&value)?),
            "cache" => arguments.cache = cache_mode("source cache", &value)?,
            _ => return not_taken(name),
        }
        Ok(())
    })?;
    let spec = arguments.common.one_image()?;
    if arguments.repair.is_some() && arguments.common.force_share {
        let message = "force-share=on can only be used with read-only images";
        return fail(format!("Could not open '{}': {message}", spec.name));
    }
    if let Some(path) = ova::package(&arguments.common, &spec) {
        return lane::block_on(check_package(&path, &arguments));
    }
    lane::block_on(check_image(&spec, &arguments))
}

fn repair_of(value: &str) -> Result<Repair, Failure> {
    match value {
        "leaks" => Ok(Repair::Fix(Fix::Leaks)),
        "all" => Ok(Repair::Fix(Fix::All)),
        "log" => Ok(Repair::Log),
        "drop-log" => Ok(Repair::DropLog),
        _ => Err(Failure::Usage(format!(
            "--repair (-r) expects 'leaks' or 'all' not '{value}'"
        ))),
    }
}

/// An image that is open for a check.
struct Opened {
    /// It holds the locks.
    _device: Arc<dyn BlockDevice>,
    storage: Arc<dyn Storage>,
    /// The write log that holds writes which the image lacks.
    live_log: Option<String>,
    is_marked_corrupt: bool,
    /// Its refcounts are to be counted again, which any opening for writing does.
    is_dirty: bool,
}

/// What is to be checked.
enum Subject {
    /// A qcow2 image.
    Qcow2(Opened),
    /// Anything else, which has a check of its own or none.
    Other(Arc<dyn BlockDevice>),
}

/// Opens the image as it is.
async fn open(spec: &ImageSpec, arguments: &Arguments) -> Result<Subject, Failure> {
    let flags = OpenFlags {
        writable: arguments.repair.is_some(),
        for_check: true,
        ..reading(arguments.cache, arguments.common.force_share)
    };
    let failed = |error: Error| open_failure(&spec.name, &error);
    let device = open_device(spec, &flags).await.map_err(failed)?;
    let header = device.as_qcow2().map(|image| image.header());
    let (Some(storage), Some(header)) = (device.storage(), header) else {
        return Ok(Subject::Other(device));
    };
    if header.autoclear.contains(Autoclear::SEALED) && arguments.repair.is_some() {
        let name = &spec.name;
        return fail(format!(
            "'{name}' is sealed and not to be changed; 'vellum seal --unseal' gives the seal up"
        ));
    }
    Ok(Subject::Qcow2(Opened {
        _device: device,
        storage,
        live_log: live_write_log(&header).map(|log| log.to_string()),
        is_marked_corrupt: header.incompatible.contains(Incompatible::CORRUPT),
        is_dirty: header.incompatible.contains(Incompatible::DIRTY),
    }))
}

/// Has the image take back what its write log holds: any opening for writing does that.
async fn replay(spec: &ImageSpec, arguments: &Arguments) -> Result<(), Failure> {
    let flags = OpenFlags {
        writable: true,
        ..reading(arguments.cache, false)
    };
    let failed = |error: Error| open_failure(&spec.name, &error);
    let device = open_device(spec, &flags).await.map_err(failed)?;
    device.close().await.map_err(failed)
}

async fn check_image(spec: &ImageSpec, arguments: &Arguments) -> Outcome {
    let not_supported = || {
        report::error("This image format does not support checks");
        Ok(NOT_SUPPORTED)
    };
    let mut opened = match open(spec, arguments).await? {
        Subject::Qcow2(opened) => opened,
        Subject::Other(device) => {
            return match check_foreign(&spec.name, &*device, arguments).await? {
                Some(code) => Ok(code),
                None => not_supported(),
            };
        }
    };
    let for_log = matches!(arguments.repair, Some(Repair::Log | Repair::DropLog));
    // What a replay with lazy refcounts leaves if it is killed: the writes are in the image, their refcounts are not.
    let is_unfinished = arguments.repair == Some(Repair::Log) && opened.is_dirty;
    if for_log && opened.live_log.is_none() && !is_unfinished {
        return Ok(nothing_to_replay(spec, arguments));
    }
    if arguments.repair == Some(Repair::DropLog) {
        give_up_log(&mut opened, spec).await?;
    }
    let waits_for_repair = arguments.fix() == Some(Fix::All) && opened.is_marked_corrupt;
    let brings_back = arguments.repair.is_some() && opened.live_log.is_some();
    if (brings_back || is_unfinished) && !waits_for_repair {
        opened = match replayed(opened, spec, arguments).await? {
            Some(opened) => opened,
            None => return not_supported(),
        };
    }
    if report::is_own_name(report::program())
        && let Ok(Some(found)) = cut_short(opened.storage.clone()).await
    {
        report::error(format!("{}: {found}", spec.name));
    }
    let mut found = run_once(&opened.storage, arguments.fix(), arguments).await?;
    let mut text = String::new();
    if found.corruptions_fixed + found.leaks_fixed > 0 {
        if arguments.is_talkative() {
            text = repaired(&found);
        }
        // Unless somebody watches it comes behind all findings, as from QEMU's buffer.
        if std::io::stdout().is_terminal() {
            report::print(std::mem::take(&mut text));
        }
        if waits_for_repair && opened.live_log.is_some() {
            opened = match replayed(opened, spec, arguments).await? {
                Some(opened) => opened,
                None => return not_supported(),
            };
        }
        let again = run_once(&opened.storage, None, arguments).await;
        let again = again.inspect_err(|_| report::print(&text))?;
        found = CheckReport {
            corruptions_fixed: found.corruptions_fixed,
            leaks_fixed: found.leaks_fixed,
            ..again
        };
    }
    let log = opened.live_log.as_deref();
    match arguments.common.output {
        Output::Human if arguments.common.quiet => {}
        Output::Human => report::print(text + &human(&found) + &log_text(spec, arguments, log)),
        Output::Json => report::print_line(to_json(&spec.name, "qcow2", &found, log)),
    }
    exit_code(&found)
}

/// Checks an image that is not qcow2; `None` if there is nothing to be checked.
async fn check_foreign(
    name: &str,
    device: &dyn BlockDevice,
    arguments: &Arguments,
) -> Result<Option<i32>, Failure> {
    if matches!(arguments.repair, Some(Repair::Log | Repair::DropLog)) {
        return Ok(None);
    }
    let format = device.info().format;
    let Some(storage) = device
        .storage()
        .filter(|_| foreign::facts(device).is_some())
    else {
        return Ok(None);
    };
    let fix = foreign::Fix {
        leaks: arguments.fix().is_some(),
        corruptions: arguments.fix() == Some(Fix::All),
    };
    let Some(mut found) = check_once(format, &storage, fix).await? else {
        return Ok(None);
    };
    let mut text = String::new();
    if found.corruptions_fixed + found.leaks_fixed > 0 {
        if arguments.is_talkative() {
            text = repaired(&found);
        }
        let again = check_once(format, &storage, foreign::Fix::default()).await?;
        found = CheckReport {
            corruptions_fixed: found.corruptions_fixed,
            leaks_fixed: found.leaks_fixed,
            ..again.unwrap_or_default()
        };
    }
    match arguments.common.output {
        Output::Human if arguments.common.quiet => {}
        Output::Human => report::print(text + &human(&found)),
        Output::Json => report::print_line(to_json(name, format, &found, None)),
    }
    exit_code(&found).map(Some)
}

/// Checks a package of a virtual machine.
async fn check_package(path: &str, arguments: &Arguments) -> Outcome {
    if arguments.repair.is_some() {
        return fail("A package of a virtual machine cannot be repaired");
    }
    let found = told(ova::check(path, &arguments.common).await?);
    match arguments.common.output {
        Output::Human if arguments.common.quiet => {}
        Output::Human => report::print(human(&found)),
        Output::Json => report::print_line(to_json(path, "ova", &found, None)),
    }
    exit_code(&found)
}

/// Checks once, and prints what is found.
async fn check_once(
    format: &str,
    storage: &Arc<dyn Storage>,
    fix: foreign::Fix,
) -> Result<Option<CheckReport>, Failure> {
    let found = foreign::check(format, storage, fix, &FilePolicy::Any).await;
    let found = found.map_err(|error| {
        report::about_cause(&error);
        let why = errno_text(error.errno());
        Failure::Message(format!("Check failed: {why}"))
    })?;
    Ok(found.map(told))
}

/// Prints the findings, and gives the numbers.
fn told(found: foreign::CheckReport) -> CheckReport {
    for message in &found.messages {
        report::eprint_line(&harmless(message));
    }
    let clusters = found.clusters.unwrap_or_default();
    CheckReport {
        corruptions: found.corruptions,
        leaks: found.leaks,
        corruptions_fixed: found.corruptions_fixed,
        leaks_fixed: found.leaks_fixed,
        check_errors: found.check_errors,
        total_clusters: clusters.total,
        allocated_clusters: clusters.allocated,
        fragmented_clusters: clusters.fragmented,
        compressed_clusters: clusters.compressed,
        image_end_offset: found.image_end_bytes.unwrap_or(0),
    }
}

/// The image, opened anew after its log was brought back.
async fn replayed(
    opened: Opened,
    spec: &ImageSpec,
    arguments: &Arguments,
) -> Result<Option<Opened>, Failure> {
    // The locks would be in the way.
    drop(opened);
    replay(spec, arguments).await?;
    match open(spec, arguments).await? {
        Subject::Qcow2(opened) => Ok(Some(opened)),
        Subject::Other(_) => Ok(None),
    }
}

/// Has the image do without what its log holds.
async fn give_up_log(opened: &mut Opened, spec: &ImageSpec) -> Result<(), Failure> {
    let failed = |error: Error| open_failure(&spec.name, &error);
    let dropped = drop_write_log(opened.storage.clone()).await;
    dropped.map_err(failed)?;
    let log = match opened.live_log.take().unwrap_or_default() {
        unknown if unknown.is_empty() => "a write log that the image does not name".to_owned(),
        name => format!("the write log '{}'", harmless(&name)),
    };
    report::error(format!("{}: the writes in {log} were given up", spec.name));
    Ok(())
}

/// What is said of a log that holds writes.
fn log_text(spec: &ImageSpec, arguments: &Arguments, log: Option<&str>) -> String {
    let Some(log) = log else {
        return String::new();
    };
    let options = if arguments.common.image_opts {
        "--image-opts "
    } else {
        ""
    };
    format!(
        "\nThe write log '{}' holds writes that are not in the image yet.\nTo bring them back: vellum \
         check -r log {options}{}\n",
        harmless(log),
        quoted(&spec.name)
    )
}

/// `-r log` without a log that holds anything.
fn nothing_to_replay(spec: &ImageSpec, arguments: &Arguments) -> i32 {
    match arguments.common.output {
        Output::Human if arguments.common.quiet => {}
        Output::Human => {
            report::print_line("No write log holds writes for this image: there is nothing to do.");
        }
        Output::Json => {
            report::print_line(to_json(&spec.name, "qcow2", &CheckReport::default(), None))
        }
    }
    0
}

fn exit_code(found: &CheckReport) -> Outcome {
    if found.check_errors > 0 {
        return fail("Check failed");
    }
    Ok(match found {
        CheckReport {
            corruptions: 1.., ..
        } => CORRUPT,
        CheckReport { leaks: 1.., .. } => LEAKS,
        _ => 0,
    })
}

/// Checks or repairs once, printing what is found.
async fn run_once(
    storage: &Arc<dyn Storage>,
    fix: Option<Fix>,
    arguments: &Arguments,
) -> Result<CheckReport, Failure> {
    let progress = Progress::new(report::program(), false, arguments.common.quiet, 0.0);
    let progress = SharedProgress::new(progress);
    let shown = progress.clone();
    let on_progress = move |done, total| shown.show(done, total);
    let options = CheckOptions::default()
        .on_finding(Some(Arc::new(print_finding)))
        .on_progress(Some(Arc::new(on_progress)));
    let had_checksums = has_checksums(storage).await;
    let result = match fix {
        None => check(storage.clone(), &options).await,
        Some(fix) => repair(storage.clone(), fix, &options).await,
    };
    progress.end();
    if fix.is_some() && had_checksums && !arguments.common.quiet {
        report::eprint_line(CHECKSUMS_GIVEN_UP);
    }
    result.map_err(|error| {
        report::about_cause(&error);
        let why = errno_text(error.errno());
        Failure::Message(format!("Check failed: {why}"))
    })
}

/// What a repair of an image with checksums means for these.
pub(super) const CHECKSUMS_GIVEN_UP: &str =
    "The checksums of the image are given up; an opening with checksums=on begins anew.";

/// Whether the image in a file has checksums that count.
pub(super) async fn has_checksums(storage: &Arc<dyn Storage>) -> bool {
    let header = read_header(storage).await.ok();
    header.is_some_and(|header| name_of_checksums(&header).is_some())
}

fn print_finding(finding: &Finding) {
    match finding.kind {
        FindingKind::Unreadable => report::error(&finding.message),
        // Names of snapshots stand in some.
        _ => report::eprint_line(&harmless(&finding.message)),
    }
}

fn repaired(found: &CheckReport) -> String {
    format!(
        "The following inconsistencies were found and repaired:\n\n    {} leaked clusters\n    {} \
         corruptions\n\nDouble checking the fixed image now...\n",
        found.leaks_fixed, found.corruptions_fixed
    )
}

fn human(found: &CheckReport) -> String {
    let mut text = String::new();
    if found.corruptions + found.leaks + found.check_errors == 0 {
        text.push_str("No errors were found on the image.\n");
    }
    if found.corruptions > 0 {
        text.push_str(&format!(
            "\n{} errors were found on the image.\nData may be corrupted, or further writes to \
             the image may corrupt it.\n",
            found.corruptions
        ));
    }
    if found.leaks > 0 {
        text.push_str(&format!(
            "\n{} leaked clusters were found on the image.\nThis means waste of disk space, but \
             no harm to data.\n",
            found.leaks
        ));
    }
    if found.check_errors > 0 {
        text.push_str(&format!(
            "\n{} internal errors have occurred during the check.\n",
            found.check_errors
        ));
    }
    if found.total_clusters > 0 && found.allocated_clusters > 0 {
        let share = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
        text.push_str(&format!(
            "{}/{} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters\n",
            found.allocated_clusters,
            found.total_clusters,
            share(found.allocated_clusters, found.total_clusters),
            share(found.fragmented_clusters, found.allocated_clusters),
            share(found.compressed_clusters, found.allocated_clusters),
        ));
    }
    if found.image_end_offset > 0 {
        text.push_str(&format!("Image end offset: {}\n", found.image_end_offset));
    }
    text
}

fn to_json(name: &str, format: &str, found: &CheckReport, log: Option<&str>) -> String {
    let mut members = Map::new();
    members.insert("filename".into(), name.into());
    members.insert("format".into(), format.into());
    members.insert("check-errors".into(), found.check_errors.into());
    let counts = [
        ("image-end-offset", found.image_end_offset),
        ("corruptions", found.corruptions),
        ("leaks", found.leaks),
        ("corruptions-fixed", found.corruptions_fixed),
        ("leaks-fixed", found.leaks_fixed),
        ("total-clusters", found.total_clusters),
        ("allocated-clusters", found.allocated_clusters),
        ("fragmented-clusters", found.fragmented_clusters),
        ("compressed-clusters", found.compressed_clusters),
    ];
    for (key, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
        members.insert(key.into(), count.into());
    }
    if let Some(log) = log {
        members.insert("write-log".into(), log.into());
    }
    json::pretty(&Value::Object(members))
}
