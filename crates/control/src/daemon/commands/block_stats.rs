//! Commands about what was asked of disks: `query-block`, `query-blockstats`,
//! `block-latency-histogram-set`, `block-set-write-threshold`.
//!
//! QEMU's daemon counts nothing: its exports have no names there. Here each export counts what its
//! clients ask for, and is listed by its id. A node counts what the exports that show it now do.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use vellum_export::accounting::{Accounting, Histogram, Operation};

use super::{Daemon, done, no_device};
use crate::daemon::DaemonState;
use crate::nodes::{NodeInfo, Nodes};
use crate::qmp::{Arguments, Failure, Outcome};

/// What `query-blockstats` calls an operation.
const OPERATIONS: [(Operation, &str); 4] = [
    (Operation::Read, "rd"),
    (Operation::Write, "wr"),
    (Operation::Flush, "flush"),
    (Operation::Discard, "unmap"),
];

/// The arguments of the histograms of operations; as in QEMU, discards have none.
const HISTOGRAMS: [(Operation, &str, &str); 3] = [
    (Operation::Read, "rd_latency_histogram", "boundaries-read"),
    (Operation::Write, "wr_latency_histogram", "boundaries-write"),
    (
        Operation::Flush,
        "flush_latency_histogram",
        "boundaries-flush",
    ),
];

/// Most boundaries of a histogram: clients say them, and each is memory.
const MOST_BOUNDARIES: usize = 1024;

/// Devices of a machine, of which a daemon has none.
pub(super) async fn query_block(_daemon: Rc<Daemon>, arguments: Arguments) -> Outcome {
    arguments.finish()?;
    Ok(json!([]))
}

pub(super) async fn query(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let of_nodes = arguments.switch("query-nodes")?.unwrap_or(false);
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    let stats = Statistics::of(&parts);
    Ok(match of_nodes {
        true => {
            let order = parts.nodes.in_order_of_making();
            let nodes = order.iter().filter_map(|name| stats.nodes.get(name));
            nodes.map(|node| stats.node(node, Depth::Files)).collect()
        }
        false => stats.exports(),
    })
}

/// What is told inside of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Depth {
    /// What it has its data in.
    Files,
    /// That, and all of the chain below it.
    Chain,
}

/// What is told, as of one moment.
struct Statistics<'a> {
    graph: &'a Nodes,
    nodes: BTreeMap<String, NodeInfo>,
    /// The id of each export, the node that it shows, and what it has counted.
    exports: Vec<(String, String, Arc<Accounting>)>,
}

impl Statistics<'_> {
    fn of(parts: &DaemonState) -> Statistics<'_> {
        let exports = parts.exports.accounted(&parts.nodes).into_iter();
        let nodes = parts.nodes.list().into_iter();
        Statistics {
            graph: &parts.nodes,
            nodes: nodes.map(|node| (node.name.clone(), node)).collect(),
            exports: exports
                .map(|(export, accounting)| (export.id, export.node, accounting))
                .collect(),
        }
    }

    fn exports(&self) -> Value {
        let describe = |(id, node, accounting): &(String, String, Arc<Accounting>)| {
            let mut stats = counted(&[accounting]);
            stats["wr_highest_offset"] = json!(accounting.highest_written_bytes());
            if let Some(idle) = accounting.idle() {
                stats["idle_time_ns"] = json!(idle.as_nanos() as u64);
            }
            for (operation, name, _) in HISTOGRAMS {
                if let Some(histogram) = accounting.histogram(operation) {
                    stats[name] = describe_histogram(histogram);
                }
            }
            let mut export = json!({"device": id, "node-name": node, "stats": stats});
            if let Some(shown) = self.nodes.get(node) {
                self.add_children(shown, Depth::Chain, &mut export);
            }
            export
        };
        self.exports.iter().map(describe).collect()
    }

    fn node(&self, node: &NodeInfo, depth: Depth) -> Value {
        let exports = self
            .exports
            .iter()
            .filter(|(_, shown, _)| *shown == node.name);
        let accountings: Vec<&Arc<Accounting>> = exports.map(|(.., counts)| counts).collect();
        let mut stats = counted(&accountings);
        let highest = accountings.iter().map(|one| one.highest_written_bytes());
        let mut highest_bytes = highest.max().unwrap_or(0);
        let mut description = json!({"node-name": node.name});
        if let Ok(Some(watch)) = self.graph.write_watch(&node.name) {
            highest_bytes = watch.highest_written_bytes();
            let (discards, bytes) = watch.discarded();
            if matches!(node.driver, "file" | "host_device") {
                description["driver-specific"] = json!({
                    "driver": node.driver,
                    "discard-nb-ok": discards,
                    "discard-nb-failed": 0,
                    "discard-bytes-ok": bytes,
                });
            }
        }
        stats["wr_highest_offset"] = json!(highest_bytes);
        description["stats"] = stats;
        self.add_children(node, depth, &mut description);
        description
    }

    /// Adds the nodes that a node stands on, each with those below it.
    fn add_children(&self, node: &NodeInfo, depth: Depth, description: &mut Value) {
        let holder = self.graph.holder_of(&node.name);
        let backing = match depth {
            Depth::Files => None,
            Depth::Chain => self.graph.backing_of(&node.name),
        };
        for (key, child) in [("parent", holder), ("backing", backing)] {
            if let Some(child) = child.and_then(|child| self.nodes.get(&child)) {
                description[key] = self.node(child, depth);
            }
        }
    }
}

/// The sums of what was counted, in the words of `BlockDeviceStats`.
fn counted(accountings: &[&Arc<Accounting>]) -> Value {
    let mut stats = Map::new();
    let mut set = |key: String, number: u64| drop(stats.insert(key, json!(number)));
    for (operation, name) in OPERATIONS {
        let (mut requests, mut bytes, mut failed, mut time_ns) = (0, 0, 0, 0);
        for accounting in accountings {
            let totals = accounting.totals(operation);
            requests += totals.requests;
            bytes += totals.bytes;
            failed += totals.failed;
            time_ns += totals.time_ns;
        }
        set(format!("{name}_operations"), requests);
        set(format!("failed_{name}_operations"), failed);
        // What is refused reaches no disk, and is not counted.
        set(format!("invalid_{name}_operations"), 0);
        set(format!("{name}_total_time_ns"), time_ns);
        if operation != Operation::Flush {
            set(format!("{name}_bytes"), bytes);
            set(format!("{name}_merged"), 0);
        }
    }
    // No disk here has zones.
    for key in [
        "zone_append_bytes",
        "zone_append_merged",
        "zone_append_operations",
        "zone_append_total_time_ns",
        "failed_zone_append_operations",
        "invalid_zone_append_operations",
    ] {
        set(key.to_owned(), 0);
    }
    stats.insert("timed_stats".to_owned(), json!([]));
    stats.insert("account_invalid".to_owned(), json!(false));
    stats.insert("account_failed".to_owned(), json!(!accountings.is_empty()));
    Value::Object(stats)
}

fn describe_histogram(histogram: Histogram) -> Value {
    json!({"boundaries": histogram.boundaries_ns, "bins": histogram.bins})
}

/// Our own in a daemon: QEMU's has no device to set it for.
pub(super) async fn set_histogram(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let id = arguments.need_text("id")?;
    let all = take_boundaries(&mut arguments, "boundaries")?;
    let mut of_each = Vec::new();
    for (operation, _, key) in HISTOGRAMS {
        of_each.push((operation, take_boundaries(&mut arguments, key)?));
    }
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    let accounting = parts.exports.accounting(&id);
    let accounting = accounting.ok_or_else(|| no_device(&id))?;
    let is_end = all.is_none() && of_each.iter().all(|(_, own)| own.is_none());
    for (operation, own) in of_each {
        match own.or_else(|| all.clone()) {
            Some(boundaries_ns) => accounting.set_histogram(operation, Some(boundaries_ns)),
            None if is_end => accounting.set_histogram(operation, None),
            None => {}
        }
    }
    done()
}

fn take_boundaries(arguments: &mut Arguments, key: &str) -> Result<Option<Vec<u64>>, Failure> {
    let Some(list) = arguments.array(key)? else {
        return Ok(None);
    };
    let refused = || {
        Failure::new(format!(
            "Parameter '{key}' expects ascending numbers above 0"
        ))
    };
    if list.is_empty() || list.len() > MOST_BOUNDARIES {
        return Err(Failure::new(format!(
            "Parameter '{key}' expects 1 to {MOST_BOUNDARIES} numbers"
        )));
    }
    let numbers = list
        .iter()
        .map(|number| number.as_u64().ok_or_else(refused));
    let numbers = numbers.collect::<Result<Vec<u64>, Failure>>()?;
    match numbers[0] > 0 && numbers.is_sorted_by(|one, next| one < next) {
        true => Ok(Some(numbers)),
        false => Err(refused()),
    }
}

pub(super) async fn set_write_threshold(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let node = arguments.need_text("node-name")?;
    let threshold_bytes = arguments.need_size("write-threshold")?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    if !parts.nodes.contains(&node) {
        return Err(Failure::new(format!("Device '{node}' not found")));
    }
    match parts.nodes.write_watch(&node)? {
        Some(watch) => {
            watch.set_threshold_bytes(threshold_bytes);
            done()
        }
        None => Err(Failure::new(format!(
            "Node '{node}' is of a format: a threshold can be set for its file"
        ))),
    }
}
