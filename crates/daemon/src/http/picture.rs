//! [`Picture`]: nodes, exports and jobs at one moment, as disks.
//!
//! A disk is a node that no other node stands on, or that exports show: also where an overlay that was
//! committed into it is still there. Its layers are what it shows, from the top down: filters, and the
//! images of its chain.

use std::collections::HashMap;

use vellum::qcow2::{AsQcow2, CacheCounts, WriteLogUsage};
use vellum_graph::live::{Inventory, NodeState};

use crate::export::CountedExport;

use super::moment::Moment;

/// See the module's head.
#[derive(Debug)]
pub(super) struct Picture {
    pub(super) nodes: Inventory,
    pub(super) moment: Moment,
    /// The places of exports in the moment, by the numbers of the nodes that they show.
    exports: HashMap<usize, Vec<usize>>,
}

impl Picture {
    pub(super) fn new(nodes: Inventory, moment: Moment) -> Picture {
        let mut exports: HashMap<usize, Vec<usize>> = HashMap::new();
        for (at, export) in moment.exports.iter().enumerate() {
            if let Some(number) = nodes.number(&export.node) {
                exports.entry(number).or_default().push(at);
            }
        }
        Picture {
            nodes,
            moment,
            exports,
        }
    }

    /// The disks with their numbers, in the order of their names.
    pub(super) fn disks(&self) -> impl Iterator<Item = Disk<'_>> {
        let all = self.nodes.iter().enumerate();
        all.filter_map(|(number, node)| self.disk(number, node))
    }

    /// The disk of a name, if it is one.
    pub(super) fn disk_of_name(&self, name: &str) -> Option<Disk<'_>> {
        let number = self.nodes.number(name)?;
        self.disk(number, self.nodes.node(number)?)
    }

    fn disk<'a>(&'a self, number: usize, node: &'a NodeState) -> Option<Disk<'a>> {
        let is_disk = !node.is_below || self.exports.contains_key(&number);
        is_disk.then_some(Disk { number, node })
    }

    /// The exports that show a disk.
    pub(super) fn exports_of<'a>(
        &'a self,
        disk: Disk<'_>,
    ) -> impl Iterator<Item = &'a CountedExport> + Clone {
        let places = self.exports.get(&disk.number).into_iter().flatten();
        places.map(|at| &self.moment.exports[*at])
    }

    /// The layers of a disk, from the top down.
    pub(super) fn layers<'a>(&'a self, disk: Disk<'a>) -> impl Iterator<Item = &'a NodeState> {
        self.nodes.layers(Some(disk.node))
    }

    /// Bytes that a node takes on its disk: an image, what its files take.
    pub(super) fn allocated_bytes(&self, node: &NodeState) -> Option<u64> {
        self.nodes.allocated_bytes(node)
    }

    /// How long the file of a node is, in bytes: of an image its own, without a data file.
    pub(super) fn file_bytes(&self, node: &NodeState) -> Option<u64> {
        match (self.nodes.child(node, "file"), node.device()) {
            (Some(file), _) => Some(file.size_bytes),
            (None, None) => Some(node.size_bytes),
            (None, Some(_)) => None,
        }
    }

    /// The caches of the topmost image of a disk that has some.
    pub(super) fn caches_of(&self, disk: Disk<'_>) -> Option<CacheCounts> {
        self.nodes.layers(Some(disk.node)).find_map(caches)
    }
}

/// A disk: a node, and its number.
#[derive(Debug, Clone, Copy)]
pub(super) struct Disk<'a> {
    number: usize,
    pub(super) node: &'a NodeState,
}

/// The caches of a node, if it has some.
pub(super) fn caches(node: &NodeState) -> Option<CacheCounts> {
    let qcow2 = node.device()?.as_qcow2()?;
    Some(qcow2.cache_counts())
}

/// The write log of a node, if it has one.
pub(super) fn write_log(node: &NodeState) -> Option<WriteLogUsage> {
    node.device()?.as_qcow2()?.write_log_usage()
}
