//! Children that come and go: those of a quorum (`x-blockdev-change`).
//!
//! A quorum is opened anew with one child more or fewer, while its users are held up. Its children
//! are called `children.0`, `children.1` and so on; numbers of those that have gone are free again
//! only from the end, as in QEMU, so a quorum that is open may have gaps that no new one has.
//!
//! Invariant: what fails leaves the quorum with the children that it had.

use std::collections::BTreeMap;

use vellum::Result;

use crate::change::graph_change::GraphChange;
use crate::live::nodes::Nodes;
use crate::live::state::GraphState;
use crate::live::uses::Use;
use crate::merged_options::text;
use crate::node::errors::invalid;
use crate::node::quorum_children::{PREFIX, child_number};

/// The driver whose nodes have such children.
const DRIVER: &str = "quorum";

impl GraphState {
    /// The children of a node that come and go: their numbers, and the nodes.
    fn numbered(&self, parent: &str) -> BTreeMap<u64, String> {
        let child = |one: &Use| Some((child_number(&one.wanted.role)?, one.node.clone()));
        self.uses.by(parent).filter_map(child).collect()
    }

    fn is_quorum(&self, name: &str) -> bool {
        let node = self.nodes.get(name);
        node.is_some_and(|node| node.opened.driver.name == DRIVER)
    }

    /// The number that the next child gets.
    fn next_child(&self, parent: &str) -> u64 {
        let noted = self.nodes.get(parent).and_then(|node| node.next_child);
        let last = self.numbered(parent).into_keys().next_back();
        noted.unwrap_or_else(|| last.map_or(0, |last| last + 1))
    }

    /// Refuses a new child, or says what it will be to the quorum.
    fn check_new_child(&self, parent: &str, child: &str) -> Result<u64> {
        let refuse = |text: String| Err(invalid(text));
        if !self.is_quorum(parent) {
            return refuse(format!("The node {parent} does not support adding a child"));
        }
        if self.uses.of(child).next().is_some() {
            return refuse(format!("The node {child} already has a parent"));
        }
        if self
            .origin_option(parent, "blkverify")
            .is_some_and(|value| matches!(&*value, "on" | "true"))
        {
            return refuse("Cannot add a child to a quorum in blkverify mode".to_owned());
        }
        Ok(self.next_child(parent))
    }

    fn origin_option(&self, name: &str, key: &str) -> Option<String> {
        let origin = self.nodes.get(name)?.origin.as_ref()?;
        let mut options = origin.options.iter();
        let (_, value) = options.find(|(known, _)| *known == key)?;
        Some(text(value))
    }

    /// Refuses to take a child away, or says which node that is.
    fn check_old_child(&self, parent: &str, role: &str) -> Result<String> {
        let found = self.uses.by_as(parent, role).map(|one| one.node.clone());
        let found = found
            .ok_or_else(|| invalid(format!("Node '{parent}' does not have child '{role}'")))?;
        if !self.is_quorum(parent) || child_number(role).is_none() {
            let text = format!("The node {parent} does not support removing a child");
            return Err(invalid(text));
        }
        let threshold = self.origin_option(parent, "vote-threshold");
        let threshold = threshold.and_then(|text| text.parse::<usize>().ok());
        let threshold = threshold.unwrap_or(1);
        if self.numbered(parent).len() <= threshold {
            return Err(invalid(format!(
                "The number of children cannot be lower than the vote threshold {threshold}"
            )));
        }
        Ok(found)
    }

    fn note_next_child(&mut self, parent: &str, number: u64) {
        if let Some(node) = self.nodes.get_mut(parent) {
            node.next_child = Some(number);
        }
    }
}

impl Nodes {
    /// Gives a quorum one child more: the node `child`, which nobody uses yet.
    ///
    /// # Errors
    /// In QEMU's words where it is no quorum, or the other node cannot be a child of it; if their
    /// sizes differ; what opening the quorum anew meets. It is as it was then.
    pub async fn add_child(&self, parent: &str, child: &str) -> Result<()> {
        let number = self.lock().check_new_child(parent, child)?;
        let (have, has) = (
            self.device(parent)?.size_bytes(),
            self.device(child)?.size_bytes(),
        );
        if have != has {
            return Err(invalid(format!(
                "Node '{child}' has {has} bytes, and the children of '{parent}' have {have}: give it \
                 one of the same size"
            )));
        }
        let role = format!("{PREFIX}{number}");
        self.exchange_child(parent, &role, Some(child)).await?;
        self.lock().note_next_child(parent, number + 1);
        Ok(())
    }

    /// Takes a child of a quorum away. What was made with the quorum is closed.
    ///
    /// # Errors
    /// As [`Nodes::add_child`]; also if fewer would be left than must agree.
    pub async fn remove_child(&self, parent: &str, role: &str) -> Result<()> {
        let (child, next) = {
            let state = self.lock();
            let child = state.check_old_child(parent, role)?;
            (child, state.next_child(parent))
        };
        self.exchange_child(parent, role, None).await?;
        let is_last = child_number(role).is_some_and(|number| number + 1 == next);
        self.lock()
            .note_next_child(parent, next - u64::from(is_last));
        self.close_orphan(&child, parent).await
    }

    /// Opens a quorum anew with one child more or fewer. That is noted before its users go on: one that is
    /// gone lacks what they write then.
    async fn exchange_child(&self, parent: &str, role: &str, child: Option<&str>) -> Result<()> {
        let change = GraphChange::child(parent, role, child);
        change.noted().apply(self).await
    }

    /// Closes a node that was made with another one, which does not stand on it any more.
    async fn close_orphan(&self, name: &str, parent: &str) -> Result<()> {
        {
            let mut state = self.lock();
            if !state.is_part_of(name, parent) || state.uses.of(name).next().is_some() {
                return Ok(());
            }
            let below = state.with_below(name);
            let own = below.into_iter();
            let own = own.filter(|one| state.is_part_of(one, parent));
            let own: Vec<String> = own.map(str::to_owned).collect();
            for one in own {
                state.uses.own_by(&one, name);
                state.nodes.set_owner(&one, name);
            }
        }
        self.close_owned(name).await
    }
}
