//! What Prometheus is told. Names by its conventions: base units, `_total` of what only grows.
//!
//! Nothing is counted here: exports, caches and jobs count themselves, and each scrape reads that.
//! Invariant: no lock that requests take is taken.

use vellum::qcow2::{CacheBudget, CacheCount};
use vellum_export::accounting::{LATENCY_BINS, Latencies, OperationTotals};
use vellum_graph::live::NodeState;
use vellum_graph::throttle_groups;

use crate::space::SpaceSurvey;

use super::exposition::{Exposition, Kind};
use super::picture::{Picture, caches, write_log};
use super::views::{OPERATIONS, file_systems};

/// The format.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

const NANOSECONDS_PER_SECOND: f64 = 1e9;

/// All metrics, as text.
pub(super) fn text(picture: &Picture, budget: Option<&CacheBudget>) -> String {
    let mut text = Exposition::default();
    write_program(&mut text, picture, budget);
    write_exports(&mut text, picture);
    write_room(&mut text, picture);
    write_latencies(&mut text, picture);
    write_nodes(&mut text, picture);
    write_surveys(&mut text, picture);
    write_caches(&mut text, picture);
    write_logs(&mut text, picture);
    write_throttling(&mut text);
    write_jobs(&mut text, picture);
    write_file_systems(&mut text, picture);
    text.finish()
}

fn write_program(text: &mut Exposition, picture: &Picture, budget: Option<&CacheBudget>) {
    let version = [("version", env!("CARGO_PKG_VERSION"))];
    text.family("vellum_build_info", Kind::Gauge, "The program that runs.")
        .sample(&version, 1);
    let uptime = picture.moment.uptime.as_secs_f64();
    text.family(
        "vellum_uptime_seconds",
        Kind::Gauge,
        "How long the daemon has run.",
    )
    .sample(&[], uptime);
    for (name, help, count) in [
        (
            "vellum_disks",
            "Nodes that no other node stands on, or that exports show.",
            picture.disks().count(),
        ),
        ("vellum_nodes", "Open nodes.", picture.nodes.count()),
        ("vellum_exports", "Exports.", picture.moment.exports.len()),
        (
            "vellum_jobs",
            "Jobs that are not dismissed.",
            picture.moment.jobs.len(),
        ),
    ] {
        text.family(name, Kind::Gauge, help).sample(&[], count);
    }
    if let Some(budget) = budget {
        let help = "What the caches of all images may take together.";
        text.family("vellum_cache_budget_bytes", Kind::Gauge, help)
            .sample(&[], budget.total_bytes());
        let help = "What the caches of all images take of their budget.";
        text.family("vellum_cache_budget_used_bytes", Kind::Gauge, help)
            .sample(&[], budget.used_bytes());
    }
}

/// What the clients of exports have asked for, a family for each number.
fn write_exports(text: &mut Exposition, picture: &Picture) {
    let exports = &picture.moment.exports;
    let totals = exports.iter().map(|export| {
        OPERATIONS.map(|(operation, name)| (name, export.accounting.totals(operation)))
    });
    let totals: Vec<_> = totals.collect();
    let mut info = text.family("vellum_export_info", Kind::Gauge, "An export and its type.");
    for export in exports {
        let labels = [
            ("export", &*export.id),
            ("node", &export.node),
            ("type", export.kind),
        ];
        info.sample(&labels, 1);
    }
    type Count = fn(&OperationTotals) -> u64;
    let counts: [(_, _, Count); 2] = [
        (
            "vellum_export_requests_total",
            "Requests of clients that succeeded.",
            |totals| totals.requests,
        ),
        (
            "vellum_export_failed_requests_total",
            "Requests of clients that failed.",
            |totals| totals.failed,
        ),
    ];
    for (name, help, count) in counts {
        let mut requests = text.family(name, Kind::Counter, help);
        for (export, totals) in exports.iter().zip(&totals) {
            for (operation, totals) in totals {
                let labels = [
                    ("export", &*export.id),
                    ("node", &export.node),
                    ("operation", operation),
                ];
                requests.sample(&labels, count(totals));
            }
        }
    }
    for (at, name, help) in [
        (
            0,
            "vellum_export_read_bytes_total",
            "Bytes that clients have read.",
        ),
        (
            1,
            "vellum_export_written_bytes_total",
            "Bytes that clients have written.",
        ),
        (
            3,
            "vellum_export_discarded_bytes_total",
            "Bytes that clients have discarded.",
        ),
    ] {
        let mut bytes = text.family(name, Kind::Counter, help);
        for (export, totals) in exports.iter().zip(&totals) {
            let labels = [("export", &*export.id), ("node", &export.node)];
            bytes.sample(&labels, totals[at].1.bytes);
        }
    }
    let help = "Requests of clients that are not answered yet.";
    let mut in_flight = text.family("vellum_export_requests_in_flight", Kind::Gauge, help);
    for export in exports {
        let labels = [("export", &*export.id), ("node", &export.node)];
        in_flight.sample(&labels, export.accounting.in_flight());
    }
}

/// Requests that a full disk holds up.
fn write_room(text: &mut Exposition, picture: &Picture) {
    let exports = &picture.moment.exports;
    let help = "Requests of clients that wait until the disk has room.";
    let name = "vellum_export_requests_waiting_for_space";
    let mut waiting = text.family(name, Kind::Gauge, help);
    for export in exports {
        let labels = [("export", &*export.id), ("node", &export.node)];
        waiting.sample(&labels, export.accounting.waiting_for_room());
    }
    let help = "Requests of clients that have waited until the disk had room, or still do.";
    let mut waits = text.family("vellum_export_space_waits_total", Kind::Counter, help);
    for export in exports {
        let labels = [("export", &*export.id), ("node", &export.node)];
        waits.sample(&labels, export.accounting.room_waits());
    }
}

/// How long requests took. Of what nobody has asked for nothing is told: with a thousand disks that
/// would be most of the text.
fn write_latencies(text: &mut Exposition, picture: &Picture) {
    let help = "How long requests took that succeeded.";
    let mut times = text.family(
        "vellum_export_request_duration_seconds",
        Kind::Histogram,
        help,
    );
    for export in &picture.moment.exports {
        for (operation, name) in OPERATIONS {
            let latencies = export.accounting.latencies(operation);
            if latencies.bins.iter().all(|count| *count == 0) {
                continue;
            }
            let labels = [
                ("export", &*export.id),
                ("node", &export.node),
                ("operation", name),
            ];
            let counts = (0..LATENCY_BINS).map(|bin| (bound_seconds(bin), latencies.bins[bin]));
            let sum = latencies.time_ns as f64 / NANOSECONDS_PER_SECOND;
            times.histogram(&labels, counts, sum);
        }
    }
}

fn bound_seconds(bin: usize) -> Option<f64> {
    Latencies::bound_ns(bin).map(|bound_ns| bound_ns as f64 / NANOSECONDS_PER_SECOND)
}

fn write_nodes(text: &mut Exposition, picture: &Picture) {
    let help = "The size of a node: of an image that of its disk, of a file its length.";
    let mut sizes = text.family("vellum_node_size_bytes", Kind::Gauge, help);
    for node in picture.nodes.iter() {
        sizes.sample(
            &[("node", &node.name), ("driver", node.driver)],
            node.size_bytes,
        );
    }
    let help = "Bytes that a node takes on its file system.";
    let mut allocated = text.family("vellum_node_allocated_bytes", Kind::Gauge, help);
    for node in picture.nodes.iter() {
        if let Some(bytes) = picture.allocated_bytes(node) {
            allocated.sample(&[("node", &node.name), ("driver", node.driver)], bytes);
        }
    }
    let help = "The length of the file that an image is in.";
    let mut files = text.family("vellum_node_file_bytes", Kind::Gauge, help);
    for node in picture.nodes.iter().filter(|node| node.device().is_some()) {
        if let Some(bytes) = picture.file_bytes(node) {
            files.sample(&[("node", &node.name), ("driver", node.driver)], bytes);
        }
    }
    let help = "The end of the last byte that was written to a file since it is open.";
    let mut highest = text.family("vellum_node_highest_written_bytes", Kind::Gauge, help);
    for (node, watch) in watched(picture) {
        highest.sample(&[("node", &node.name)], watch.highest_written_bytes());
    }
    let help = "Bytes of a file that were given back to its file system.";
    let mut discarded = text.family("vellum_node_discarded_bytes_total", Kind::Counter, help);
    for (node, watch) in watched(picture) {
        discarded.sample(&[("node", &node.name)], watch.discarded().1);
    }
}

/// Where space goes, as it was found when somebody asked; nothing is surveyed for a scrape.
fn write_surveys(text: &mut Exposition, picture: &Picture) {
    let surveys = &picture.moment.surveys;
    let surveys = surveys
        .iter()
        .filter(|(name, _)| picture.nodes.number(name).is_some());
    type Number = fn(&SpaceSurvey) -> Option<u64>;
    let families: [(&'static str, &'static str, Number); 3] = [
        (
            "vellum_disk_base_bytes",
            "What images below supplied of a disk, when it was last surveyed.",
            |found| found.base_bytes,
        ),
        (
            "vellum_disk_snapshot_bytes",
            "What only internal snapshots held of an image, when its disk was last surveyed.",
            |found| found.snapshot_bytes,
        ),
        (
            "vellum_disk_leaked_bytes",
            "What was counted in an image and led to by nothing, when its disk was last surveyed.",
            |found| found.leaked_bytes,
        ),
    ];
    for (name, help, number) in families {
        let mut family = text.family(name, Kind::Gauge, help);
        for (node, found) in surveys.clone() {
            if let Some(bytes) = number(found) {
                family.sample(&[("node", node)], bytes);
            }
        }
    }
    let help = "When the space of a disk was last surveyed, in seconds since 1970.";
    let name = "vellum_disk_survey_timestamp_seconds";
    let mut ended = text.family(name, Kind::Gauge, help);
    for (node, found) in surveys {
        ended.sample(&[("node", node)], found.ended_seconds);
    }
}

fn watched(
    picture: &Picture,
) -> impl Iterator<Item = (&NodeState, &vellum_storage::nodes::watch::WriteWatch)> {
    let nodes = picture.nodes.iter();
    nodes.filter_map(|node| Some((node, &**node.watch.as_ref()?)))
}

fn write_caches(text: &mut Exposition, picture: &Picture) {
    let all = picture.nodes.iter().filter_map(|node| {
        let caches = caches(node)?;
        let named = [
            ("l2", caches.l2),
            ("refcount", caches.refcount),
            ("compressed", caches.compressed),
        ];
        Some((&node.name, named))
    });
    let all: Vec<_> = all.collect();
    type Number = fn(&CacheCount) -> u64;
    let families: [(&'static str, Kind, &'static str, Number); 3] = [
        (
            "vellum_node_cache_hits_total",
            Kind::Counter,
            "Looks into a cache of an image that found what they wanted.",
            |cache| cache.hits,
        ),
        (
            "vellum_node_cache_misses_total",
            Kind::Counter,
            "Looks into a cache of an image that did not find what they wanted.",
            |cache| cache.misses,
        ),
        (
            "vellum_node_cache_bytes",
            Kind::Gauge,
            "Memory that a cache of an image takes.",
            |cache| cache.bytes,
        ),
    ];
    for (name, kind, help, number) in families {
        let mut family = text.family(name, kind, help);
        for (node, caches) in &all {
            for (cache, counts) in caches {
                family.sample(&[("node", node), ("cache", cache)], number(counts));
            }
        }
    }
}

fn write_logs(text: &mut Exposition, picture: &Picture) {
    let nodes = picture.nodes.iter();
    let all = nodes.filter_map(|node| Some((&node.name, write_log(node)?)));
    let all: Vec<_> = all.collect();
    let help = "What the records in a write log take that a crash would have replayed.";
    let mut live = text.family("vellum_node_write_log_bytes", Kind::Gauge, help);
    for (node, usage) in &all {
        live.sample(&[("node", node)], usage.live_bytes);
    }
    let help = "What the records in a write log may take together.";
    let mut capacity = text.family("vellum_node_write_log_capacity_bytes", Kind::Gauge, help);
    for (node, usage) in &all {
        capacity.sample(&[("node", node)], usage.capacity_bytes);
    }
    let help = "Batches of records that were appended to a write log.";
    let mut appends = text.family("vellum_node_write_log_appends_total", Kind::Counter, help);
    for (node, usage) in &all {
        appends.sample(&[("node", node)], usage.appends);
    }
}

fn write_throttling(text: &mut Exposition) {
    let groups = throttle_groups::waits();
    let help = "Requests that waited for the limits of a throttle group.";
    let mut requests = text.family("vellum_throttle_group_waits_total", Kind::Counter, help);
    for (group, waits) in &groups {
        requests.sample(&[("group", group)], waits.requests);
    }
    let help = "How long requests waited for the limits of a throttle group.";
    let mut times = text.family(
        "vellum_throttle_group_wait_seconds_total",
        Kind::Counter,
        help,
    );
    for (group, waits) in &groups {
        times.sample(&[("group", group)], waits.time.as_secs_f64());
    }
}

fn write_jobs(text: &mut Exposition, picture: &Picture) {
    let jobs = &picture.moment.jobs;
    let mut info = text.family("vellum_job_info", Kind::Gauge, "A job and its state.");
    for job in jobs {
        let labels = [
            ("job", &*job.id),
            ("type", job.kind),
            ("status", job.status),
        ];
        info.sample(&labels, 1);
    }
    type Number = fn(&crate::jobs::JobState) -> u64;
    let families: [(&'static str, &'static str, Number); 3] = [
        ("vellum_job_done_bytes", "What of a job is done.", |job| {
            job.done_bytes
        }),
        (
            "vellum_job_work_bytes",
            "What there is to do in a job, with what is done.",
            |job| job.total_bytes,
        ),
        (
            "vellum_job_speed_limit_bytes",
            "What a job may do in a second; 0: it is not limited.",
            |job| job.bytes_per_second,
        ),
    ];
    for (name, help, number) in families {
        let mut family = text.family(name, Kind::Gauge, help);
        for job in jobs {
            family.sample(&[("job", &job.id), ("type", job.kind)], number(job));
        }
    }
}

fn write_file_systems(text: &mut Exposition, picture: &Picture) {
    let systems = file_systems(picture);
    let help = "The size of a file system with images on it.";
    let mut sizes = text.family("vellum_filesystem_size_bytes", Kind::Gauge, help);
    for system in &systems {
        sizes.sample(&[("folder", &system.folder)], system.size_bytes);
    }
    let help = "What is free of a file system with images on it, for everybody.";
    let mut available = text.family("vellum_filesystem_available_bytes", Kind::Gauge, help);
    for system in &systems {
        available.sample(&[("folder", &system.folder)], system.available_bytes);
    }
    let help = "The highest of the warning's percents that a file system has reached; 0: none.";
    let mut reached = text.family("vellum_filesystem_warning_percent", Kind::Gauge, help);
    for warning in &picture.moment.warnings {
        reached.sample(&[("folder", &warning.folder)], warning.threshold_percent);
    }
}
