//! The nodes, found by name and by owner: whoever closes one of thousands looks at its own only.
//!
//! Invariant: both ways lead to the same nodes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Deref;

use super::Node;

/// Nodes by name.
#[derive(Debug, Default)]
pub(super) struct NodeTable {
    by_name: BTreeMap<String, Node>,
    /// The names of those that a node owns.
    by_owner: HashMap<String, BTreeSet<String>>,
}

/// What only looks.
impl Deref for NodeTable {
    type Target = BTreeMap<String, Node>;

    fn deref(&self) -> &Self::Target {
        &self.by_name
    }
}

impl NodeTable {
    /// The names of the nodes that one owns.
    pub(super) fn of_owner(&self, owner: &str) -> impl Iterator<Item = &str> {
        let owned = self.by_owner.get(owner);
        owned.into_iter().flatten().map(String::as_str)
    }

    /// A node; [`NodeTable::set_owner`] changes its owner.
    pub(super) fn get_mut(&mut self, name: &str) -> Option<&mut Node> {
        self.by_name.get_mut(name)
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut Node> {
        self.by_name.values_mut()
    }

    /// Adds a node of which there is none yet.
    pub(super) fn insert(&mut self, name: String, node: Node) {
        let owned = self.by_owner.entry(node.owner.clone()).or_default();
        owned.insert(name.clone());
        self.by_name.insert(name, node);
    }

    pub(super) fn remove(&mut self, name: &str) -> Option<Node> {
        let node = self.by_name.remove(name)?;
        self.disown(name, &node.owner);
        Some(node)
    }

    /// Gives a node to another one.
    pub(super) fn set_owner(&mut self, name: &str, owner: &str) {
        let Some(node) = self.by_name.get_mut(name) else {
            return;
        };
        let old = std::mem::replace(&mut node.owner, owner.to_owned());
        self.disown(name, &old);
        let owned = self.by_owner.entry(owner.to_owned()).or_default();
        owned.insert(name.to_owned());
    }

    fn disown(&mut self, name: &str, owner: &str) {
        if let Some(owned) = self.by_owner.get_mut(owner) {
            owned.remove(name);
            if owned.is_empty() {
                self.by_owner.remove(owner);
            }
        }
    }
}
