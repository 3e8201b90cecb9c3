//! Snapshots: an image is put over a node, and its users go on with that.

use vellum::Result;
use vellum_storage::mutants::{self, Mutant};

use crate::change::graph_change::GraphChange;
use crate::change::reopen_changes::ReopenChanges;
use crate::live::nodes::Nodes;
use crate::live::uses::User;
use crate::node::errors::{cycle, invalid, unavailable, unknown};

/// A snapshot that was made: an overlay stands on a node, and has its users.
#[derive(Debug)]
pub struct Snapshot {
    node: String,
    overlay: String,
    /// What became inactive with the overlay, as the node was.
    inactivated: Vec<String>,
}

impl Snapshot {
    /// The node that the overlay stands on.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// The node that users use now.
    pub fn overlay(&self) -> &str {
        &self.overlay
    }

    /// Takes it back, where no user has written anything since: users use the node again, and the overlay
    /// stands on nothing.
    ///
    /// # Errors
    /// If users cannot be led back: they go on with the overlay then.
    pub async fn undo(&self, nodes: &Nodes) -> Result<()> {
        nodes.lead_over(&self.overlay, &self.node).await?;
        self.detach(nodes).await
    }

    /// Has the overlay, which holds nothing and which nobody uses, stand on nothing, as before.
    async fn detach(&self, nodes: &Nodes) -> Result<()> {
        let link = nodes.relinking(&self.overlay, "backing", None);
        let change = GraphChange {
            relinked: link.into_iter().collect(),
            ..GraphChange::default()
        };
        let detached = change.apply(nodes).await;
        let active = nodes.set_activity(&self.inactivated, true).await;
        detached.and(active)
    }
}

impl Nodes {
    /// Puts `overlay`, an image that stands on nothing and that nobody uses, over `node`:
    /// whoever uses the node uses the overlay from then on, which stands on the node.
    ///
    /// # Errors
    /// In QEMU's words, if one of them is not there, the overlay is used, or cannot be one.
    pub async fn snapshot(&self, node: &str, overlay: &str) -> Result<Snapshot> {
        self.check_snapshot(node, overlay)?;
        // An overlay over an inactive node is inactive, as in QEMU.
        let inactivated = match self.is_inactive(node) {
            true => self.affected_by_activity(Some(overlay), false)?,
            false => Vec::new(),
        };
        // Opening takes its time, for which users are not held up.
        let mut attach = self.activity_change(&inactivated, false)?;
        attach.reopen(overlay, ReopenChanges::child("backing", Some(node)));
        attach.apply(self).await?;
        let snapshot = Snapshot {
            node: node.to_owned(),
            overlay: overlay.to_owned(),
            inactivated,
        };
        let attaches = self.is_used_by(overlay, User::is_job);
        let led = self.lead_over(node, overlay).await;
        if attaches {
            self.forget_led(node, overlay);
        }
        match led {
            Ok(()) => Ok(snapshot),
            Err(error) => {
                // The first failure is the one to tell.
                let _ = snapshot.detach(self).await;
                Err(error)
            }
        }
    }

    /// Has an image that stands on nothing stand on the node `below`, which shows what the image
    /// does not hold.
    ///
    /// # Errors
    /// What opening the image anew meets; it stands on nothing then.
    pub async fn put_over(&self, image: &str, below: &str) -> Result<()> {
        let change = GraphChange::child(image, "backing", Some(below));
        change.apply(self).await
    }

    /// Has the users of a node use another one: the overlay that stands on it, say.
    async fn lead_over(&self, from: &str, to: &str) -> Result<()> {
        // Users are held up only for what they write while this runs, and what cannot be made durable holds
        // nobody up.
        if !mutants::is(Mutant::LeaveUnflushed) {
            self.flush(from).await?;
        }
        let mut change = GraphChange::leading(from, to);
        for (above, role) in self.lock().direct_users(from) {
            change.reopen(&above, ReopenChanges::child(&role, Some(to)));
        }
        change.apply(self).await
    }

    fn check_snapshot(&self, node: &str, overlay: &str) -> Result<()> {
        let state = self.lock();
        for name in [node, overlay] {
            if !state.nodes.contains_key(name) {
                return Err(unknown(name));
            }
        }
        state.check_free(node)?;
        state.check_not_shared(node, None)?;
        let mut users = state.uses.of(overlay);
        if state.uses.by_as(overlay, "backing").is_some() {
            return Err(invalid("The overlay already has a backing image"));
        }
        // What a mirror writes to may get its backing file by this, where nobody is led to it.
        let attaches = state.uses.of(node).next().is_none();
        if users.any(|one| !(attaches && one.is_target_of_mirror())) || node == overlay {
            return Err(invalid("The overlay is already in use"));
        }
        if !state.nodes[overlay].opened.driver.has_backing {
            return Err(invalid("The overlay does not support backing images"));
        }
        if state.stands_on(overlay, node) {
            return Err(cycle(node, overlay, "backing"));
        }
        if state.is_inactive(overlay) && state.is_written(node, |_| true) {
            return Err(unavailable("write"));
        }
        // Better now than when the overlay stands on it.
        state.check_reopenable(&state.standing_directly(&[node.to_owned()]), Some(node))
    }
}
