//! The nodes, found by name and by owner: whoever closes one of thousands looks at its own only.
//!
//! Invariants:
//! - Both ways lead to the same nodes.
//! - A node that is being opened is found by name only by those that are opened with it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Deref;

use crate::live::node::Node;
use crate::node::place::NodePlace;

/// Nodes by name.
#[derive(Debug, Default)]
pub(crate) struct NodeTable {
    by_name: BTreeMap<String, Node>,
    /// Those that are not shown yet.
    hidden: BTreeMap<String, Node>,
    /// Those that were asked for, in the order in which they were added.
    roots: Vec<String>,
    /// The names of those that a node owns.
    by_owner: HashMap<String, BTreeSet<String>>,
    /// How often something may have changed.
    changes: u64,
}

/// What only looks, at those that are shown.
impl Deref for NodeTable {
    type Target = BTreeMap<String, Node>;

    fn deref(&self) -> &Self::Target {
        &self.by_name
    }
}

impl NodeTable {
    /// The names of the nodes that one owns.
    pub(crate) fn of_owner(&self, owner: &str) -> impl Iterator<Item = &str> {
        let owned = self.by_owner.get(owner);
        owned.into_iter().flatten().map(String::as_str)
    }

    /// How often something may have changed: whoever finds the number that it knows need not look.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// A node; [`NodeTable::set_owner`] changes its owner.
    pub(crate) fn get_mut(&mut self, name: &str) -> Option<&mut Node> {
        self.changes += 1;
        self.by_name.get_mut(name)
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut Node> {
        self.changes += 1;
        self.by_name.values_mut()
    }

    /// Whether there is a node of a name, be it shown or not.
    pub(crate) fn is_there(&self, name: &str) -> bool {
        self.any(name).is_some()
    }

    fn any(&self, name: &str) -> Option<&Node> {
        self.by_name.get(name).or_else(|| self.hidden.get(name))
    }

    /// The owner of a node, be it shown or not.
    pub(crate) fn owner(&self, name: &str) -> Option<&str> {
        self.any(name).map(|node| node.owner.as_str())
    }

    /// The node that whoever is opened at a place finds under a name.
    pub(crate) fn seen_from(&self, place: &NodePlace, name: &str) -> Option<&Node> {
        let own = self.hidden.get(name);
        let own = own.filter(|node| place.opening_root() == Some(&node.owner));
        own.or_else(|| self.by_name.get(name))
    }

    /// As [`NodeTable::seen_from`].
    pub(crate) fn seen_from_mut(&mut self, place: &NodePlace, name: &str) -> Option<&mut Node> {
        self.changes += 1;
        let own = self.hidden.get_mut(name);
        let own = own.filter(|node| place.opening_root() == Some(&node.owner));
        own.or_else(|| self.by_name.get_mut(name))
    }

    /// A node that is not shown yet.
    pub(crate) fn hidden_mut(&mut self, name: &str) -> Option<&mut Node> {
        self.hidden.get_mut(name)
    }

    /// Adds a node of which there is none yet.
    pub(crate) fn insert(&mut self, name: String, node: Node) {
        self.changes += 1;
        self.own(&name, &node.owner);
        self.by_name.insert(name, node);
    }

    /// Adds a node that is being opened.
    pub(crate) fn insert_hidden(&mut self, name: String, node: Node) {
        self.own(&name, &node.owner);
        self.hidden.insert(name, node);
    }

    fn own(&mut self, name: &str, owner: &str) {
        let owned = self.by_owner.entry(owner.to_owned()).or_default();
        owned.insert(name.to_owned());
    }

    /// Shows a node that was asked for, and what was opened with it.
    pub(crate) fn show(&mut self, owner: &str) {
        self.changes += 1;
        self.roots.push(owner.to_owned());
        for name in self.by_owner.get(owner).into_iter().flatten() {
            if let Some(node) = self.hidden.remove(name) {
                self.by_name.insert(name.clone(), node);
            }
        }
    }

    /// Those that were asked for, in the order in which they were added.
    pub(crate) fn roots(&self) -> &[String] {
        &self.roots
    }

    /// Takes some of those that were asked for out of their list: they are about to be closed.
    pub(crate) fn take_roots(&mut self, is_taken: impl Fn(&str) -> bool) -> Vec<String> {
        self.changes += 1;
        let roots = std::mem::take(&mut self.roots).into_iter();
        let (taken, kept) = roots.partition(|root| is_taken(root));
        self.roots = kept;
        taken
    }

    pub(crate) fn remove(&mut self, name: &str) -> Option<Node> {
        self.changes += 1;
        let shown = self.by_name.remove(name);
        let node = shown.or_else(|| self.hidden.remove(name))?;
        self.disown(name, &node.owner);
        Some(node)
    }

    /// Gives a node to another one.
    pub(crate) fn set_owner(&mut self, name: &str, owner: &str) {
        self.changes += 1;
        let shown = self.by_name.get_mut(name);
        let Some(node) = shown.or_else(|| self.hidden.get_mut(name)) else {
            return;
        };
        let old = std::mem::replace(&mut node.owner, owner.to_owned());
        self.disown(name, &old);
        self.own(name, owner);
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
