//! The filters of jobs, where they have names: they are listed among the nodes, and nobody
//! can use them.

use std::sync::Arc;

use vellum::{BlockDevice, Result};

use super::bitmaps::NodeBitmaps;
use super::{Node, Nodes, duplicate, invalid, is_well_formed};
use crate::graph::OpenedNode;

impl Nodes {
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
        driver: &'static str,
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
    pub(super) fn check_no_filter(&self, name: &str) -> Result<()> {
        let named = self.lock();
        match named.nodes.get(name) {
            Some(node) if node.is_filter => Err(invalid(format!(
                "Node '{name}' is busy: it is the filter of a job"
            ))),
            _ => Ok(()),
        }
    }

    /// No longer lists such a filter.
    pub fn forget_filter(&self, name: &str) {
        let mut named = self.lock();
        if named.nodes.get(name).is_some_and(|node| node.is_filter) {
            named.nodes.remove(name);
        }
    }

    /// Whether a node gives back the space of what is discarded (`discard=unmap`).
    pub fn gives_space_back(&self, name: &str) -> bool {
        let named = self.lock();
        let origin = named.nodes.get(name).and_then(|node| node.origin.as_ref());
        let discard = origin.and_then(|origin| origin.options.get_text("discard"));
        matches!(discard, Some("unmap" | "on"))
    }
}
