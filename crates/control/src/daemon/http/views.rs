//! What is told as JSON that no QMP command tells. `schema/rest.txt` declares it.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use vellum_export::accounting::{Accounting, Operation, OperationTotals};

use super::picture::Picture;
use crate::daemon::export::CountedExport;
use crate::nodes::NodeState;
use crate::qmp;

/// Operations by the names that they have here.
pub(super) const OPERATIONS: [(Operation, &str); 4] = [
    (Operation::Read, "read"),
    (Operation::Write, "write"),
    (Operation::Flush, "flush"),
    (Operation::Discard, "discard"),
];

/// All disks.
pub(super) fn disks(picture: &Picture) -> Value {
    picture
        .disks()
        .map(|disk| describe(picture, disk))
        .collect()
}

/// The disk of a name, if it is one.
pub(super) fn disk(picture: &Picture, name: &str) -> Option<Value> {
    let node = picture.nodes.get(name).filter(|node| !node.is_below)?;
    Some(describe(picture, node))
}

fn describe(picture: &Picture, disk: &NodeState) -> Value {
    let exports = picture.exports_of(&disk.name).map(|export| {
        let mut described = json!({"id": export.id, "type": export.kind});
        if let Some(name) = &export.name {
            described["name"] = json!(name);
        }
        described
    });
    let mut jobs: Vec<&str> = Vec::new();
    for layer in picture.layers(disk) {
        jobs.extend(layer.jobs.iter().map(String::as_str));
    }
    jobs.sort_unstable();
    jobs.dedup();
    json!({
        "node-name": disk.name,
        "driver": disk.driver,
        "size-bytes": disk.size_bytes,
        "read-only": disk.read_only,
        "exports": exports.collect::<Vec<_>>(),
        "layers": picture.layers(disk).map(|layer| describe_layer(picture, layer)).collect::<Vec<_>>(),
        "jobs": jobs,
        "stats": describe_stats(picture, disk),
    })
}

fn describe_layer(picture: &Picture, layer: &NodeState) -> Value {
    let mut described = json!({
        "node-name": layer.name,
        "driver": layer.driver,
        "filename": layer.filename,
        "size-bytes": layer.size_bytes,
    });
    if let Some(bytes) = picture.allocated_bytes(layer) {
        described["allocated-bytes"] = json!(bytes);
    }
    if let Some(bytes) = picture.file_bytes(layer) {
        described["file-bytes"] = json!(bytes);
    }
    described
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

fn describe_stats(picture: &Picture, disk: &NodeState) -> Value {
    let exports = picture.exports_of(&disk.name);
    let mut stats = json!({});
    for (operation, name) in OPERATIONS {
        let totals = sum(exports.clone(), operation);
        stats[name] = json!({
            "requests": totals.requests,
            "bytes": totals.bytes,
            "failed": totals.failed,
            "time-ns": totals.time_ns,
        });
    }
    stats["in-flight"] = json!(in_flight(exports));
    if let Some(caches) = picture.caches_of(disk) {
        let all = [caches.l2, caches.refcount, caches.compressed];
        stats["cache"] = json!({
            "hits": all.iter().map(|cache| cache.hits).sum::<u64>(),
            "misses": all.iter().map(|cache| cache.misses).sum::<u64>(),
            "bytes": all.iter().map(|cache| cache.bytes).sum::<u64>(),
        });
    }
    stats
}

/// What changes from second to second, as short as it can be told.
pub(super) fn stats(picture: &Picture) -> Value {
    let moment = &picture.moment;
    let jobs = moment.jobs.iter().map(|job| {
        json!({
            "id": job.id,
            "type": job.kind,
            "status": job.status,
            "done-bytes": job.done_bytes,
            "total-bytes": job.total_bytes,
            "bytes-per-second": job.bytes_per_second,
        })
    });
    json!({
        "uptime-ns": moment.uptime.as_nanos() as u64,
        "disks": picture.disks().map(|disk| sample(picture, disk)).collect::<Vec<_>>(),
        "jobs": jobs.collect::<Vec<_>>(),
    })
}

fn sample(picture: &Picture, disk: &NodeState) -> Value {
    let exports = picture.exports_of(&disk.name);
    let mut sample = json!({"node-name": disk.name});
    let mut failed = 0;
    for (operation, name) in OPERATIONS {
        let totals = sum(exports.clone(), operation);
        failed += totals.failed;
        sample[format!("{name}-requests")] = json!(totals.requests);
        if operation != Operation::Flush {
            sample[format!("{name}-bytes")] = json!(totals.bytes);
        }
        if operation != Operation::Discard {
            sample[format!("{name}-time-ns")] = json!(totals.time_ns);
        }
    }
    let caches = picture.caches_of(disk);
    let looks = caches.map_or((0, 0), |caches| (caches.l2.hits, caches.l2.misses));
    sample["failed-requests"] = json!(failed);
    sample["in-flight"] = json!(in_flight(exports));
    sample["cache-hits"] = json!(looks.0);
    sample["cache-misses"] = json!(looks.1);
    sample
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
    let files = picture.nodes.values().filter(|node| node.path.is_some());
    let discarded = files.clone().filter_map(|node| node.watch.as_ref());
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
        "nodes": picture.nodes.len(),
        "file-bytes": files.clone().map(|node| node.size_bytes).sum::<u64>(),
        "allocated-bytes": files.filter_map(|node| node.allocated_bytes).sum::<u64>(),
        "discarded-bytes": discarded.map(|watch| watch.discarded().1).sum::<u64>(),
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
    let paths = picture
        .nodes
        .values()
        .filter_map(|node| node.path.as_deref());
    let mut folders: Vec<PathBuf> = paths.filter_map(folder).collect();
    folders.sort_unstable();
    folders.dedup();
    let mut known = BTreeSet::new();
    let system = |folder: PathBuf| {
        let device = std::fs::metadata(&folder).ok()?.dev();
        if !known.insert(device) {
            return None;
        }
        let counts = rustix::fs::statvfs(&folder).ok()?;
        Some(FileSystem {
            folder: folder.to_string_lossy().into_owned(),
            size_bytes: counts.f_blocks.saturating_mul(counts.f_frsize),
            free_bytes: counts.f_bfree.saturating_mul(counts.f_frsize),
            available_bytes: counts.f_bavail.saturating_mul(counts.f_frsize),
        })
    };
    folders.into_iter().filter_map(system).collect()
}

fn folder(path: &str) -> Option<PathBuf> {
    let folder = Path::new(path).parent()?;
    Some(match folder.as_os_str().is_empty() {
        true => PathBuf::from("."),
        false => folder.to_owned(),
    })
}
