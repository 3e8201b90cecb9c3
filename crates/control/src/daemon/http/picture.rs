//! [`Picture`]: nodes, exports and jobs at one moment, as disks.
//!
//! A disk is a node that no other node stands on. Its layers are what it shows, from the top down:
//! filters, and the images of its chain.

use std::collections::{BTreeMap, HashMap};

use vellum::qcow2::{AsQcow2, CacheCounts, WriteLogUsage};

use super::moment::Moment;
use crate::daemon::export::CountedExport;
use crate::nodes::NodeState;

/// See the module's head.
#[derive(Debug)]
pub(super) struct Picture {
    pub(super) nodes: BTreeMap<String, NodeState>,
    pub(super) moment: Moment,
    /// The places of exports in the moment, by the nodes that they show.
    exports: HashMap<String, Vec<usize>>,
}

impl Picture {
    pub(super) fn new(nodes: Vec<NodeState>, moment: Moment) -> Picture {
        let mut exports: HashMap<String, Vec<usize>> = HashMap::new();
        for (at, export) in moment.exports.iter().enumerate() {
            exports.entry(export.node.clone()).or_default().push(at);
        }
        let nodes = nodes.into_iter();
        Picture {
            nodes: nodes.map(|node| (node.name.clone(), node)).collect(),
            moment,
            exports,
        }
    }

    /// The disks, in the order of their names.
    pub(super) fn disks(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.values().filter(|node| !node.is_below)
    }

    /// The exports that show a node.
    pub(super) fn exports_of<'a>(
        &'a self,
        node: &str,
    ) -> impl Iterator<Item = &'a CountedExport> + Clone {
        let places = self.exports.get(node).into_iter().flatten();
        places.map(|at| &self.moment.exports[*at])
    }

    /// A node, and what it shows below, from the top down.
    pub(super) fn layers<'a>(&'a self, top: &'a NodeState) -> impl Iterator<Item = &'a NodeState> {
        let below = |node: &&'a NodeState| self.nodes.get(node.shown_below()?);
        // What changes while it is looked at makes no circle that would have an end.
        std::iter::successors(Some(top), below).take(self.nodes.len())
    }

    /// Bytes that a node takes on its disk: an image, what its files take.
    pub(super) fn allocated_bytes(&self, node: &NodeState) -> Option<u64> {
        let files = ["file", "data-file"].map(|role| self.child(node, role));
        let mut files = files.into_iter().flatten().peekable();
        match files.peek() {
            None => node.allocated_bytes,
            Some(_) => files
                .map(|file| file.allocated_bytes.or_else(|| self.allocated_bytes(file)))
                .sum(),
        }
    }

    /// How long the file of a node is, in bytes: of an image its own, without a data file.
    pub(super) fn file_bytes(&self, node: &NodeState) -> Option<u64> {
        match (self.child(node, "file"), &node.device) {
            (Some(file), _) => Some(file.size_bytes),
            (None, None) => Some(node.size_bytes),
            (None, Some(_)) => None,
        }
    }

    fn child(&self, node: &NodeState, role: &str) -> Option<&NodeState> {
        self.nodes.get(node.child(role)?)
    }

    /// The caches of the topmost image of a disk that has some.
    pub(super) fn caches_of(&self, disk: &NodeState) -> Option<CacheCounts> {
        self.layers(disk).find_map(caches)
    }
}

/// The caches of a node, if it has some.
pub(super) fn caches(node: &NodeState) -> Option<CacheCounts> {
    let qcow2 = node.device.as_ref()?.as_qcow2()?;
    Some(qcow2.cache_counts())
}

/// The write log of a node, if it has one.
pub(super) fn write_log(node: &NodeState) -> Option<WriteLogUsage> {
    node.device.as_ref()?.as_qcow2()?.write_log_usage()
}
