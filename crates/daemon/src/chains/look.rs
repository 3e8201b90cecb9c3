//! [`Look`]: what there is at one moment, with what is known of all nodes by going through them once.
//!
//! Invariant: what is asked of it for one disk costs what that disk's chain is long, however many others
//! there are.

use std::collections::{HashMap, HashSet};

use vellum_graph::live::{Inventory, NodeState};

/// The nodes over one that no other node stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tops {
    None,
    One(usize),
    Several,
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) nodes: Inventory,
    /// Nodes that exports show.
    pub(super) exported: HashSet<String>,
    /// By the numbers of nodes, as are the parents.
    tops: Vec<Tops>,
    /// How many children nodes have that are this one.
    parents: Vec<usize>,
    /// How many nodes are the file of a path.
    paths: HashMap<String, usize>,
}

impl Look {
    pub(super) fn new(nodes: Inventory, exported: impl IntoIterator<Item = String>) -> Look {
        let mut paths: HashMap<String, usize> = HashMap::new();
        for path in nodes.iter().filter_map(NodeState::path) {
            *paths.entry(path.to_owned()).or_default() += 1;
        }
        Look {
            exported: exported.into_iter().collect(),
            tops: tops(&nodes),
            parents: nodes.counts_of_parents(),
            paths,
            nodes,
        }
    }

    /// The number of the one node that shows another one and that no other node stands on.
    pub(super) fn only_top(&self, name: &str) -> Option<usize> {
        match self.tops.get(self.nodes.number(name)?)? {
            Tops::One(top) => Some(*top),
            Tops::None | Tops::Several => None,
        }
    }

    pub(super) fn is_exported(&self, name: &str) -> bool {
        self.exported.contains(name)
    }

    /// Whether nobody uses an image but what stands on it, or its users if nothing does.
    pub(super) fn is_own(&self, node: &NodeState) -> bool {
        let path = self.nodes.child(node, "file").and_then(NodeState::path);
        let same_file = path.and_then(|path| self.paths.get(path));
        let parents = self.nodes.number(&node.name).map(|at| self.parents[at]);
        same_file == Some(&1) && parents.is_some_and(|count| count <= 1)
    }
}

fn tops(nodes: &Inventory) -> Vec<Tops> {
    let mut tops = vec![Tops::None; nodes.count()];
    let all = nodes.iter().enumerate();
    for (top, _) in all.filter(|(_, node)| !node.is_below) {
        for layer in nodes.numbers_of_layers(top) {
            tops[layer] = match tops[layer] {
                Tops::None => Tops::One(top),
                Tops::One(known) if known == top => Tops::One(top),
                Tops::One(_) | Tops::Several => Tops::Several,
            };
        }
    }
    tops
}
