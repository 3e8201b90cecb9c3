//! What jobs put in front of nodes, and how their users leave it.
//!
//! Invariant: what stands in front of a node holds nothing itself: a flush of the node makes durable
//! what was written through it.

use std::sync::Arc;

use tracing::trace;
use vellum::{BlockDevice, Result};

use crate::change::drain::DrainedUsers;
use crate::change::graph_change::GraphChange;
use crate::live::nodes::Nodes;

impl Nodes {
    /// Has the users of a node, now and later, see another device in its place, such as one
    /// that watches it; or, without one, the node itself again. Jobs see the node.
    ///
    /// # Errors
    /// As [`Nodes::drain`].
    pub async fn insert_filter(
        &self,
        name: &str,
        front: Option<Arc<dyn BlockDevice>>,
    ) -> Result<()> {
        self.lock().check_exchangeable(name)?;
        trace!(name: "node_filtered", node = name, filtered = front.is_some());
        let held = self.drain(name).await?;
        let device = self.device(name)?;
        held.set(front.as_ref().unwrap_or(&device));
        if let Some(node) = self.lock().nodes.get_mut(name) {
            node.front = front;
        }
        Ok(())
    }

    /// Has a node stay the device that it is, for a job that works with that and needs no filter;
    /// or ends that.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn pin(&self, name: &str, is_pinned: bool) -> Result<()> {
        let device = self.device(name)?;
        if let Some(node) = self.lock().nodes.get_mut(name) {
            node.front = is_pinned.then_some(device);
        }
        Ok(())
    }

    /// Has those whom `held` holds up use another node from now on, once all that they have
    /// written to the old one is durable. What was put in front of the old one is gone.
    ///
    /// # Errors
    /// If there is none, or the old one cannot be made durable: then they stay with it.
    pub async fn redirect_to(&self, held: DrainedUsers, name: &str) -> Result<()> {
        let change = GraphChange::leading(&held.node, name);
        change.apply_held(self, held).await
    }
}
