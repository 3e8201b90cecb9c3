//! Commands about what was asked of disks: `query-block`, `query-blockstats`,
//! `block-latency-histogram-set`, `block-set-write-threshold`.
//!
//! QEMU's daemon counts nothing: its exports have no names there. Here each export counts what its
//! clients ask for, and is listed by its id. A node counts what the exports that show it now do.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use serde_json::{Value, json};
use vellum_export::accounting::{Accounting, Histogram, Operation, OperationTotals};
use vellum_graph::live::{Inventory, NodeState, Wanted};
use vellum_options::json;
use vellum_options::json_text::JsonText;

use crate::daemon::Daemon;
use crate::export::ExportInfo;
use crate::qmp::{Arguments, Failure, Outcome, Written};

use super::answers::no_device;
use super::request::{Request, request};

/// What is counted of each export.
const OPERATIONS: [Operation; 4] = [
    Operation::Read,
    Operation::Write,
    Operation::Flush,
    Operation::Discard,
];

/// The arguments of the histograms of operations; as in QEMU, discards have none.
const HISTOGRAMS: [(Operation, &str); 3] = [
    (Operation::Read, "boundaries-read"),
    (Operation::Write, "boundaries-write"),
    (Operation::Flush, "boundaries-flush"),
];

/// Most boundaries of a histogram: clients say them, and each is memory.
const MOST_BOUNDARIES: usize = 1024;

/// Devices of a machine, of which a daemon has none.
pub(super) async fn query_block(_: Rc<Daemon>, (): ()) -> Outcome {
    Ok(json!([]))
}

/// Writes what was asked of disks. Members come in the order in which QEMU prints them.
pub(super) async fn write(daemon: Rc<Daemon>, of_nodes: bool) -> Written {
    let parts = daemon.parts.lock().await;
    let inventory = parts.nodes.inventory(Wanted {
        making: of_nodes,
        ..Wanted::default()
    });
    let exports = parts.exports.accounted(&parts.nodes);
    let mut stats = Statistics::of(&inventory, &exports);
    let mut text = JsonText::of_qmp();
    text.begin('[');
    match of_nodes {
        true => {
            for number in inventory.in_order_of_making() {
                stats.node(&mut text, *number, Depth::Files);
            }
        }
        false => {
            for (export, accounting) in &exports {
                stats.export(&mut text, export, accounting);
            }
        }
    }
    text.end(']');
    Ok(text.into_text())
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
    nodes: &'a Inventory,
    /// What exports have counted, by the number of the node that they show.
    exports: HashMap<usize, Vec<&'a Accounting>>,
    /// Where it stands what was told of nodes: many may stand on one.
    written: HashMap<usize, Range<usize>>,
}

impl<'a> Statistics<'a> {
    fn of(nodes: &'a Inventory, accounted: &'a [(ExportInfo, Arc<Accounting>)]) -> Self {
        let mut exports: HashMap<usize, Vec<&Accounting>> = HashMap::new();
        for (export, accounting) in accounted {
            if let Some(number) = nodes.number(&export.node) {
                exports.entry(number).or_default().push(accounting);
            }
        }
        Statistics {
            nodes,
            exports,
            written: HashMap::new(),
        }
    }

    fn export(&mut self, text: &mut JsonText, export: &ExportInfo, accounting: &Accounting) {
        text.begin('{').string_of("device", &export.id);
        let node = self.nodes.get(&export.node);
        let holder = node.and_then(|node| self.nodes.holder(node));
        let backing = node.and_then(|node| self.nodes.backing(node));
        self.child(text, "parent", holder, Depth::Chain);
        text.key("stats");
        let counts = Counts::of(&[accounting]);
        counts.write(text, accounting.highest_written_bytes(), Some(accounting));
        self.child(text, "backing", backing, Depth::Chain);
        text.string_of("node-name", &export.node).end('}');
    }

    /// Writes what there is to tell of a node, with those that it stands on.
    fn node(&mut self, text: &mut JsonText, number: usize, depth: Depth) {
        if let Some(place) = self.written.get(&number) {
            text.repeat(place.clone());
            return;
        }
        let Some(node) = self.nodes.node(number) else {
            return;
        };
        let accountings = self.exports.get(&number).cloned().unwrap_or_default();
        let highest_bytes = match &node.watch {
            Some(watch) => watch.highest_written_bytes(),
            None => {
                let highest = accountings.iter().map(|one| one.highest_written_bytes());
                highest.max().unwrap_or(0)
            }
        };
        let begin = text.next_value();
        text.begin('{');
        self.child(text, "parent", self.nodes.holder(node), depth);
        text.key("stats");
        Counts::of(&accountings).write(text, highest_bytes, None);
        if depth == Depth::Chain {
            self.child(text, "backing", self.nodes.backing(node), depth);
        }
        text.string_of("node-name", &node.name);
        write_specific(text, node);
        text.end('}');
        self.written.insert(number, text.since(begin));
    }

    /// Adds a node that another one stands on, with those below it.
    fn child(
        &mut self,
        text: &mut JsonText,
        key: &'static str,
        child: Option<usize>,
        depth: Depth,
    ) {
        if let Some(child) = child {
            text.key(key);
            self.node(text, child, depth);
        }
    }
}

/// What only the files of the host have.
fn write_specific(text: &mut JsonText, node: &NodeState) {
    if let Some(watch) = &node.watch
        && matches!(node.driver, "file" | "host_device")
    {
        let (discards, bytes) = watch.discarded();
        text.key("driver-specific").begin('{');
        text.number_of("discard-bytes-ok", bytes);
        text.number_of("discard-nb-ok", discards);
        text.string_of("driver", node.driver);
        text.number_of("discard-nb-failed", 0).end('}');
    }
}

/// The sums of what was counted.
struct Counts {
    /// In the order of [`OPERATIONS`].
    of: [OperationTotals; 4],
    is_counted: bool,
}

impl Counts {
    fn of(accountings: &[&Accounting]) -> Counts {
        let of = OPERATIONS.map(|operation| {
            let mut sum = OperationTotals::default();
            for accounting in accountings {
                let totals = accounting.totals(operation);
                sum.requests += totals.requests;
                sum.bytes += totals.bytes;
                sum.failed += totals.failed;
                sum.time_ns += totals.time_ns;
            }
            sum
        });
        Counts {
            of,
            is_counted: !accountings.is_empty(),
        }
    }

    /// In the words of `BlockDeviceStats`. What is refused reaches no disk, and is not counted; no disk
    /// here has zones.
    fn write(&self, text: &mut JsonText, highest_bytes: u64, export: Option<&Accounting>) {
        let [read, write, flush, discard] = &self.of;
        let histogram = |text: &mut JsonText, key: &'static str, operation: Operation| {
            let found = export.and_then(|export| export.histogram(operation));
            if let Some(histogram) = found {
                text.key(key)
                    .raw(&json::compact(&describe_histogram(histogram)));
            }
        };
        text.begin('{');
        text.number_of("unmap_operations", discard.requests);
        text.number_of("unmap_merged", 0);
        text.number_of("failed_zone_append_operations", 0);
        text.number_of("flush_total_time_ns", flush.time_ns);
        text.number_of("wr_highest_offset", highest_bytes);
        text.number_of("wr_total_time_ns", write.time_ns);
        text.number_of("failed_wr_operations", write.failed);
        text.number_of("failed_rd_operations", read.failed);
        text.number_of("wr_merged", 0);
        text.number_of("wr_bytes", write.bytes);
        text.key("timed_stats").begin('[').end(']');
        text.number_of("failed_unmap_operations", discard.failed);
        text.number_of("zone_append_merged", 0);
        text.number_of("failed_flush_operations", flush.failed);
        text.key("account_invalid").switch(false);
        text.number_of("rd_total_time_ns", read.time_ns);
        text.number_of("invalid_unmap_operations", 0);
        text.number_of("flush_operations", flush.requests);
        text.number_of("wr_operations", write.requests);
        text.number_of("unmap_bytes", discard.bytes);
        text.number_of("rd_merged", 0);
        text.number_of("rd_bytes", read.bytes);
        histogram(text, "wr_latency_histogram", Operation::Write);
        text.number_of("unmap_total_time_ns", discard.time_ns);
        text.number_of("invalid_flush_operations", 0);
        text.key("account_failed").switch(self.is_counted);
        if let Some(idle) = export.and_then(|export| export.idle()) {
            text.number_of("idle_time_ns", idle.as_nanos() as u64);
        }
        text.number_of("zone_append_total_time_ns", 0);
        text.number_of("zone_append_operations", 0);
        text.number_of("rd_operations", read.requests);
        text.number_of("zone_append_bytes", 0);
        text.number_of("invalid_zone_append_operations", 0);
        text.number_of("invalid_wr_operations", 0);
        text.number_of("invalid_rd_operations", 0);
        histogram(text, "rd_latency_histogram", Operation::Read);
        histogram(text, "flush_latency_histogram", Operation::Flush);
        text.end('}');
    }
}

fn describe_histogram(histogram: Histogram) -> Value {
    json!({"boundaries": histogram.boundaries_ns, "bins": histogram.bins})
}

/// Our own in a daemon: QEMU's has no device to set it for.
/// `block-latency-histogram-set`; boundaries are times in ns.
pub(super) struct HistogramChange {
    id: String,
    all: Option<Vec<u64>>,
    of_each: Vec<(Operation, Option<Vec<u64>>)>,
}

impl Request for HistogramChange {
    fn read(arguments: &mut Arguments) -> Result<HistogramChange, Failure> {
        let id = arguments.need_text("id")?;
        let all = take_boundaries(arguments, "boundaries")?;
        let mut of_each = Vec::new();
        for (operation, key) in HISTOGRAMS {
            of_each.push((operation, take_boundaries(arguments, key)?));
        }
        Ok(HistogramChange { id, all, of_each })
    }
}

pub(super) async fn set_histogram(
    daemon: Rc<Daemon>,
    request: HistogramChange,
) -> Result<(), Failure> {
    let HistogramChange { id, all, of_each } = request;
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
    Ok(())
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

request! {
    /// `block-set-write-threshold`.
    pub(super) WriteThreshold {
        node: String = |a| a.need_text("node-name"),
        threshold_bytes: u64 = |a| a.need_size("write-threshold"),
    }
}

pub(super) async fn set_write_threshold(
    daemon: Rc<Daemon>,
    request: WriteThreshold,
) -> Result<(), Failure> {
    let WriteThreshold {
        node,
        threshold_bytes,
    } = request;
    let parts = daemon.parts.lock().await;
    if !parts.nodes.contains(&node) {
        return Err(Failure::new(format!("Device '{node}' not found")));
    }
    match parts.nodes.write_watch(&node)? {
        Some(watch) => {
            watch.set_threshold_bytes(threshold_bytes);
            Ok(())
        }
        None => Err(Failure::new(format!(
            "Node '{node}' is of a format: a threshold can be set for its file"
        ))),
    }
}
