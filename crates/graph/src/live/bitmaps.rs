//! What nodes know of their dirty bitmaps, beside what images hold: those in memory, in which
//! order all of them came, and which of them somebody shows.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum::nodes::Recorder;

use crate::live::nodes::Nodes;
use crate::node::opened::{Filtered, NodeKind};

/// The image of a node, where that is qcow2, and what records its writes.
pub(crate) type BitmapKeepers = (Option<Arc<dyn BlockDevice>>, Arc<Recorder>);

impl Nodes {
    /// What records the writes to a node, if there is one of this name.
    pub fn recorder(&self, node: &str) -> Option<Arc<Recorder>> {
        let state = self.lock();
        // What a job's filter passes on is told to the node behind it alone.
        let node = state.nodes.get(node).filter(|node| !node.is_filter)?;
        Some(node.bitmaps.recorder.clone())
    }

    /// What keeps the bitmaps of a node, if there is one of this name: its image, where that is qcow2, and
    /// what records its writes. A filter over an image shows it, and has bitmaps of its own.
    pub(crate) fn bitmap_keepers(&self, node: &str) -> Option<BitmapKeepers> {
        let state = self.lock();
        let node = state.nodes.get(node)?;
        let image = match &node.opened.kind {
            NodeKind::Device(device) if node.opened.driver.name == "qcow2" => Some(device.clone()),
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
        let state = self.lock();
        let images = state.nodes.iter().filter(|(_, node)| node.stores_bitmaps());
        let file = |name: &String| Some(state.uses.by_as(name, "file")?.node.clone());
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
        let state = self.lock();
        let names = state.nodes.get(node).map(|node| &node.bitmaps.names);
        let found = names.and_then(|names| names.iter().position(|other| other == name));
        found.map_or(0, |at| at + 1)
    }

    /// The node that a filter shows, whatever filters are between, as far as these let it be
    /// exchanged; one that is no filter is itself.
    pub fn skip_filters(&self, name: &str) -> String {
        let state = self.lock();
        let mut shown = name;
        while let Some(node) = state.nodes.get(shown)
            && node.is_filter_driver()
            && let Some(below) = state.uses.by_as(shown, "file")
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
        let state = self.lock();
        let node = state.nodes.get(name);
        node.is_some_and(|node| node.is_filter || node.is_filter_driver())
    }

    /// The node that a job's filter of this name is in front of; any other one is itself.
    pub fn behind_job_filter(&self, name: &str) -> String {
        let state = self.lock();
        match state.nodes.get(name) {
            Some(node) if node.is_filter => node.owner.clone(),
            _ => name.to_owned(),
        }
    }

    /// The node that another one shows: its backing file, or what a filter stands on.
    pub fn shown_below(&self, name: &str) -> Option<String> {
        let state = self.lock();
        let is_filter = state.nodes.get(name)?.is_filter_driver();
        let mut below = state.uses.by(name).filter(|one| match &*one.wanted.role {
            "backing" => true,
            "file" | "image" | "raw" => is_filter,
            _ => false,
        });
        // An image below a verifying filter is named beside what it is compared with.
        let found = below.clone().find(|one| one.wanted.role == "image");
        found.or_else(|| below.next()).map(|one| one.node.clone())
    }
}
