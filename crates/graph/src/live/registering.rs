//! A node gets its name once it is open.

use std::sync::Arc;

use vellum::{BlockDevice, Result};

use crate::live::node::Node;
use crate::live::node_bitmaps::NodeBitmaps;
use crate::live::nodes::Nodes;
use crate::node::driver::DriverFacts;
use crate::node::errors::{duplicate, invalid, is_well_formed};
use crate::node::file_node::UnlockedFile;
use crate::node::opened::{NodeKind, OpenedNode};
use crate::node::origin::Origin;
use crate::node::place::NodePlace;

impl Nodes {
    /// Gives the node that was opened at a place a name. What is returned is for whoever stands on it.
    pub(crate) fn name(
        &self,
        place: &NodePlace,
        name: &str,
        node: OpenedNode,
        origin: Option<Origin>,
    ) -> Result<OpenedNode> {
        let owner = place.owner().unwrap_or(name);
        self.check_form(name)?;
        let mut state = self.lock();
        let root = place.opening_root();
        if state.nodes.is_there(name) || state.openings.keep(name, root) {
            return Err(duplicate(name));
        }
        let bitmaps = NodeBitmaps::of(&node);
        let opened = match self.live {
            true => node.recorded(&bitmaps.recorder),
            false => node,
        };
        let node = Node {
            opened: opened.clone(),
            owner: owner.to_owned(),
            device: None,
            front: None,
            origin: origin.map(Arc::new),
            bitmaps,
            moment: None,
            backing_text: opened.backing_text(),
            is_filter: false,
            is_of_job: false,
            is_lost: false,
            next_child: None,
        };
        match root {
            Some(_) => state.nodes.insert_hidden(name.to_owned(), node),
            None => state.nodes.insert(name.to_owned(), node),
        }
        Ok(opened)
    }

    /// Has a node that nobody uses any more be as if nobody had: its files are not locked, and the next
    /// user asks for its size again.
    pub fn release_unused(&self, name: &str) {
        let mut state = self.lock();
        let is_used = state.uses.of(name).next().is_some();
        if let Some(node) = state.nodes.get_mut(name)
            && !is_used
            && matches!(node.opened.kind, NodeKind::Storage(_))
        {
            node.device = None;
            node.opened.files.iter().for_each(UnlockedFile::unlock);
        }
    }

    /// Refuses a name that no new node can have.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn check_new_name(&self, name: &str) -> Result<()> {
        if !is_well_formed(name) {
            return Err(invalid(format!("Invalid node-name: '{name}'")));
        }
        match self.lock().is_taken(name, None) {
            true => Err(duplicate(name)),
            false => Ok(()),
        }
    }

    /// Lists what a job has put in front of a node as one of its own.
    ///
    /// # Errors
    /// As [`Nodes::check_new_name`].
    pub fn show_filter(
        &self,
        name: &str,
        driver: DriverFacts,
        of: &str,
        device: Arc<dyn BlockDevice>,
    ) -> Result<()> {
        self.check_new_name(name)?;
        let node = Node {
            opened: OpenedNode::device(driver, device),
            owner: of.to_owned(),
            device: None,
            front: None,
            origin: None,
            bitmaps: NodeBitmaps::default(),
            moment: None,
            backing_text: None,
            is_filter: true,
            is_of_job: false,
            is_lost: false,
            next_child: None,
        };
        self.lock().nodes.insert(name.to_owned(), node);
        Ok(())
    }

    /// Refuses to use such a filter: what is written there would be missed when users are led
    /// on.
    pub(crate) fn check_no_filter(&self, name: &str) -> Result<()> {
        let state = self.lock();
        match state.nodes.get(name) {
            Some(node) if node.is_filter => Err(invalid(format!(
                "Node '{name}' is busy: it is the filter of a job"
            ))),
            _ => Ok(()),
        }
    }

    /// No longer lists such a filter.
    pub fn forget_filter(&self, name: &str) {
        let mut state = self.lock();
        if state.nodes.get(name).is_some_and(|node| node.is_filter) {
            state.nodes.remove(name);
        }
    }

    /// Whether a node gives back the space of what is discarded (`discard=unmap`).
    pub fn gives_space_back(&self, name: &str) -> bool {
        let state = self.lock();
        let origin = state.nodes.get(name).and_then(|node| node.origin.as_ref());
        let discard = origin.and_then(|origin| origin.options.get_text("discard"));
        matches!(discard, Some("unmap" | "on"))
    }
}
