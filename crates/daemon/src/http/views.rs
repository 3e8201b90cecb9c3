//! What is told as JSON that no QMP command tells. `schema/rest.txt` declares it.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::{Value, json};
use vellum_export::accounting::{Accounting, Operation, OperationTotals};
use vellum_graph::live::NodeState;
use vellum_options::json_text::JsonText;

use crate::export::CountedExport;
use crate::qmp;
use crate::space::SpaceSurvey;

use super::picture::{Disk, Picture};

/// Operations by the names that they have here.
pub(super) const OPERATIONS: [(Operation, &str); 4] = [
    (Operation::Read, "read"),
    (Operation::Write, "write"),
    (Operation::Flush, "flush"),
    (Operation::Discard, "discard"),
];

/// All disks.
pub(super) fn disks(picture: &Picture) -> String {
    let mut text = JsonText::dense();
    text.begin('[');
    for disk in picture.disks() {
        describe(&mut text, picture, disk);
    }
    text.end(']');
    text.into_text()
}

/// The disk of a name, if it is one.
pub(super) fn disk(picture: &Picture, name: &str) -> Option<String> {
    let disk = picture.disk_of_name(name)?;
    let mut text = JsonText::dense();
    describe(&mut text, picture, disk);
    Some(text.into_text())
}

fn describe(text: &mut JsonText, picture: &Picture, disk: Disk<'_>) {
    let node = disk.node;
    text.begin('{').string_of("node-name", &node.name);
    text.string_of("driver", node.driver);
    text.number_of("size-bytes", node.size_bytes);
    text.key("read-only").switch(node.read_only);
    text.key("exports").begin('[');
    for export in picture.exports_of(disk) {
        text.begin('{').string_of("id", &export.id);
        text.string_of("type", export.kind);
        if let Some(name) = &export.name {
            text.string_of("name", name);
        }
        text.end('}');
    }
    text.end(']').key("layers").begin('[');
    let mut jobs: Vec<&str> = Vec::new();
    for layer in picture.layers(disk) {
        jobs.extend(layer.jobs.iter().map(String::as_str));
        describe_layer(text, picture, layer);
    }
    jobs.sort_unstable();
    jobs.dedup();
    text.end(']').key("jobs").begin('[');
    for job in jobs {
        text.string(job);
    }
    text.end(']');
    describe_stats(text, picture, disk);
    text.end('}');
}

fn describe_layer(text: &mut JsonText, picture: &Picture, layer: &NodeState) {
    text.begin('{').string_of("node-name", &layer.name);
    text.string_of("driver", layer.driver);
    text.string_of("filename", layer.filename.as_deref().unwrap_or_default());
    text.number_of("size-bytes", layer.size_bytes);
    if let Some(bytes) = picture.allocated_bytes(layer) {
        text.number_of("allocated-bytes", bytes);
    }
    if let Some(bytes) = picture.file_bytes(layer) {
        text.number_of("file-bytes", bytes);
    }
    text.end('}');
}

/// What the clients of several exports have asked for.
fn sum<'a>(
    exports: impl Iterator<Item = &'a CountedExport>,
    operation: Operation,
) -> OperationTotals {
    exports.fold(OperationTotals::default(), |sum, export| {
        let totals = export.accounting.totals(operation);
        OperationTotals {
            requests: sum.requests + totals.requests,
            bytes: sum.bytes + totals.bytes,
            failed: sum.failed + totals.failed,
            time_ns: sum.time_ns + totals.time_ns,
        }
    })
}

fn in_flight<'a>(exports: impl Iterator<Item = &'a CountedExport>) -> u64 {
    let accountings = exports.map(|export| &*export.accounting);
    accountings.map(Accounting::in_flight).sum()
}

fn describe_stats(text: &mut JsonText, picture: &Picture, disk: Disk<'_>) {
    let exports = picture.exports_of(disk);
    text.key("stats").begin('{');
    for (operation, name) in OPERATIONS {
        let totals = sum(exports.clone(), operation);
        text.key(name).begin('{');
        text.number_of("requests", totals.requests);
        text.number_of("bytes", totals.bytes);
        text.number_of("failed", totals.failed);
        text.number_of("time-ns", totals.time_ns).end('}');
    }
    text.number_of("in-flight", in_flight(exports));
    if let Some(caches) = picture.caches_of(disk) {
        let all = [caches.l2, caches.refcount, caches.compressed];
        text.key("cache").begin('{');
        text.number_of("hits", all.iter().map(|cache| cache.hits).sum());
        text.number_of("misses", all.iter().map(|cache| cache.misses).sum());
        text.number_of("bytes", all.iter().map(|cache| cache.bytes).sum());
        text.end('}');
    }
    text.end('}');
}

/// What changes from second to second, as short as it can be told.
pub(super) fn stats(picture: &Picture) -> String {
    let moment = &picture.moment;
    let mut text = JsonText::dense();
    text.begin('{');
    text.number_of("uptime-ns", moment.uptime.as_nanos() as u64);
    text.key("disks").begin('[');
    for disk in picture.disks() {
        sample(&mut text, picture, disk);
    }
    text.end(']').key("jobs").begin('[');
    for job in &moment.jobs {
        let mut told = json!({
            "id": job.id,
            "type": job.kind,
            "status": job.status,
            "done-bytes": job.done_bytes,
            "total-bytes": job.total_bytes,
            "bytes-per-second": job.bytes_per_second,
        });
        if let Some(seconds) = job.seconds_left {
            told["seconds-left"] = json!(seconds);
        }
        text.raw(&told.to_string());
    }
    text.end(']').end('}');
    text.into_text()
}

/// What operations are called in samples: how many, their bytes, and how long they took.
const SAMPLED: [(&str, Option<&str>, Option<&str>); 4] = [
    ("read-requests", Some("read-bytes"), Some("read-time-ns")),
    ("write-requests", Some("write-bytes"), Some("write-time-ns")),
    ("flush-requests", None, Some("flush-time-ns")),
    ("discard-requests", Some("discard-bytes"), None),
];

fn sample(text: &mut JsonText, picture: &Picture, disk: Disk<'_>) {
    let exports = picture.exports_of(disk);
    text.begin('{').string_of("node-name", &disk.node.name);
    let mut failed = 0;
    for ((operation, _), (requests, bytes, time_ns)) in OPERATIONS.into_iter().zip(SAMPLED) {
        let totals = sum(exports.clone(), operation);
        failed += totals.failed;
        text.number_of(requests, totals.requests);
        if let Some(key) = bytes {
            text.number_of(key, totals.bytes);
        }
        if let Some(key) = time_ns {
            text.number_of(key, totals.time_ns);
        }
    }
    let caches = picture.caches_of(disk);
    let looks = caches.map_or((0, 0), |caches| (caches.l2.hits, caches.l2.misses));
    text.number_of("failed-requests", failed);
    text.number_of("in-flight", in_flight(exports));
    text.number_of("cache-hits", looks.0);
    text.number_of("cache-misses", looks.1).end('}');
}

/// The program, and the file systems below the images.
pub(super) fn host(picture: &Picture) -> Value {
    let file_systems = file_systems(picture).into_iter().map(|system| {
        json!({
            "folder": system.folder,
            "size-bytes": system.size_bytes,
            "free-bytes": system.free_bytes,
            "available-bytes": system.available_bytes,
        })
    });
    // Each file once, whatever stands on it.
    let files = picture.nodes.iter().filter(|node| node.path().is_some());
    let discarded = files.clone().filter_map(|node| node.watch.as_ref());
    let surveys = &picture.moment.surveys;
    let surveyed = surveys
        .iter()
        .filter(|(name, _)| picture.disk_of_name(name).is_some());
    let surveyed: Vec<&SpaceSurvey> = surveyed.map(|(_, found)| found).collect();
    let sum = |number: fn(&SpaceSurvey) -> Option<u64>| -> u64 {
        surveyed.iter().filter_map(|found| number(found)).sum()
    };
    let qemu = &qmp::version("")["qemu"];
    json!({
        "name": "vellum",
        "host-name": host_name(),
        "version": env!("CARGO_PKG_VERSION"),
        "qemu-version": format!("{}.{}.{}", qemu["major"], qemu["minor"], qemu["micro"]),
        "pid": std::process::id(),
        "uptime-seconds": picture.moment.uptime.as_secs_f64(),
        "disks": picture.disks().count(),
        "exports": picture.moment.exports.len(),
        "jobs": picture.moment.jobs.len(),
        "nodes": picture.nodes.count(),
        "file-bytes": files.clone().map(|node| node.size_bytes).sum::<u64>(),
        "allocated-bytes": files.filter_map(|node| node.allocated_bytes).sum::<u64>(),
        "discarded-bytes": discarded.map(|watch| watch.discarded().1).sum::<u64>(),
        "surveyed-disks": surveyed.len(),
        "base-bytes": sum(|found| found.base_bytes),
        "snapshot-bytes": sum(|found| found.snapshot_bytes),
        "leaked-bytes": sum(|found| found.leaked_bytes),
        "file-systems": file_systems.collect::<Vec<_>>(),
    })
}

/// What the machine is called; empty where the system does not say it.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim_end().to_owned()
}

/// A file system with images on it.
#[derive(Debug)]
pub(super) struct FileSystem {
    /// The first of the folders with images.
    pub(super) folder: String,
    pub(super) size_bytes: u64,
    pub(super) free_bytes: u64,
    /// What of it those may use who are not root.
    pub(super) available_bytes: u64,
}

/// The file systems that files of nodes are on, by their folders.
pub(super) fn file_systems(picture: &Picture) -> Vec<FileSystem> {
    let paths = picture.nodes.iter().filter_map(NodeState::path);
    let mut folders: Vec<&Path> = paths.filter_map(folder).collect();
    folders.sort_unstable();
    folders.dedup();
    let mut known = BTreeSet::new();
    let system = |folder: &Path| {
        let device = std::fs::metadata(folder).ok()?.dev();
        if !known.insert(device) {
            return None;
        }
        let counts = rustix::fs::statvfs(folder).ok()?;
        Some(FileSystem {
            folder: folder.to_string_lossy().into_owned(),
            size_bytes: counts.f_blocks.saturating_mul(counts.f_frsize),
            free_bytes: counts.f_bfree.saturating_mul(counts.f_frsize),
            available_bytes: counts.f_bavail.saturating_mul(counts.f_frsize),
        })
    };
    folders.into_iter().filter_map(system).collect()
}

fn folder(path: &str) -> Option<&Path> {
    let folder = Path::new(path).parent()?;
    Some(match folder.as_os_str().is_empty() {
        true => Path::new("."),
        false => folder,
    })
}
