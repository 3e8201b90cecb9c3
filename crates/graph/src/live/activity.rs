//! Which nodes are inactive, and which become so with others.

use vellum::Result;

use crate::live::node::Node;
use crate::live::nodes::Nodes;
use crate::live::state::GraphState;
use crate::live::uses::{Use, User};
use crate::node::errors::{MADE_UP, invalid, not_found};

impl GraphState {
    pub(crate) fn is_inactive(&self, name: &str) -> bool {
        self.nodes.get(name).is_some_and(Node::is_inactive)
    }

    /// Some nodes and all that they stand on, from the top down.
    fn with_all_below(&self, names: &[String]) -> Vec<String> {
        let mut all = names.to_vec();
        let mut at = 0;
        while let Some(name) = all.get(at).cloned() {
            for one in self.uses.by(&name) {
                if !all.contains(&one.node) {
                    all.push(one.node.clone());
                }
            }
            at += 1;
        }
        self.top_down(all)
    }

    /// Whether a node stands on one that is active, but for some.
    fn has_active_parent(&self, name: &str, but: &[String]) -> bool {
        self.uses.of(name).any(|one| match &one.user {
            User::Node(above) => !self.is_inactive(above) && !but.contains(above),
            _ => false,
        })
    }

    /// The nodes that become inactive with some: all below them on which no active one stands.
    fn inactivated_with(&self, names: &[String]) -> Result<Vec<String>> {
        let mut all: Vec<String> = Vec::new();
        for name in self.with_all_below(names) {
            let has_parent = self.has_active_parent(&name, &all);
            if has_parent && names.contains(&name) {
                return Err(invalid("Node has active parent node"));
            }
            if !has_parent && !self.is_inactive(&name) {
                all.push(name);
            }
        }
        Ok(all)
    }

    /// Whether a node is opened by the options of the one above it, and only there.
    pub(crate) fn is_inside_another(&self, name: &str) -> bool {
        let is_backing = |one: &Use| one.wanted.role == "backing";
        let is_below = |one: &Use| matches!(one.user, User::Node(_));
        name.starts_with(MADE_UP)
            && self.uses.of(name).any(is_below)
            && !self.uses.of(name).any(is_backing)
    }
}

impl Nodes {
    /// Whether a node is inactive.
    pub fn is_inactive(&self, name: &str) -> bool {
        self.lock().is_inactive(name)
    }

    /// Whether a node is writable, or would be if it were active.
    pub fn is_writable_when_active(&self, name: &str) -> bool {
        let state = self.lock();
        let node = state.nodes.get(name);
        node.is_some_and(Node::is_writable_when_active)
    }

    /// The nodes that change if a node, or every one, becomes active or inactive.
    ///
    /// # Errors
    /// In QEMU's words, if there is no such node, or an active one stands on what is to be
    /// inactive.
    pub fn affected_by_activity(&self, name: Option<&str>, active: bool) -> Result<Vec<String>> {
        let state = self.lock();
        let names: Vec<String> = match name {
            Some(name) if state.nodes.contains_key(name) => vec![name.to_owned()],
            Some(name) => return Err(not_found(name)),
            None => {
                let is_root = |name: &&String| active || !state.has_active_parent(name, &[]);
                state.nodes.keys().filter(is_root).cloned().collect()
            }
        };
        if !active {
            return state.inactivated_with(&names);
        }
        let mut all = state.with_all_below(&names);
        all.retain(|name| state.is_inactive(name));
        Ok(all)
    }
}
