//! Changes of a graph of live nodes, while requests run through it.
//!
//! Invariants:
//! - A change holds only links that lead to one node, so its drain ends.
//! - A change that fails leaves the graph as it was. Where not even the old state can be
//!   had again (a file that is gone), users of the node get errors, and no other bytes.
//! - Users are led away from a device only when all that they have written to it is durable,
//!   and while none of their requests runs: what they flush later does not reach it. What
//!   cannot be made durable keeps its users.
//! - What stands in front of a node holds nothing itself: a flush of the node makes durable
//!   what was written through it.

use std::sync::Arc;

use tracing::trace;

use vellum::nodes::{Drained, Link};
use vellum::{BlockDevice, Result};
use vellum_storage::mutants::{self, Mutant};
use vellum_storage::nodes::throttle::Lifted;

use super::renew::{Noting, ReopenChanges};
use super::{Nodes, Use, User, access, activity, invalid, unknown, unknown_node};
use crate::foreign;
use crate::throttle_groups;

/// The users of a node, held up until this is dropped.
#[derive(Debug)]
pub struct DrainedUsers {
    pub(super) node: String,
    /// Number of the use, and its link.
    pub(super) links: Vec<(u64, Arc<Link>)>,
    drained: Vec<Drained>,
    /// Those of the nodes that stand on it without a link.
    _above: Vec<Drained>,
}

impl DrainedUsers {
    pub(super) fn set(&self, device: &Arc<dyn BlockDevice>) {
        for drained in &self.drained {
            drained.set(device.clone());
        }
    }

    fn ids(&self) -> Vec<u64> {
        self.links.iter().map(|(id, _)| *id).collect()
    }
}

impl Nodes {
    /// Refuses what cannot be done with a node because of who uses it.
    ///
    /// # Errors
    /// In QEMU's words, if there is no such node, or something is in the way.
    pub fn check_free(&self, name: &str) -> Result<()> {
        let named = self.lock();
        if !named.nodes.contains_key(name) {
            return Err(unknown_node(name));
        }
        named.check_free(name)
    }

    /// Refuses a node that a job works on.
    ///
    /// # Errors
    /// In QEMU's words, if one does.
    pub fn check_no_job(&self, name: &str) -> Result<()> {
        self.lock().check_no_job(name)
    }

    /// Refuses a node if a job works on it, or on one that would be closed with it.
    ///
    /// # Errors
    /// As [`Nodes::check_no_job`].
    pub fn check_no_job_within(&self, name: &str) -> Result<()> {
        let named = self.lock();
        let mut owned = named.owned(name).filter(|node| !named.has_heir(node, name));
        owned.try_for_each(|node| named.check_no_job(node))
    }

    /// Refuses to open a node anew that a job works on.
    ///
    /// # Errors
    /// As [`Nodes::check_no_job`].
    pub fn check_not_watched(&self, name: &str) -> Result<()> {
        self.lock().check_not_watched(name)
    }

    /// Closes a node that was added, with all that it owns.
    ///
    /// # Errors
    /// In QEMU's words, if it was not, or is used; and if it does not close well: then it
    /// is gone too.
    pub async fn remove(&self, name: &str) -> Result<()> {
        self.check_removal(name)?;
        self.close_root(name).await
    }

    /// Closes a node of which [`Nodes::check_removal`] says that it may go; it is gone in any case.
    ///
    /// # Errors
    /// If something does not close well.
    pub async fn close_root(&self, name: &str) -> Result<()> {
        self.lock().nodes.take_roots(|root| root == name);
        self.close_owned(name).await
    }

    /// Refuses what was not added, or somebody needs.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn check_removal(&self, name: &str) -> Result<()> {
        let named = self.lock();
        let Some(node) = named.nodes.get(name) else {
            return Err(invalid(format!(
                "Failed to find node with node-name='{name}'"
            )));
        };
        let mut users = named.uses.of(name);
        // QEMU's mirror has a device of its own for its target, as exports have.
        if users.any(|one| matches!(one.user, User::Export(_)) || one.is_target_of_mirror()) {
            return Err(invalid(format!("Node {name} is in use")));
        }
        named.check_free(name)?;
        if node.owner != name {
            return Err(invalid(format!("Node {name} is not owned by the monitor")));
        }
        let is_own = |one: &Use| matches!(one.user, User::Node(_)) && !named.is_foreign(one, name);
        let is_kept =
            |node: &str| named.uses.of(node).any(|one| !is_own(one)) && !named.has_heir(node, name);
        let is_used = named.owned(name).any(is_kept);
        match is_used {
            true => Err(invalid(format!("Block device {name} is in use"))),
            false => Ok(()),
        }
    }

    /// The node below another one: its backing file.
    pub fn backing_of(&self, name: &str) -> Option<String> {
        self.child_of(name, "backing")
    }

    /// The node that is `role` to another one: `file`, `backing`.
    pub fn child_of(&self, name: &str, role: &str) -> Option<String> {
        let named = self.lock();
        let found = named.uses.by_as(name, role)?;
        Some(found.node.clone())
    }

    /// A node and all that it stands on, from the top down.
    pub fn chain(&self, name: &str) -> Vec<String> {
        let mut chain = vec![name.to_owned()];
        while let Some(below) = chain.last().and_then(|last| self.backing_of(last)) {
            chain.push(below);
        }
        chain
    }

    /// The nodes that stand on `name` by their backing file.
    pub fn overlays_of(&self, name: &str) -> Vec<String> {
        let named = self.lock();
        let overlay = |one: &Use| match &one.user {
            User::Node(user) if one.wanted.role == "backing" => Some(user.clone()),
            _ => None,
        };
        named.uses.of(name).filter_map(overlay).collect()
    }

    /// Whether a node has a user of a kind.
    pub fn is_used_by(&self, name: &str, kind: impl Fn(&User) -> bool) -> bool {
        let named = self.lock();
        named.uses.of(name).any(|one| kind(&one.user))
    }

    /// Gives a node another size. Where it shrinks, users are held up: what they have begun beyond the new
    /// end lands before, and is cut off. Nodes above that are as long as it is are opened anew, with their users
    /// held up.
    ///
    /// # Errors
    /// If it cannot have that size, or a node above cannot be opened anew.
    pub async fn resize(&self, name: &str, size_bytes: u64) -> Result<()> {
        let following = self.lock().following_size(name);
        if following.is_empty() {
            return self.resize_one(name, size_bytes, &[]).await;
        }
        let above = self.begin_renewal_above(&following).await?;
        let spared: Vec<User> = above.nodes().map(User::Node).collect();
        // They are closed before: what one has made ahead of writes it cuts off then.
        let unchanged = (Noting::Elsewhere, Vec::new());
        self.renew_around(&above, unchanged, async || {
            self.resize_one(name, size_bytes, &spared).await
        })
        .await
    }

    /// Gives a node another size. Users but some are held up where it shrinks.
    async fn resize_one(&self, name: &str, size_bytes: u64, spared: &[User]) -> Result<()> {
        let held = match size_bytes < self.device(name)?.size_bytes() {
            true => Some(self.hold_but(name, spared).await?),
            false => None,
        };
        let resized = self.device(name)?.truncate(size_bytes).await;
        drop(held);
        resized
    }

    /// Holds up all users of a node but some, those of the nodes above it first.
    pub(super) async fn hold_but(&self, name: &str, spared: &[User]) -> Result<DrainedUsers> {
        let (above, links) = {
            let named = self.lock();
            let mut above = named.standing_directly(&[name.to_owned()]);
            // What is being opened has no users yet.
            above.retain(|upper| upper == name || named.nodes.contains_key(upper));
            (above, named.links(name, spared)?)
        };
        let mut held_above = Vec::new();
        for upper in above.iter().filter(|upper| *upper != name) {
            let _lifted = self.lift_limits(upper);
            let links = self.lock().links(upper, spared)?;
            for (_, link) in links {
                held_above.push(link.drain().await);
            }
        }
        let _lifted = self.lift_limits(name);
        let mut drained = Vec::with_capacity(links.len());
        trace!(name: "node_drain_start", node = name, users = links.len());
        for (_, link) in &links {
            drained.push(link.drain().await);
        }
        trace!(name: "node_drain_done", node = name);
        Ok(DrainedUsers {
            node: name.to_owned(),
            links,
            drained,
            _above: held_above,
        })
    }

    /// Lets requests to a node, and to those below it, pass whatever limits they keep, for one
    /// who waits for them to end.
    pub fn lift_limits(&self, name: &str) -> Vec<Lifted> {
        if !throttle_groups::are_used() {
            return Vec::new();
        }
        let named = self.lock();
        let names = named.with_below(name).into_iter();
        let names: Vec<String> = names.map(str::to_owned).collect();
        drop(named);
        throttle_groups::lift(Some(&names))
    }

    /// Holds up all users of a node but jobs: requests that run have ended, new ones wait.
    ///
    /// # Errors
    /// If there is no such node, or one that stands on it does not let it be exchanged.
    pub async fn drain(&self, name: &str) -> Result<DrainedUsers> {
        let jobs = self.lock().jobs();
        self.hold_but(name, &jobs).await
    }

    /// As [`Nodes::drain`], for one of several nodes that are held at one moment: those of `others` that
    /// stand on it may go on asking. Once their own users are held nothing comes by way of them but
    /// what they are asked to make durable.
    ///
    /// # Errors
    /// As [`Nodes::drain`].
    pub async fn drain_among(&self, name: &str, others: &[String]) -> Result<DrainedUsers> {
        let mut spared = self.lock().jobs();
        spared.extend(others.iter().cloned().map(User::Node));
        self.hold_but(name, &spared).await
    }

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

    /// Makes durable what has been written to a node.
    ///
    /// # Errors
    /// If there is no such node, or it cannot be.
    pub async fn flush(&self, name: &str) -> Result<()> {
        let device = self.device(name)?;
        match device.info().read_only {
            true => Ok(()),
            false => device.flush().await,
        }
    }

    /// Has those whom `held` holds up use another node from now on, once all that they have
    /// written to the old one is durable. What was put in front of the old one is gone.
    ///
    /// # Errors
    /// If there is none, or the old one cannot be made durable: then they stay with it.
    pub async fn redirect_to(&self, held: DrainedUsers, name: &str) -> Result<()> {
        {
            let mut named = self.lock();
            named.check_exchangeable(&held.node)?;
            named.check_led(&held.links, name)?;
            named.check_not_shared(&held.node, Some(name))?;
            named.stop_sharing(std::slice::from_ref(&held.node));
        }
        let device = self.device(name)?;
        if !mutants::is(Mutant::LeaveUnflushed) {
            self.flush(&held.node).await?;
        }
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

    /// Puts `overlay`, an image that stands on nothing and that nobody uses, over `node`:
    /// whoever uses the node uses the overlay from then on, which stands on the node.
    ///
    /// # Errors
    /// In QEMU's words, if one of them is not there, the overlay is used, or cannot be one.
    pub async fn snapshot(&self, node: &str, overlay: &str) -> Result<()> {
        self.check_snapshot(node, overlay)?;
        // What cannot be made durable is left alone before anything is changed.
        if !mutants::is(Mutant::LeaveUnflushed) {
            self.flush(node).await?;
        }
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
        // Opening the overlay took its time: so users are held up only for what they write
        // while this runs.
        if !mutants::is(Mutant::LeaveUnflushed) {
            self.flush(node).await?;
        }
        let above = self.lock().direct_users(node);
        let names: Vec<String> = above.iter().map(|(name, _)| name.clone()).collect();
        let held_above = self.begin_renewal(&names).await?;
        let mut spared: Vec<User> = held_above.nodes().map(User::Node).collect();
        spared.push(User::Node(overlay.to_owned()));
        let held = self.hold_but(node, &spared).await?;
        if above.is_empty() {
            return self.redirect_to(held, overlay).await;
        }
        if !mutants::is(Mutant::LeaveUnflushed) {
            self.flush(node).await?;
        }
        let on = |below: &str| {
            let change = |(name, role): &(String, String)| {
                (name.clone(), ReopenChanges::child(role, Some(below)))
            };
            above.iter().map(change).collect::<Vec<_>>()
        };
        self.renew_held(&held_above, Noting::Elsewhere, on(overlay))
            .await?;
        let led = self.redirect_to(held, overlay).await;
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
        let driver = named.nodes[overlay].opened.driver;
        if driver != "qcow2" && !foreign::has_backing(driver) {
            return Err(invalid("The overlay does not support backing images"));
        }
        if named.stands_on(overlay, node) {
            return Err(access::cycle(node, overlay, "backing"));
        }
        if named.is_inactive(overlay) && named.is_written(node, |_| true) {
            return Err(activity::unavailable("write"));
        }
        // Better now than when the overlay stands on it.
        named.check_renewable(&named.standing_directly(&[node.to_owned()]), Some(node))
    }

    /// Makes a node that is open read-only writable, or the other way round.
    ///
    /// # Errors
    /// What opening it anew meets; it is as it was then.
    pub async fn set_writable(&self, name: &str, writable: bool) -> Result<()> {
        let is_writable = match self.lock().nodes.get(name) {
            Some(node) => node.opened.writable,
            None => return Err(unknown_node(name)),
        };
        if is_writable == writable {
            return Ok(());
        }
        if writable && self.is_inactive(name) {
            return Err(activity::unavailable("write"));
        }
        let renewal = ReopenChanges {
            writable: Some(writable),
            ..ReopenChanges::default()
        };
        self.renew(name, &renewal).await
    }

    /// Opens a node read-only that nobody writes to any more, so that others may read its file. It
    /// stays writable where that cannot be.
    pub async fn stop_writing(&self, name: &str) {
        // It would make durable what was left, a moment too late.
        if mutants::is(Mutant::LeaveUnflushed) {
            return;
        }
        let is_written = self.lock().is_written(name, |_| true);
        if !is_written {
            let _ = self.set_writable(name, false).await;
        }
    }

    /// Closes nodes that were made with others, by whatever name, and that nobody uses any more, as their last
    /// user would have done; then those below them of which that is true. Those that were asked for by
    /// themselves stay, as in QEMU. Failures are no one's any more: what the nodes hold was copied.
    pub async fn drop_unused(&self, names: &[String]) {
        let mut pending = names.to_vec();
        let mut at = 0;
        while let Some(name) = pending.get(at) {
            let taken = self.lock().take_unused(name);
            if let Some((kind, below)) = taken {
                let _ = kind.close().await;
                pending.extend(below);
            }
            at += 1;
        }
    }
}
