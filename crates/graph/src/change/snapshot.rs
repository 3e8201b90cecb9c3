//! Snapshots: an image is put over a node, and its users go on with that.

use vellum::Result;
use vellum_storage::mutants::{self, Mutant};

use crate::change::renewed::{Noting, ReopenChanges};
use crate::live::nodes::Nodes;
use crate::live::uses::User;
use crate::node::errors::{cycle, invalid, unavailable, unknown};

impl Nodes {
    /// Puts `overlay`, an image that stands on nothing and that nobody uses, over `node`:
    /// whoever uses the node uses the overlay from then on, which stands on the node.
    ///
    /// # Errors
    /// In QEMU's words, if one of them is not there, the overlay is used, or cannot be one.
    pub async fn snapshot(&self, node: &str, overlay: &str) -> Result<()> {
        self.check_snapshot(node, overlay)?;
        // An overlay over an inactive node is inactive, as in QEMU.
        let inactivated = match self.is_inactive(node) {
            true => self.affected_by_activity(Some(overlay), false)?,
            false => Vec::new(),
        };
        let renewal = ReopenChanges::child("backing", Some(node));
        self.renew_with_activity(overlay, renewal, &inactivated)
            .await?;
        let attaches = self.is_used_by(overlay, |user| matches!(user, User::Job { .. }));
        let led = self.lead_over(node, overlay).await;
        if attaches {
            self.forget_led(node, overlay);
        }
        if led.is_err() {
            // The overlay holds nothing and nobody uses it: it stands on nothing, as before.
            let _ = self.stand_on_another(overlay, None).await;
            let _ = self.set_activity(&inactivated, true).await;
        }
        led
    }

    /// Has an image that stands on nothing stand on the node `below`, which shows what the image
    /// does not hold.
    ///
    /// # Errors
    /// What opening the image anew meets; it stands on nothing then.
    pub async fn put_over(&self, image: &str, below: &str) -> Result<()> {
        self.renew(image, &ReopenChanges::child("backing", Some(below)))
            .await
    }

    /// Takes a snapshot back of which no user has written anything since: users use the node
    /// again, and the overlay stands on nothing.
    ///
    /// # Errors
    /// As [`Nodes::redirect_to`]; users go on with the overlay then.
    pub async fn undo_snapshot(&self, node: &str, overlay: &str) -> Result<()> {
        self.lead_over(overlay, node).await?;
        self.stand_on_another(overlay, None).await
    }

    /// Has the users of a node use another one: the overlay that stands on it, say.
    async fn lead_over(&self, node: &str, overlay: &str) -> Result<()> {
        // Opening the overlay took its time. Users are held up only for what they write while this runs, and
        // what cannot be made durable holds nobody up.
        if !mutants::is(Mutant::LeaveUnflushed) {
            self.flush(node).await?;
        }
        let above = self.lock().direct_users(node);
        let names: Vec<String> = above.iter().map(|(name, _)| name.clone()).collect();
        let held_above = self.begin_renewal(&names).await?;
        let mut spared: Vec<User> = held_above.nodes().map(User::Node).collect();
        spared.push(User::Node(overlay.to_owned()));
        let held = self.hold_but(node, &spared).await?;
        if !mutants::is(Mutant::LeaveUnflushed) {
            self.flush(node).await?;
        }
        if above.is_empty() {
            return self.redirect_flushed(held, overlay).await;
        }
        let on = |below: &str| {
            let change = |(name, role): &(String, String)| {
                (name.clone(), ReopenChanges::child(role, Some(below)))
            };
            above.iter().map(change).collect::<Vec<_>>()
        };
        self.renew_held(&held_above, Noting::Elsewhere, on(overlay))
            .await?;
        let led = self.redirect_flushed(held, overlay).await;
        if led.is_err() {
            self.renew_held(&held_above, Noting::Elsewhere, on(node))
                .await?;
        }
        led
    }

    fn check_snapshot(&self, node: &str, overlay: &str) -> Result<()> {
        let named = self.lock();
        for name in [node, overlay] {
            if !named.nodes.contains_key(name) {
                return Err(unknown(name));
            }
        }
        named.check_free(node)?;
        named.check_not_shared(node, None)?;
        let mut users = named.uses.of(overlay);
        if named.uses.by_as(overlay, "backing").is_some() {
            return Err(invalid("The overlay already has a backing image"));
        }
        // What a mirror writes to may get its backing file by this, where nobody is led to it.
        let attaches = named.uses.of(node).next().is_none();
        if users.any(|one| !(attaches && one.is_target_of_mirror())) || node == overlay {
            return Err(invalid("The overlay is already in use"));
        }
        if !named.nodes[overlay].opened.driver.has_backing {
            return Err(invalid("The overlay does not support backing images"));
        }
        if named.stands_on(overlay, node) {
            return Err(cycle(node, overlay, "backing"));
        }
        if named.is_inactive(overlay) && named.is_written(node, |_| true) {
            return Err(unavailable("write"));
        }
        // Better now than when the overlay stands on it.
        named.check_renewable(&named.standing_directly(&[node.to_owned()]), Some(node))
    }
}
