//! [`GraphChange`]: what is to be different in the live graph, as one value.
//!
//! Commands and jobs say what is to be different: snapshots, the ends of mirrors, commits and streams, `blockdev-reopen`,
//! children of a quorum, resizes. [`GraphChange::apply`] does the same steps for all of them, in this order:
//! 1. Check that all nodes are there and that none will stand on itself, by whatever edge.
//! 2. Hold up users from the top down, and make durable what they have written, once.
//! 3. Name the new backing file in the image's header.
//! 4. Close the nodes that are opened anew, resize, open them.
//! 5. Have it noted (`live/leading.rs`), and lead users and links on.
//!
//! Invariant: a link is held up only once nothing that is still to be made durable goes through it.
//!
//! Invariant: if a step fails, those before it are undone before users go on: they find the graph, and the header, as
//! they were. The exception is in `reopen_nodes.rs`: an old file that cannot be opened again.

use std::collections::BTreeSet;

use vellum::Result;
use vellum::nodes::{Drained, nothing};
use vellum_storage::mutants::{self, Mutant};

use crate::change::backing_header::HeaderChange;
use crate::change::drain::DrainedUsers;
use crate::change::reopen_changes::{HeldNodes, ReopenChanges};
use crate::live::nodes::Nodes;
use crate::live::state::GraphState;
use crate::live::uses::{Use, User};
use crate::node::errors::{cycle, unknown};

/// What is to be different, and nothing else: nodes that have to follow are found when it is applied.
#[derive(Debug, Default)]
pub(crate) struct GraphChange {
    /// Nodes that are opened anew, and what of them is to be different.
    pub(crate) reopened: Vec<(String, ReopenChanges)>,
    /// What the nodes above stand on stays open, though it was opened with them.
    pub(crate) keeps_children: bool,
    /// A node, and the size that it gets, in bytes, while the nodes above it are closed.
    pub(crate) resized: Option<(String, u64)>,
    /// The image whose header names another backing file.
    pub(crate) header: Option<HeaderChange>,
    /// Links that nodes have to those below them, and where they lead.
    pub(crate) relinked: Vec<LinkChange>,
    /// Users of a node that use another one.
    pub(crate) led: Option<Led>,
    /// What users write is elsewhere afterwards, which has to be noted before they go on. (Where users are led
    /// that is always noted.)
    pub(crate) is_noted: bool,
}

/// A node's link to the one below it leads to another one, or to nothing.
#[derive(Debug)]
pub(crate) struct LinkChange {
    /// The number of the use.
    pub(crate) id: u64,
    /// Who stands on another node by it, and what that is to it.
    pub(crate) above: String,
    pub(crate) role: String,
    pub(crate) below: Option<String>,
}

/// The users of one node use another one from now on.
#[derive(Debug, Clone)]
pub(crate) struct Led {
    pub(crate) from: String,
    pub(crate) to: String,
}

/// Who is held up for a change.
#[derive(Debug, Default)]
struct Held {
    /// Users of the image whose header changes.
    _above: Vec<Drained>,
    reopened: HeldNodes,
    led: Option<DrainedUsers>,
}

/// A node will stand on another one, or on nothing, by a role.
struct Edge<'a> {
    above: &'a str,
    role: &'a str,
    below: Option<&'a str>,
}

impl GraphChange {
    /// Nodes are opened anew.
    pub(crate) fn reopening(reopened: Vec<(String, ReopenChanges)>) -> GraphChange {
        GraphChange {
            reopened,
            ..GraphChange::default()
        }
    }

    /// A node is opened anew with another one below it, or without one.
    pub(crate) fn child(above: &str, role: &str, below: Option<&str>) -> GraphChange {
        GraphChange::reopening(vec![(above.to_owned(), ReopenChanges::child(role, below))])
    }

    /// Users of a node use another one.
    pub(crate) fn leading(from: &str, to: &str) -> GraphChange {
        GraphChange {
            led: Some(Led {
                from: from.to_owned(),
                to: to.to_owned(),
            }),
            ..GraphChange::default()
        }
    }

    /// Also opens a node anew with something of it different.
    pub(crate) fn reopen(&mut self, name: &str, changes: ReopenChanges) {
        match self.reopened.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => known.add(changes),
            None => self.reopened.push((name.to_owned(), changes)),
        }
    }

    /// As it is, noted before users go on.
    pub(crate) fn noted(mut self) -> GraphChange {
        self.is_noted = true;
        self
    }

    /// Does it: all of it, or nothing.
    ///
    /// # Errors
    /// What checks refuse, and what making durable, opening, resizing or noting meets.
    pub(crate) async fn apply(self, nodes: &Nodes) -> Result<()> {
        self.carry_out(nodes, None).await
    }

    /// As [`GraphChange::apply`], where somebody holds up those who are led already.
    pub(crate) async fn apply_held(self, nodes: &Nodes, users: DrainedUsers) -> Result<()> {
        self.carry_out(nodes, Some(users)).await
    }

    async fn carry_out(self, nodes: &Nodes, led: Option<DrainedUsers>) -> Result<()> {
        self.check(&nodes.lock())?;
        let held = self.hold(nodes, led).await?;
        self.switch(nodes, held).await
    }

    /// Refuses nodes that are not there, and circles. Edges are looked at one by one, each with those before it in
    /// place, so that the one is told that closes the circle, as in QEMU.
    fn check(&self, state: &GraphState) -> Result<()> {
        let names = self.reopened.iter().map(|(name, _)| name);
        let led = self.led.iter().flat_map(|led| [&led.from, &led.to]);
        for name in names.chain(led) {
            if !state.nodes.contains_key(name) {
                return Err(unknown(name));
            }
        }
        let edges = self.edges(state);
        for (at, edge) in edges.iter().enumerate() {
            if let Some(below) = edge.below
                && will_stand_on(state, &edges[..at], below, edge.above)
            {
                return Err(cycle(below, edge.above, edge.role));
            }
        }
        Ok(())
    }

    /// What will stand on what, where that is another node than now.
    fn edges<'a>(&'a self, state: &'a GraphState) -> Vec<Edge<'a>> {
        let mut edges = Vec::new();
        for (above, change) in &self.reopened {
            for (role, below) in &change.children {
                let now = state.uses.by_as(above, role).map(|one| one.node.as_str());
                if below.as_deref() != now {
                    edges.push(Edge {
                        above,
                        role,
                        below: below.as_deref(),
                    });
                }
            }
        }
        edges.extend(self.relinked.iter().map(|link| Edge {
            above: &link.above,
            role: &link.role,
            below: link.below.as_deref(),
        }));
        if let Some(led) = &self.led {
            edges.extend(state.uses.of(&led.from).filter_map(|one| match &one.user {
                User::Node(above) if *above != led.to => Some(Edge {
                    above,
                    role: &one.wanted.role,
                    below: Some(&*led.to),
                }),
                _ => None,
            }));
        }
        edges
    }

    /// Holds up users from the top down, and makes durable what they have written. `led`: those who are led,
    /// where they are held up already.
    async fn hold(&self, nodes: &Nodes, led: Option<DrainedUsers>) -> Result<Held> {
        let mut held = Held::default();
        if let Some(header) = &self.header {
            // A read may have found that what it wants lies below, and not asked for it yet; so may
            // the rest of what is gathered. What is below afterwards does not have it any more.
            held._above = nodes.hold_linked(&header.image).await;
        }
        if !self.reopened.is_empty() {
            let names: Vec<String> = self.reopened.iter().map(|(name, _)| name.clone()).collect();
            held.reopened = nodes.hold_for_reopen(&names, self.keeps_children).await?;
        }
        let mut spared = held.reopened.as_users();
        if let Some(Led { from, to }) = &self.led {
            spared.push(User::Node(to.clone()));
            held.led = Some(match led {
                Some(users) => users,
                None => nodes.hold_but(from, &spared).await?,
            });
            if !mutants::is(Mutant::LeaveUnflushed) {
                nodes.flush(from).await?;
            }
        }
        Ok(held)
    }

    /// Exchanges what is held up.
    async fn switch(&self, nodes: &Nodes, held: Held) -> Result<()> {
        let old_name = match &self.header {
            Some(header) => header.write(nodes).await?,
            None => None,
        };
        let resize = async || self.resize(nodes, &held).await;
        let go_on = async || self.go_on(nodes, &held).await;
        let done = nodes
            .reopen_held(&held.reopened, &self.reopened, resize, go_on)
            .await;
        if done.is_err()
            && let Some(old_name) = old_name
        {
            // The first failure is the one to tell.
            let _ = old_name.write(nodes).await;
        }
        done
    }

    /// Resizes, while what stands above and is opened anew is closed. Nodes between these and the one that shrinks
    /// are held up only now: those above have made durable through them what they had.
    async fn resize(&self, nodes: &Nodes, held: &Held) -> Result<()> {
        let Some((name, size_bytes)) = &self.resized else {
            return Ok(());
        };
        let device = nodes.device(name)?;
        let _held = match *size_bytes < device.size_bytes() {
            true => Some(nodes.hold_but(name, &held.reopened.as_users()).await?),
            false => None,
        };
        device.truncate(*size_bytes).await
    }

    /// The last step, after which users use what they are to use: has it noted, and leads them there.
    async fn go_on(&self, nodes: &Nodes, held: &Held) -> Result<()> {
        let mut relinked = Vec::with_capacity(self.relinked.len());
        for link in &self.relinked {
            let target = match &link.below {
                Some(below) => nodes.device(below)?,
                None => nothing()?,
            };
            // Not before: changing the header writes what the image has gathered, for which it reads below.
            let _lifted = nodes.lift_limits(&link.above);
            if let Some(one) = nodes.link_of(link.id) {
                relinked.push((one.drain().await, target));
            }
        }
        match (&self.led, &held.led) {
            (Some(led), Some(users)) => nodes.lead_held(users, &led.to).await?,
            _ if self.is_noted => nodes.note_change(None).await?,
            _ => {}
        }
        let mut state = nodes.lock();
        for link in &self.relinked {
            match &link.below {
                Some(below) => state.uses.lead(link.id, below),
                None => state.uses.remove(link.id),
            }
        }
        drop(state);
        for (drained, target) in relinked {
            drained.set(target);
        }
        Ok(())
    }
}

/// Whether a node is, or will stand on, another one, by whatever is between.
fn will_stand_on(state: &GraphState, edges: &[Edge<'_>], name: &str, other: &str) -> bool {
    // Each node is looked at once: with several ways to a node the walk over all ways would not end.
    let mut known = BTreeSet::from([name]);
    let mut pending = vec![name];
    while let Some(name) = pending.pop() {
        if name == other {
            return true;
        }
        let new = || edges.iter().filter(|edge| edge.above == name);
        let stays = |one: &&Use| !new().any(|edge| edge.role == one.wanted.role);
        let old = state.uses.by(name).filter(stays);
        let old = old.map(|one| one.node.as_str());
        let below = new().filter_map(|edge| edge.below).chain(old);
        pending.extend(below.filter(|below| known.insert(*below)));
    }
    false
}

impl Nodes {
    /// The change of a node's link to the one that is `role` to it; none where it has no link there.
    pub(crate) fn relinking(
        &self,
        above: &str,
        role: &str,
        below: Option<&str>,
    ) -> Option<LinkChange> {
        let state = self.lock();
        let used = state.uses.by_as(above, role)?;
        used.link.as_ref()?;
        Some(LinkChange {
            id: used.id,
            above: above.to_owned(),
            role: role.to_owned(),
            below: below.map(str::to_owned),
        })
    }

    /// Has it noted, while users are held up, that they are led from one node to another one, or stand on others.
    async fn note_change(&self, led: Option<(&str, &str)>) -> Result<()> {
        match self.before_leading.note(self, led) {
            Some(note) => note.await,
            None => Ok(()),
        }
    }

    /// Has those whom `held` holds up, and all of whose writes are durable, use another node. What was put in front
    /// of the old one is gone.
    async fn lead_held(&self, held: &DrainedUsers, name: &str) -> Result<()> {
        {
            let mut state = self.lock();
            state.check_exchangeable(&held.node)?;
            state.check_led(&held.links, name)?;
            state.check_not_shared(&held.node, Some(name))?;
            state.stop_sharing(std::slice::from_ref(&held.node));
        }
        let device = self.device(name)?;
        self.note_change(Some((&held.node, name))).await?;
        let ids = held.ids();
        let mut state = self.lock();
        if let Some(node) = state.nodes.get_mut(&held.node) {
            node.front = None;
        }
        tracing::trace!(name: "node_exchanged", node = held.node, by = name, users = ids.len());
        for id in ids {
            state.uses.lead(id, name);
        }
        state.note_led(&held.node, name);
        drop(state);
        held.set(&device);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::live::RequiredAccess;

    use super::*;

    fn stands_on(state: &mut GraphState, above: &str, role: &str, below: &str) {
        let wanted = RequiredAccess::reading(role);
        let above = User::Node(above.to_owned());
        state.uses.add(Use::new(above, below, wanted, Some("root")));
    }

    /// Each node is reached by two ways from the one above it.
    #[test]
    fn each_of_many_ways_down_is_looked_at_once() {
        let mut state = GraphState::default();
        for step in 0..64 {
            for role in ["left", "right"] {
                stands_on(&mut state, &step.to_string(), role, &(step + 1).to_string());
            }
        }
        assert!(will_stand_on(&state, &[], "0", "64"));
        assert!(!will_stand_on(&state, &[], "0", "other"));
        assert!(!state.has_heir("64", "root"));
    }

    #[test]
    fn nodes_are_in_order_also_by_way_of_others() {
        let mut state = GraphState::default();
        stands_on(&mut state, "top", "backing", "over");
        stands_on(&mut state, "over", "backing", "base");
        let names = ["other", "base", "top"].map(str::to_owned);
        assert_eq!(state.top_down(names.to_vec()), ["other", "top", "base"]);
    }

    #[test]
    fn edges_that_go_are_no_way_down() {
        let mut state = GraphState::default();
        stands_on(&mut state, "top", "backing", "base");
        let edge = |below| Edge {
            above: "top",
            role: "backing",
            below,
        };
        assert!(will_stand_on(&state, &[], "top", "base"));
        assert!(!will_stand_on(&state, &[edge(None)], "top", "base"));
        assert!(will_stand_on(
            &state,
            &[edge(Some("other"))],
            "top",
            "other"
        ));
    }
}
