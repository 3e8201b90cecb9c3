//! `query-named-block-nodes`.

use std::collections::BTreeMap;
use std::rc::Rc;

use serde_json::Value;
use vellum::qcow2::AsQcow2;
use vellum_format::features::Incompatible;
use vellum_io::lane;

use super::{Daemon, bitmaps};
use crate::backing;
use crate::filename;
use crate::json;
use crate::json_text::JsonText;
use crate::nodes::{NodeInfo, Nodes};
use crate::qmp::{Arguments, Written};

/// Lengths are told in whole sectors.
const SECTOR_BYTES: u64 = 512;

/// So many nodes are described before others have their turn.
const NODES_A_TURN: usize = 64;

/// Writes all of them. Members come in the order in which QEMU prints them.
pub(super) async fn write(daemon: Rc<Daemon>, mut arguments: Arguments) -> Written {
    let is_flat = arguments.switch("flat")?.unwrap_or(false);
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    let mut listed = Listed::of(&parts.nodes, is_flat);
    let mut text = JsonText::of_qmp();
    text.begin('[');
    for (at, name) in parts.nodes.in_order_of_making().iter().rev().enumerate() {
        let Some(node) = listed.nodes.get(name) else {
            continue;
        };
        let bitmaps = bitmaps::describe(&daemon, &parts.nodes, node).await?;
        let node = node.clone();
        listed.describe(&mut text, &node, bitmaps);
        if at % NODES_A_TURN == NODES_A_TURN - 1 {
            lane::yield_now().await;
        }
    }
    text.end(']');
    Ok(text.into_text())
}

/// All nodes, as of one moment.
struct Listed<'a> {
    graph: &'a Nodes,
    nodes: BTreeMap<String, Rc<NodeInfo>>,
    filenames: BTreeMap<String, String>,
    /// Of each chain only the first image is told of.
    is_flat: bool,
    /// Images that others stand on, as they were told of: many may stand on one.
    below: BTreeMap<String, Rc<str>>,
}

impl Listed<'_> {
    fn of(graph: &Nodes, is_flat: bool) -> Listed<'_> {
        let nodes = graph.list().into_iter();
        Listed {
            graph,
            nodes: nodes
                .map(|node| (node.name.clone(), Rc::new(node)))
                .collect(),
            filenames: graph.filenames(),
            is_flat,
            below: BTreeMap::new(),
        }
    }

    fn filename<'a>(&'a self, node: &'a NodeInfo) -> &'a str {
        self.filenames.get(&node.name).unwrap_or(&node.filename)
    }

    fn child(&self, node: &NodeInfo, role: &str) -> Option<&Rc<NodeInfo>> {
        self.nodes.get(&self.graph.child_of(&node.name, role)?)
    }

    /// What a node shows where it has nothing of its own; all of it, for a filter.
    fn shown_below(&self, node: &NodeInfo) -> Option<&Rc<NodeInfo>> {
        self.nodes.get(&self.graph.shown_below(&node.name)?)
    }

    fn describe(&mut self, text: &mut JsonText, node: &Rc<NodeInfo>, bitmaps: Vec<Value>) {
        let encrypted = node.device.as_ref().and_then(|device| {
            let header = device.as_qcow2()?.header();
            Some(header.crypt_method != Default::default())
        });
        let mut depth = 0;
        let mut below = self.shown_below(node).filter(|_| !self.is_flat);
        while let Some(next) = below {
            depth += 1;
            below = self.shown_below(next);
        }
        text.begin('{').number_of("iops_rd", 0);
        text.string_of("detect_zeroes", &node.detect_zeroes);
        text.key("active").switch(node.active).key("image");
        self.describe_image(text, node);
        text.number_of("iops_wr", 0)
            .key("ro")
            .switch(!node.writable);
        text.string_of("node-name", &node.name);
        text.number_of("backing_file_depth", depth);
        text.string_of("drv", node.driver);
        text.number_of("iops", 0).number_of("bps_wr", 0);
        let watch = self.graph.write_watch(&node.name).ok().flatten();
        let threshold_bytes = watch.map_or(0, |watch| watch.threshold_bytes());
        text.number_of("write_threshold", threshold_bytes);
        if let Some(backing) = self.child(node, "backing") {
            text.string_of("backing_file", self.filename(backing));
        }
        if !bitmaps.is_empty() {
            let bitmaps = json::compact(&Value::Array(bitmaps));
            text.key("dirty-bitmaps").raw(&bitmaps);
        }
        text.key("encrypted").switch(encrypted.unwrap_or(false));
        text.number_of("bps", 0).number_of("bps_rd", 0);
        text.key("cache").begin('{');
        text.key("no-flush").switch(node.cache.no_flush);
        text.key("direct").switch(node.cache.direct);
        text.key("writeback").switch(true).end('}');
        text.string_of("file", self.filename(node)).end('}');
    }

    /// The image below one, written once however many stand on it.
    fn image_below(&mut self, node: &NodeInfo) -> Option<Rc<str>> {
        let below = self.shown_below(node).filter(|_| !self.is_flat)?.clone();
        if let Some(known) = self.below.get(&below.name) {
            return Some(known.clone());
        }
        let mut text = JsonText::of_qmp();
        self.describe_image(&mut text, &below);
        let written: Rc<str> = text.into_text().into();
        self.below.insert(below.name.clone(), written.clone());
        Some(written)
    }

    fn describe_image(&mut self, text: &mut JsonText, node: &NodeInfo) {
        text.begin('{');
        if let Some(below) = self.image_below(node) {
            text.key("backing-image").raw(&below);
        }
        let named = node.device.as_ref().map(|device| backing::named(&**device));
        let named = named.unwrap_or_default();
        if let Some(format) = &named.format {
            text.string_of("backing-filename-format", format);
        }
        let size_bytes = node.size_bytes.next_multiple_of(SECTOR_BYTES);
        text.number_of("virtual-size", size_bytes);
        text.string_of("filename", self.filename(node));
        let info = node.device.as_ref().map(|device| device.info());
        if let Some(bytes) = info.and_then(|info| info.cluster_size_bytes) {
            text.number_of("cluster-size", bytes);
        }
        text.string_of("format", node.driver);
        if let Some(bytes) = self.allocated_bytes(node) {
            text.number_of("actual-size", bytes);
        }
        if let Some(name) = &named.name {
            let file = self.child(node, "file").map_or(node, |file| file);
            if let Ok(full) = filename::resolve(self.filename(file), name) {
                text.string_of("full-backing-filename", &full);
            }
            text.string_of("backing-filename", name);
        }
        if let Some(is_dirty) = self.is_dirty(node) {
            text.key("dirty-flag").switch(is_dirty);
        }
        text.end('}');
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
