//! `query-named-block-nodes`.

use std::collections::BTreeMap;
use std::rc::Rc;

use serde_json::{Value, json};
use vellum::qcow2::AsQcow2;
use vellum_format::features::Incompatible;
use vellum_io::lane;

use super::{Daemon, bitmaps};
use crate::backing;
use crate::filename;
use crate::nodes::{NodeInfo, Nodes};
use crate::qmp::{Arguments, Outcome};

/// Lengths are told in whole sectors.
const SECTOR_BYTES: u64 = 512;

pub(super) async fn query(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let is_flat = arguments.switch("flat")?.unwrap_or(false);
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    let listed = Listed::of(&parts.nodes, is_flat);
    let mut described = Vec::with_capacity(listed.nodes.len());
    for name in parts.nodes.in_order_of_making().iter().rev() {
        let Some(node) = listed.nodes.get(name) else {
            continue;
        };
        let mut description = listed.describe(node);
        let watch = parts.nodes.write_watch(&node.name).ok().flatten();
        let threshold_bytes = watch.map_or(0, |watch| watch.threshold_bytes());
        description["write_threshold"] = json!(threshold_bytes);
        let bitmaps = bitmaps::describe(&daemon, &parts.nodes, node).await?;
        if !bitmaps.is_empty() {
            description["dirty-bitmaps"] = json!(bitmaps);
        }
        described.push(description);
        lane::yield_now().await;
    }
    Ok(Value::Array(described))
}

/// All nodes, as of one moment.
struct Listed<'a> {
    graph: &'a Nodes,
    nodes: BTreeMap<String, NodeInfo>,
    filenames: BTreeMap<String, String>,
    /// Of each chain only the first image is told of.
    is_flat: bool,
}

impl Listed<'_> {
    fn of(graph: &Nodes, is_flat: bool) -> Listed<'_> {
        let nodes = graph.list().into_iter();
        Listed {
            graph,
            nodes: nodes.map(|node| (node.name.clone(), node)).collect(),
            filenames: graph.filenames(),
            is_flat,
        }
    }

    fn filename<'a>(&'a self, node: &'a NodeInfo) -> &'a str {
        self.filenames.get(&node.name).unwrap_or(&node.filename)
    }

    fn child(&self, node: &NodeInfo, role: &str) -> Option<&NodeInfo> {
        self.nodes.get(&self.graph.child_of(&node.name, role)?)
    }

    /// What a node shows where it has nothing of its own; all of it, for a filter.
    fn shown_below(&self, node: &NodeInfo) -> Option<&NodeInfo> {
        self.nodes.get(&self.graph.shown_below(&node.name)?)
    }

    /// The members in the order in which QEMU adds them, which decides how they are printed.
    fn describe(&self, node: &NodeInfo) -> Value {
        let encrypted = node.device.as_ref().and_then(|device| {
            let header = device.as_qcow2()?.header();
            Some(header.crypt_method != Default::default())
        });
        let mut description = json!({
            "file": self.filename(node),
            "node-name": node.name,
            "ro": !node.writable,
            "drv": node.driver,
        });
        if let Some(backing) = self.child(node, "backing") {
            description["backing_file"] = json!(self.filename(backing));
        }
        let mut depth = 0;
        let mut below = self.shown_below(node).filter(|_| !self.is_flat);
        while let Some(next) = below {
            depth += 1;
            below = self.shown_below(next);
        }
        description["backing_file_depth"] = json!(depth);
        description["active"] = json!(node.active);
        description["encrypted"] = json!(encrypted.unwrap_or(false));
        description["detect_zeroes"] = json!(node.detect_zeroes);
        for key in ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"] {
            description[key] = json!(0);
        }
        description["image"] = self.describe_image(node);
        description["cache"] = json!({
            "writeback": true,
            "direct": node.cache.direct,
            "no-flush": node.cache.no_flush,
        });
        description
    }

    fn describe_image(&self, node: &NodeInfo) -> Value {
        let mut image = json!({
            "filename": self.filename(node),
            "format": node.driver,
        });
        if let Some(is_dirty) = self.is_dirty(node) {
            image["dirty-flag"] = json!(is_dirty);
        }
        if let Some(bytes) = self.allocated_bytes(node) {
            image["actual-size"] = json!(bytes);
        }
        image["virtual-size"] = json!(node.size_bytes.next_multiple_of(SECTOR_BYTES));
        if let Some(device) = &node.device {
            if let Some(cluster_size_bytes) = device.info().cluster_size_bytes {
                image["cluster-size"] = json!(cluster_size_bytes);
            }
            let named = backing::named(&**device);
            if let Some(name) = named.name {
                let file = self.child(node, "file").unwrap_or(node);
                if let Ok(full) = filename::resolve(self.filename(file), &name) {
                    image["full-backing-filename"] = json!(full);
                }
                image["backing-filename"] = json!(name);
            }
            if let Some(format) = named.format {
                image["backing-filename-format"] = json!(format);
            }
        }
        if let Some(below) = self.shown_below(node).filter(|_| !self.is_flat) {
            image["backing-image"] = self.describe_image(below);
        }
        image
    }

    /// What a node takes on its disk: an image, what its files take.
    fn allocated_bytes(&self, node: &NodeInfo) -> Option<u64> {
        let files = ["file", "data-file"].map(|role| self.child(node, role));
        let mut files = files.into_iter().flatten().peekable();
        match files.peek() {
            None => node.allocated_bytes,
            Some(_) => files.map(|file| self.allocated_bytes(file)).sum(),
        }
    }

    /// Whether an image is marked dirty, as far as drivers tell of that.
    fn is_dirty(&self, node: &NodeInfo) -> Option<bool> {
        let qcow2 = node.device.as_ref().and_then(|device| device.as_qcow2());
        if let Some(qcow2) = qcow2 {
            return Some(qcow2.header().incompatible.contains(Incompatible::DIRTY));
        }
        match node.driver {
            "file" | "host_device" => Some(false),
            "raw" | "luks" => self.is_dirty(self.child(node, "file")?),
            _ if node.backing.is_none() => self.is_dirty(self.shown_below(node)?),
            _ => None,
        }
    }
}
