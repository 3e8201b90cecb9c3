//! [`GraphMemo`]: what lists of all nodes say of the graph, as it was found last: of a thousand nodes most
//! stay where they are from one list to the next. `inventory.rs` alone uses it.
//!
//! Invariants:
//! - What is remembered is thrown away whenever nodes, or who uses them, may have changed; a build with
//!   assertions makes it anew each time, and compares.
//! - No node, and no file, is held open by it.

use std::collections::HashMap;
use std::sync::Arc;

use crate::live::names::Naming;
use crate::live::node::Node;
use crate::live::positions::{Filenames, GraphMemo, Position};
use crate::live::state::GraphState;
use crate::live::uses::{Use, User};
use crate::node::opened::OpenedNode;

/// What a node is to a job that writes to it alone.
const TARGET: &str = "target";

impl GraphMemo {
    pub(crate) fn positions(&mut self, state: &GraphState) -> &[Arc<Position>] {
        let find = || state.positions(&state.names());
        let found = self.positions.get_or_insert_with(find);
        debug_assert_eq!(*found, find(), "places of nodes are remembered wrongly");
        found
    }

    pub(crate) fn making(&mut self, state: &GraphState) -> Arc<[usize]> {
        let find = || state.numbers_in_order_of_making();
        let found = self.making.get_or_insert_with(find);
        debug_assert_eq!(*found, find(), "the order of nodes is remembered wrongly");
        found.clone()
    }

    /// Headers of images change without a change of the graph: what is in them is looked at each time.
    pub(crate) fn filenames(&mut self, state: &GraphState) -> Arc<[Option<Arc<str>>]> {
        let opened = || state.nodes.values().map(|node| &node.opened);
        let is_so = |known: &Filenames| {
            let mut both = opened().zip(&known.backing_texts);
            both.all(|(node, text)| node.has_backing_text(text.as_deref()))
        };
        if !self.filenames.as_ref().is_some_and(is_so) {
            self.filenames = None;
        }
        let find = || state.filenames_of(&state.names());
        let found = self.filenames.get_or_insert_with(|| Filenames {
            backing_texts: opened().map(OpenedNode::backing_text).collect(),
            filenames: find(),
        });
        debug_assert_eq!(
            found.filenames,
            find(),
            "names of files are remembered wrongly"
        );
        found.filenames.clone()
    }
}

impl GraphState {
    fn names(&self) -> Vec<&str> {
        self.nodes.keys().map(String::as_str).collect()
    }

    /// Where nodes stand among each other; they are all there, and in the order of their names.
    pub(crate) fn positions(&self, names: &[&str]) -> Vec<Arc<Position>> {
        let numbers: HashMap<&str, usize> = names.iter().copied().zip(0..).collect();
        let nodes = names
            .iter()
            .filter_map(|name| Some((*name, self.nodes.get(*name)?)));
        nodes
            .map(|(name, node)| Arc::new(self.position(name, node, &numbers)))
            .collect()
    }

    /// What the files of nodes are called.
    pub(crate) fn filenames_of(&self, names: &[&str]) -> Arc<[Option<Arc<str>>]> {
        let found = self.names_of(names, Naming::AsTheyStand);
        let names = names.iter().map(|name| found.get(name));
        names.map(|name| Some(name?.text().into())).collect()
    }

    fn numbers_in_order_of_making(&self) -> Arc<[usize]> {
        let numbers: HashMap<&str, usize> = self.names().into_iter().zip(0..).collect();
        let order = self.in_order_of_making().into_iter();
        order
            .filter_map(|name| numbers.get(name).copied())
            .collect()
    }

    fn position(&self, name: &str, node: &Node, numbers: &HashMap<&str, usize>) -> Position {
        let users = self.uses.of(name).map(|one| &one.user);
        let jobs = users.clone().filter_map(|user| match user {
            User::Job { id, .. } => Some(id.clone()),
            User::Node(_) | User::Export(_) => None,
        });
        let mut jobs: Vec<String> = jobs.collect();
        jobs.sort_unstable();
        jobs.dedup();
        let number = |name: &str| numbers.get(name).copied();
        let child = |one: &Use| Some((one.wanted.role.clone(), number(&one.node)?));
        Position {
            name: name.to_owned(),
            driver: node.opened.driver.name,
            children: self.uses.by(name).filter_map(child).collect(),
            behind: node.is_filter.then(|| number(&node.owner)).flatten(),
            is_filter: node.is_filter_driver(),
            is_below: node.is_filter
                || self.is_only_target(name)
                || users.clone().any(|user| matches!(user, User::Node(_))),
            jobs,
        }
    }

    /// Whether jobs write to a node, and nobody uses it beside.
    fn is_only_target(&self, name: &str) -> bool {
        let mut uses = self.uses.of(name).peekable();
        let is_target = |one: &Use| one.user.is_job() && one.wanted.role == TARGET;
        uses.peek().is_some() && uses.all(is_target)
    }
}
