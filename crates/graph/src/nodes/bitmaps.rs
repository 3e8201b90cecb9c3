//! What nodes know of their dirty bitmaps, beside what images hold: those in memory, in which
//! order all of them came, and which of them somebody shows.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum::nodes::{RecordedDevice, RecordedStorage, Recorder};
use vellum::qcow2::AsQcow2;

use super::shown::ShownBitmap;
use super::{Node, Nodes};
use crate::foreign;
use crate::graph::{Filtered, NodeKind, OpenedNode};

/// A node's bitmaps.
#[derive(Debug, Default)]
pub(super) struct NodeBitmaps {
    pub(super) recorder: Arc<Recorder>,
    /// The names of those that were added here, in that order.
    names: Vec<String>,
    /// Those that exports show, by their numbers.
    pub(super) shown: Vec<(u64, ShownBitmap)>,
}

impl NodeBitmaps {
    /// Those that come with a node of a format other than qcow2.
    pub(super) fn of(node: &OpenedNode) -> NodeBitmaps {
        let bitmaps = NodeBitmaps::default();
        // A filter shows what is below it, but has bitmaps of its own.
        let is_image = foreign::find(node.driver).is_some();
        if let (true, NodeKind::Device(device)) = (is_image, &node.kind) {
            for bitmap in foreign::stored_bitmaps(&**device) {
                bitmaps.recorder.add(bitmap);
            }
        }
        bitmaps
    }
}

/// Drivers that show what they stand on.
const FILTERS: [&str; 8] = [
    "blkdebug",
    "blklogwrites",
    "blkverify",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "preallocate",
    "throttle",
];

impl Node {
    /// Whether it may have bitmaps, of its image's or its own; no file is asked.
    pub(super) fn may_have_bitmaps(&self) -> bool {
        self.stores_bitmaps() || !self.is_filter && !self.bitmaps.recorder.is_empty()
    }

    /// Whether it is an image that holds bitmaps; no file is asked.
    fn stores_bitmaps(&self) -> bool {
        match &self.opened.kind {
            NodeKind::Device(device) if self.opened.driver == "qcow2" => {
                let image = device.as_qcow2();
                image.is_some_and(|image| !image.bitmaps().are_none())
            }
            _ => false,
        }
    }

    /// Whether it shows another node, with something done on the way.
    pub(super) fn is_filter_driver(&self) -> bool {
        FILTERS.contains(&self.opened.driver)
    }
}

impl OpenedNode {
    /// The node, changes of which are told to a recorder.
    pub(super) fn recorded(self, recorder: &Arc<Recorder>) -> OpenedNode {
        let recorder = recorder.clone();
        let kind = match self.kind {
            NodeKind::Device(device) => NodeKind::Device(RecordedDevice::new(device, recorder)),
            NodeKind::Storage(storage) => {
                NodeKind::Storage(RecordedStorage::new(storage, recorder))
            }
        };
        OpenedNode { kind, ..self }
    }
}

/// The image of a node, where that is qcow2, and what records its writes.
pub(crate) type BitmapKeepers = (Option<Arc<dyn BlockDevice>>, Arc<Recorder>);

impl Nodes {
    /// What records the writes to a node, if there is one of this name.
    pub fn recorder(&self, node: &str) -> Option<Arc<Recorder>> {
        let named = self.lock();
        // What a job's filter passes on is told to the node behind it alone.
        let node = named.nodes.get(node).filter(|node| !node.is_filter)?;
        Some(node.bitmaps.recorder.clone())
    }

    /// What keeps the bitmaps of a node, if there is one of this name: its image, where that is qcow2, and
    /// what records its writes. A filter over an image shows it, and has bitmaps of its own.
    pub(crate) fn bitmap_keepers(&self, node: &str) -> Option<BitmapKeepers> {
        let named = self.lock();
        let node = named.nodes.get(node)?;
        let image = match &node.opened.kind {
            NodeKind::Device(device) if node.opened.driver == "qcow2" => Some(device.clone()),
            _ => None,
        };
        let recorder = match node.is_filter {
            true => Arc::default(),
            false => node.bitmaps.recorder.clone(),
        };
        Some((image, recorder))
    }

    /// The files of the images that hold bitmaps: whoever lists these reads there.
    pub fn files_with_bitmaps(&self) -> Vec<String> {
        let named = self.lock();
        let images = named.nodes.iter().filter(|(_, node)| node.stores_bitmaps());
        let file = |name: &String| Some(named.uses.by_as(name, "file")?.node.clone());
        images.filter_map(|(name, _)| file(name)).collect()
    }

    /// The cluster size of a node, or of what it shows if it has none, in bytes.
    pub fn cluster_size_bytes(&self, node: &str) -> Option<u64> {
        let opened = self.known(node).ok()?;
        match (&opened.kind, &opened.filtered) {
            (NodeKind::Device(device), _) | (_, Some(Filtered { device, .. })) => {
                device.info().cluster_size_bytes
            }
            (NodeKind::Storage(_), None) => None,
        }
    }

    /// Notes that a bitmap was added to a node, after those that it has.
    pub fn note_bitmap(&self, node: &str, name: &str) {
        if let Some(node) = self.lock().nodes.get_mut(node) {
            node.bitmaps.names.retain(|other| other != name);
            node.bitmaps.names.push(name.to_owned());
        }
    }

    /// When a bitmap was added to a node, beside others; 0 for those that were there before.
    pub(crate) fn bitmap_number(&self, node: &str, name: &str) -> usize {
        let named = self.lock();
        let names = named.nodes.get(node).map(|node| &node.bitmaps.names);
        let found = names.and_then(|names| names.iter().position(|other| other == name));
        found.map_or(0, |at| at + 1)
    }

    /// The node that a filter shows, whatever filters are between, as far as these let it be
    /// exchanged; one that is no filter is itself.
    pub fn skip_filters(&self, name: &str) -> String {
        let named = self.lock();
        let mut shown = name;
        while let Some(node) = named.nodes.get(shown)
            && node.is_filter_driver()
            && let Some(below) = named.uses.by_as(shown, "file")
            && below.link.is_some()
        {
            shown = &below.node;
        }
        shown.to_owned()
    }

    /// The backing file of a node, or of the image that it filters.
    pub fn below_filters(&self, name: &str) -> Option<String> {
        self.backing_of(&self.skip_filters(name))
    }

    /// How many layers a node's device tells of below its own: those under filters are among them.
    pub fn layers_below(&self, name: &str) -> u32 {
        let stands = |node: &String| self.backing_of(node).is_some();
        self.shown_chain(name).filter(stands).count() as u32
    }

    /// A node and those that it shows, from the top down: backing files, and what filters stand on.
    pub fn shown_chain(&self, name: &str) -> impl Iterator<Item = String> {
        let below = |above: &String| self.shown_below(above);
        std::iter::successors(Some(name.to_owned()), below)
    }

    /// Whether a node shows what it stands on, with something done on the way.
    pub fn is_filter(&self, name: &str) -> bool {
        let named = self.lock();
        let node = named.nodes.get(name);
        node.is_some_and(|node| node.is_filter || node.is_filter_driver())
    }

    /// The node that a job's filter of this name is in front of; any other one is itself.
    pub fn behind_job_filter(&self, name: &str) -> String {
        let named = self.lock();
        match named.nodes.get(name) {
            Some(node) if node.is_filter => node.owner.clone(),
            _ => name.to_owned(),
        }
    }

    /// The node that another one shows: its backing file, or what a filter stands on.
    pub fn shown_below(&self, name: &str) -> Option<String> {
        let named = self.lock();
        let is_filter = named.nodes.get(name)?.is_filter_driver();
        let mut below = named.uses.by(name).filter(|one| match &*one.wanted.role {
            "backing" => true,
            "file" | "image" | "raw" => is_filter,
            _ => false,
        });
        // An image below a verifying filter is named beside what it is compared with.
        let found = below.clone().find(|one| one.wanted.role == "image");
        found.or_else(|| below.next()).map(|one| one.node.clone())
    }
}
