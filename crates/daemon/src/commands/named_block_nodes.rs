//! `query-named-block-nodes`.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use serde_json::Value;
use vellum::luks::{AsLuks, CryptMethod};
use vellum::qcow2::info::BitmapInfo;
use vellum::qcow2::{AsQcow2, Qcow2};
use vellum_format::features::{Autoclear, Compatible, Incompatible};
use vellum_graph::foreign;
use vellum_graph::live::{Inventory, NodeState, Wanted};
use vellum_graph::node::backing_name;
use vellum_images::format_specific;
use vellum_io::lane;
use vellum_options::json_text::JsonText;
use vellum_options::{filename, json};

use crate::daemon::Daemon;
use crate::qmp::Written;

use super::bitmaps;

/// Lengths are told in whole sectors.
const SECTOR_BYTES: u64 = 512;

/// So many nodes are described before others have their turn.
const NODES_A_TURN: usize = 64;

/// Writes all of them. Members come in the order in which QEMU prints them.
pub(super) async fn write(daemon: Rc<Daemon>, is_flat: bool) -> Written {
    // Who has bitmaps listed waits for silent servers, and nobody else does.
    let files = daemon.nodes.files_with_bitmaps();
    daemon.wait_for_answers(&files).await?;
    let parts = daemon.parts.lock().await;
    let inventory = parts.nodes.inventory(Wanted {
        filenames: true,
        sizes: true,
        making: true,
        ..Wanted::default()
    });
    let mut listed = Listed {
        nodes: &inventory,
        is_flat,
        stored_bitmaps: stored_bitmaps(&inventory).await?,
        below: HashMap::new(),
    };
    let mut text = JsonText::of_qmp();
    text.begin('[');
    let numbers = inventory.in_order_of_making().iter().rev();
    let nodes = numbers.filter_map(|number| inventory.node(*number));
    for (at, node) in nodes.enumerate() {
        let bitmaps = match node.may_have_bitmaps {
            true => bitmaps::describe(&daemon, &parts.nodes, &node.name).await?,
            false => Vec::new(),
        };
        listed.describe(&mut text, node, bitmaps);
        if at % NODES_A_TURN == NODES_A_TURN - 1 {
            lane::yield_now().await;
        }
    }
    text.end(']');
    Ok(text.into_text())
}

/// Whether what a node holds cannot be read without a key.
fn is_encrypted(node: &NodeState) -> bool {
    node.device().is_some_and(|device| match device.as_qcow2() {
        Some(image) => image.header().crypt_method != CryptMethod::None,
        None if device.as_luks().is_some() => true,
        None => foreign::facts(&**device).is_some_and(|facts| facts.is_encrypted),
    })
}

/// The bitmaps that images hold, by the names of their nodes; those without any are left out.
async fn stored_bitmaps(nodes: &Inventory) -> vellum::Result<HashMap<String, Vec<BitmapInfo>>> {
    let mut all = HashMap::new();
    for number in nodes.in_order_of_making() {
        let node = nodes.node(*number).filter(|node| node.may_have_bitmaps);
        let image = node.and_then(|node| Some((node, node.device()?.as_qcow2()?)));
        let Some((node, image)) = image else {
            continue;
        };
        let held = image.bitmaps().list().await?;
        if !held.is_empty() {
            all.insert(node.name.clone(), held);
        }
    }
    Ok(all)
}

/// All nodes, as of one moment.
struct Listed<'a> {
    nodes: &'a Inventory,
    stored_bitmaps: HashMap<String, Vec<BitmapInfo>>,
    /// Of each chain only the first image is told of.
    is_flat: bool,
    /// Where it stands what was told of images that others stand on, by their numbers: many may stand
    /// on one.
    below: HashMap<usize, Range<usize>>,
}

impl<'a> Listed<'a> {
    fn child(&self, node: &NodeState, role: &str) -> Option<&'a NodeState> {
        self.nodes.child(node, role)
    }

    fn describe(&mut self, text: &mut JsonText, node: &NodeState, bitmaps: Vec<Value>) {
        let depth = match self.is_flat {
            true => 0,
            false => self.nodes.layers(Some(node)).skip(1).count() as u64,
        };
        text.begin('{').number_of("iops_rd", 0);
        text.string_of("detect_zeroes", node.detect_zeroes());
        text.key("active").switch(node.is_active).key("image");
        self.describe_image(text, node);
        text.number_of("iops_wr", 0)
            .key("ro")
            .switch(node.read_only);
        text.string_of("node-name", &node.name);
        text.number_of("backing_file_depth", depth);
        text.string_of("drv", node.driver);
        text.number_of("iops", 0).number_of("bps_wr", 0);
        let threshold_bytes = node.watch.as_ref().map(|watch| watch.threshold_bytes());
        text.number_of("write_threshold", threshold_bytes.unwrap_or(0));
        if let Some(backing) = self.child(node, "backing") {
            text.string_of("backing_file", &backing.shown_name());
        }
        if !bitmaps.is_empty() {
            let bitmaps = json::compact(&Value::Array(bitmaps));
            text.key("dirty-bitmaps").raw(&bitmaps);
        }
        text.key("encrypted").switch(is_encrypted(node));
        text.number_of("bps", 0).number_of("bps_rd", 0);
        let cache = node.cache();
        text.key("cache").begin('{');
        text.key("no-flush").switch(cache.no_flush);
        text.key("direct").switch(cache.direct);
        text.key("writeback").switch(true).end('}');
        text.string_of("file", &node.shown_name()).end('}');
    }

    /// Adds the image below one.
    fn describe_below(&mut self, text: &mut JsonText, node: &NodeState) {
        let below = self.nodes.number_below(node).filter(|_| !self.is_flat);
        let found = below.and_then(|number| Some((number, self.nodes.node(number)?)));
        let Some((number, image)) = found else {
            return;
        };
        text.key("backing-image");
        if let Some(place) = self.below.get(&number) {
            text.repeat(place.clone());
            return;
        }
        let begin = text.next_value();
        self.describe_image(text, image);
        self.below.insert(number, text.since(begin));
    }

    fn describe_image(&mut self, text: &mut JsonText, node: &NodeState) {
        text.begin('{');
        self.describe_below(text, node);
        let named = node.device().map(|device| backing_name::named(&**device));
        let named = named.unwrap_or_default();
        if let Some(format) = &named.format {
            text.string_of("backing-filename-format", format);
        }
        let image = node.device().and_then(|device| device.as_qcow2());
        let snapshots = image.map(Qcow2::snapshots).unwrap_or_default();
        if !snapshots.is_empty() {
            text.key("snapshots").begin('[');
            for one in &snapshots {
                text.raw(&json::compact(&format_specific::snapshot(one)));
            }
            text.end(']');
        }
        let size_bytes = node.size_bytes.next_multiple_of(SECTOR_BYTES);
        text.number_of("virtual-size", size_bytes);
        text.string_of("filename", &node.shown_name());
        let info = node.device().map(|device| device.info());
        let clusters = info.and_then(|info| info.cluster_size_bytes);
        if let Some(bytes) = clusters.filter(|_| foreign::tells_clusters(node.driver)) {
            text.number_of("cluster-size", bytes);
        }
        text.string_of("format", node.driver);
        if let Some(bytes) = self.allocated_bytes(node) {
            text.number_of("actual-size", bytes);
        }
        self.describe_format(text, node);
        let file = self.child(node, "file").map_or(node, |file| file);
        let full = named.name.as_deref();
        let full = full.and_then(|name| filename::resolve(&file.shown_name(), name).ok());
        if let Some(full) = full {
            text.string_of("full-backing-filename", &full);
        }
        if is_encrypted(node) {
            text.key("encrypted").switch(true);
        }
        if let Some(name) = &named.name {
            text.string_of("backing-filename", name);
        }
        if let Some(is_dirty) = self.is_dirty(node) {
            text.key("dirty-flag").switch(is_dirty);
        }
        text.end('}');
    }

    /// Adds what images of the node's format tell beside what all do.
    fn describe_format(&self, text: &mut JsonText, node: &NodeState) {
        let members = match node.device() {
            None if is_file(node.driver) => Some("{}".to_owned()),
            None => None,
            Some(device) => {
                if let Some(image) = device.as_qcow2() {
                    text.key("format-specific").begin('{');
                    text.string_of("type", node.driver).key("data");
                    let bitmaps = self.stored_bitmaps.get(&node.name);
                    describe_qcow2(text, image, bitmaps.map_or(&[], Vec::as_slice));
                    text.end('}');
                    return;
                }
                let luks = device.as_luks().map(|volume| {
                    let detached = volume.has_detached_header();
                    Value::Object(format_specific::luks_members(&volume.header(), detached))
                });
                let foreign = || format_specific::foreign_members(&*foreign::facts(&**device)?);
                let members = luks.or_else(foreign);
                members.map(|members| json::compact(&members))
            }
        };
        if let Some(members) = members {
            text.key("format-specific").begin('{');
            text.string_of("type", node.driver).key("data");
            text.raw(&members).end('}');
        }
    }

    /// What a node takes on its disk: an image, what its files take.
    fn allocated_bytes(&self, node: &NodeState) -> Option<u64> {
        let files = ["file", "data-file"].map(|role| self.child(node, role));
        let mut files = files.into_iter().flatten().peekable();
        match files.peek() {
            None => node.allocated_bytes,
            Some(_) => files.map(|file| self.allocated_bytes(file)).sum(),
        }
    }

    /// Whether an image is marked dirty, as far as drivers tell of that.
    fn is_dirty(&self, node: &NodeState) -> Option<bool> {
        let qcow2 = node.device().and_then(|device| device.as_qcow2());
        if let Some(qcow2) = qcow2 {
            return Some(qcow2.header().incompatible.contains(Incompatible::DIRTY));
        }
        let device = node.device();
        if let Some(facts) = device.and_then(|device| foreign::facts(&**device)) {
            return foreign::told_dirty(node.driver, &facts);
        }
        match node.driver {
            driver if is_file(driver) => Some(false),
            "raw" | "luks" => self.is_dirty(self.child(node, "file")?),
            _ if self.nodes.backing(node).is_none() => self.is_dirty(self.nodes.shown_below(node)?),
            _ => None,
        }
    }
}

/// Whether a driver is that of the host's files and devices.
fn is_file(driver: &str) -> bool {
    matches!(driver, "file" | "host_device" | "host_cdrom")
}

/// Writes what a qcow2 image tells beside what all images do.
fn describe_qcow2(text: &mut JsonText, image: &Qcow2, bitmaps: &[BitmapInfo]) {
    let header = image.header();
    let geometry = header.geometry();
    let is_old = header.version < 3;
    text.begin('{');
    text.string_of("compat", if is_old { "0.10" } else { "1.1" });
    text.string_of("compression-type", header.compression_type.name());
    if !is_old {
        let lazy = header.compatible.contains(Compatible::LAZY_REFCOUNTS);
        text.key("lazy-refcounts").switch(lazy);
    }
    if !bitmaps.is_empty() {
        text.key("bitmaps").begin('[');
        for one in bitmaps {
            text.raw(&json::compact(&format_specific::bitmap(one)));
        }
        text.end(']');
    }
    text.number_of("refcount-bits", geometry.refcount_bits().into());
    let is_external = !is_old && geometry.external_data;
    if let Some(name) = header.external_data_file().filter(|_| is_external) {
        text.string_of("data-file", &String::from_utf8_lossy(name));
    }
    describe_encryption(text, image);
    if is_external {
        let is_raw = header.autoclear.contains(Autoclear::RAW_EXTERNAL_DATA);
        text.key("data-file-raw").switch(is_raw);
    }
    if !is_old {
        let is_corrupt = header.incompatible.contains(Incompatible::CORRUPT);
        text.key("corrupt").switch(is_corrupt);
        text.key("extended-l2").switch(geometry.extended_l2);
    }
    text.end('}');
}

fn describe_encryption(text: &mut JsonText, image: &Qcow2) {
    let method = match image.header().crypt_method {
        CryptMethod::None => return,
        CryptMethod::Aes => "aes",
        CryptMethod::Luks => "luks",
    };
    let header = image.luks_header();
    let members = header.map(|header| format_specific::luks_members(&header, false));
    let mut members = members.unwrap_or_default();
    members.insert("format".to_owned(), method.into());
    text.key("encrypt");
    text.raw(&json::compact(&Value::Object(members)));
}
