//! Users of a node are led to another device, or another node.
//!
//! Invariants:
//! - Users are led away from a device only when all that they have written to it is durable,
//!   and while none of their requests runs: what they flush later does not reach it. What
//!   cannot be made durable keeps its users.
//! - What stands in front of a node holds nothing itself: a flush of the node makes durable
//!   what was written through it.

use std::sync::Arc;

use tracing::trace;
use vellum::{BlockDevice, Result};
use vellum_storage::mutants::{self, Mutant};

use crate::change::drain::DrainedUsers;
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
        if !mutants::is(Mutant::LeaveUnflushed) {
            self.flush(&held.node).await?;
        }
        self.redirect_flushed(held, name).await
    }

    /// As [`Nodes::redirect_to`], where all that users have written is durable, and they are held up since.
    pub(crate) async fn redirect_flushed(&self, held: DrainedUsers, name: &str) -> Result<()> {
        {
            let mut named = self.lock();
            named.check_exchangeable(&held.node)?;
            named.check_led(&held.links, name)?;
            named.check_not_shared(&held.node, Some(name))?;
            named.stop_sharing(std::slice::from_ref(&held.node));
        }
        let device = self.device(name)?;
        let note = self.before_leading.note(self, Some((&held.node, name)));
        if let Some(note) = note {
            note.await?;
        }
        let ids = held.ids();
        let mut named = self.lock();
        if let Some(node) = named.nodes.get_mut(&held.node) {
            node.front = None;
        }
        trace!(name: "node_exchanged", node = held.node, by = name, users = ids.len());
        for id in ids {
            named.uses.lead(id, name);
        }
        named.note_led(&held.node, name);
        drop(named);
        held.set(&device);
        Ok(())
    }
}
