//! Which node belongs to which: the one that was asked for owns those that were made with it, and
//! they are closed with it.
//!
//! Invariants:
//! - A node is closed after those that stand on it.
//! - A node that images of others stand on goes to one of these when its owner is closed.

use std::collections::BTreeSet;

use tracing::trace;
use vellum::{Error, Result};

use crate::live::node::Node;
use crate::live::nodes::Nodes;
use crate::live::state::GraphState;
use crate::live::uses::{Use, User};
use crate::node::errors::{MADE_UP, invalid};
use crate::node::opened::NodeKind;

impl Nodes {
    /// Closes all nodes, each before those that it stands on.
    ///
    /// # Errors
    /// If a node was not closed cleanly; says which. All nodes are closed all the same.
    pub async fn close(self) -> Result<()> {
        let roots = self.lock().nodes.take_roots(|_| true);
        let closed = self.close_roots(roots).await;
        self.close_abandoned().await;
        closed
    }

    /// Closes some of the nodes that were asked for, and those made with them.
    ///
    /// # Errors
    /// As [`Nodes::close`].
    pub async fn close_some(&self, names: &[String]) -> Result<()> {
        let is_wanted = |root: &str| names.iter().any(|name| name == root);
        let roots = self.lock().nodes.take_roots(is_wanted);
        self.close_roots(roots).await
    }

    async fn close_roots(&self, mut roots: Vec<String>) -> Result<()> {
        let mut failures = Vec::new();
        while !roots.is_empty() {
            let next = self.lock().next_to_close(&roots);
            let name = roots.remove(next);
            if let Err(error) = self.close_owned(&name).await {
                failures.push((name, error));
            }
        }
        not_closed(&failures)
    }

    /// The nodes that were asked for and that are of a driver and called as `is_called` says, or
    /// stand on such, by whatever is between.
    pub fn roots_over(&self, driver: &str, is_called: impl Fn(&str) -> bool) -> Vec<String> {
        let state = self.lock();
        let is_wanted = |(name, node): (&String, &Node)| {
            let found =
                node.opened.driver.name == driver && is_called(&node.opened.kind.shown_name());
            found.then(|| name.clone())
        };
        let mut over: Vec<String> = state.nodes.iter().filter_map(is_wanted).collect();
        let mut at = 0;
        while let Some(below) = over.get(at).cloned() {
            for one in state.uses.of(&below) {
                if let User::Node(above) = &one.user
                    && !over.contains(above)
                {
                    over.push(above.clone());
                }
            }
            at += 1;
        }
        let owner = |name: &String| Some(state.nodes.get(name)?.owner.clone());
        let owners: BTreeSet<String> = over.iter().filter_map(owner).collect();
        let roots = state.nodes.roots().iter();
        roots
            .filter(|root| owners.contains(*root))
            .cloned()
            .collect()
    }

    /// The exports of nodes that some others own.
    pub fn exports_of(&self, roots: &[String]) -> Vec<String> {
        let state = self.lock();
        let is_owned = |node: &str| {
            let node = state.nodes.get(node);
            node.is_some_and(|node| roots.contains(&node.owner))
        };
        let export = |one: &Use| match &one.user {
            User::Export(id) if is_owned(&one.node) => Some(id.clone()),
            _ => None,
        };
        state.uses.iter().filter_map(export).collect()
    }

    /// Closes a node and all that it owns, and forgets them.
    pub(crate) async fn close_owned(&self, owner: &str) -> Result<()> {
        let owned = self.lock().take_closed(owner, self.live);
        let mut result = Ok(());
        for kind in owned {
            result = result.and(kind.close().await);
        }
        result
    }
}

/// So many failures are told one by one.
const TOLD_FAILURES: usize = 8;

/// Says which nodes are concerned, whatever below them has failed.
fn not_closed(failures: &[(String, Error)]) -> Result<()> {
    let Some((_, first)) = failures.first() else {
        return Ok(());
    };
    let told = failures.iter().take(TOLD_FAILURES);
    let told = told.map(|(name, error)| format!("Node '{name}' was not closed cleanly: {error}"));
    let mut message = told.collect::<Vec<_>>().join("; ");
    let others = failures.len().saturating_sub(TOLD_FAILURES);
    if others > 0 {
        message += &format!("; nor were {others} more");
    }
    Err(Error::new(first.kind(), "close", message).with_errno(first.errno()))
}

impl GraphState {
    /// Forgets a node that is gone: whom users would be led from there too, unless a file of disks names it
    /// and may bring it back.
    fn forget_leads_of(&mut self, gone: &str) {
        if !self.configured.contains(gone) {
            self.leads.take(gone);
        }
        let (leads, nodes) = (&mut self.leads, &self.nodes);
        leads.forget(gone, &|name| nodes.contains_key(name));
    }

    /// Which of some roots nobody stands on but itself; the last one of these.
    fn next_to_close(&self, roots: &[String]) -> usize {
        // What stands on other nodes of a root gets these.
        let is_used = |root: &String| self.uses.of(root).any(|one| self.is_foreign(one, root));
        let last = roots.len() - 1;
        let free = roots.iter().rposition(|root| !is_used(root));
        free.unwrap_or(last)
    }

    /// Whether a use is that of a node of another owner.
    pub(crate) fn is_foreign(&self, one: &Use, owner: &str) -> bool {
        match &one.user {
            // One that is being opened may not have been noted itself yet.
            User::Node(user) => self.nodes.owner(user).or(one.owner.as_deref()) != Some(owner),
            _ => false,
        }
    }

    /// Takes a node and all that goes with it out, to be closed in this order.
    pub(crate) fn take_closed(&mut self, owner: &str, is_live: bool) -> Vec<NodeKind> {
        self.hand_over(owner);
        self.take_owned(owner, is_live)
    }

    /// Takes a node and all that it owns out, itself first, then what stands below it.
    fn take_owned(&mut self, owner: &str, is_live: bool) -> Vec<NodeKind> {
        let owned = self.top_down(self.owned(owner).map(str::to_owned).collect());
        self.uses.remove_owned(owner);
        let mut taken = Vec::new();
        for name in owned {
            trace!(name: "node_closed", node = name);
            let was_shown = self.nodes.contains_key(&name);
            let Some(node) = self.nodes.remove(&name) else {
                continue;
            };
            self.shared.forget(&name);
            if was_shown {
                self.forget_leads_of(&name);
            }
            // Storages below are closed by what stands on them, if it alone knows them.
            let is_kept = is_live && !name.starts_with(MADE_UP);
            let used = node.device.map(NodeKind::Device);
            match (node.opened.kind, name == owner) {
                (kind, true) => taken.insert(0, used.unwrap_or(kind)),
                (NodeKind::Device(device), false) => taken.push(NodeKind::Device(device)),
                (kind @ NodeKind::Storage(_), false) if is_kept => taken.push(kind),
                (NodeKind::Storage(_), false) => {}
            }
        }
        taken
    }

    /// Takes a node out that was made with another one and that nobody uses any more, to be closed. Also gives the
    /// nodes that it stood on and that others know too.
    pub(crate) fn take_unused(&mut self, name: &str) -> Option<(NodeKind, Vec<String>)> {
        let node = self.nodes.get(name)?;
        let is_asked_for = node.owner == name;
        if is_asked_for || node.is_filter || self.uses.of(name).next().is_some() {
            return None;
        }
        let below = self.uses.by(name).map(|one| one.node.clone()).collect();
        self.forget_below(name);
        self.shared.forget(name);
        let node = self.nodes.remove(name)?;
        self.forget_leads_of(name);
        trace!(name: "node_closed", node = name);
        let used = node.device.map(NodeKind::Device);
        Some((used.unwrap_or(node.opened.kind), below))
    }

    /// Gives the nodes of `owner` on which images of others stand to these.
    fn hand_over(&mut self, owner: &str) {
        while let Some((name, heir)) = self.heir_of_one(owner) {
            self.uses.own_by(&name, &heir);
            self.nodes.set_owner(&name, &heir);
        }
    }

    /// Whether a node goes to another image when the one that owns it is removed.
    pub(crate) fn has_heir(&self, name: &str, owner: &str) -> bool {
        let mut known = BTreeSet::from([name]);
        let mut pending = vec![name];
        while let Some(name) = pending.pop().filter(|name| *name != owner) {
            for one in self.uses.of(name) {
                let User::Node(above) = &one.user else {
                    continue;
                };
                if self.is_foreign(one, owner) {
                    return true;
                }
                if above != owner && known.insert(above) {
                    pending.push(above);
                }
            }
        }
        false
    }

    fn heir_of_one(&self, owner: &str) -> Option<(String, String)> {
        let heir = |one: &Use| match &one.user {
            User::Node(above) if self.is_foreign(one, owner) => {
                let heir = self.nodes.owner(above).or(one.owner.as_deref());
                heir.map(str::to_owned)
            }
            _ => None,
        };
        let below = self.owned(owner).filter(|name| *name != owner);
        let mut found =
            below.filter_map(|name| Some((name.to_owned(), self.uses.of(name).find_map(heir)?)));
        found.next()
    }
}

impl Nodes {
    /// Closes what was opened for nodes that were given up.
    pub async fn close_abandoned(&self) {
        let abandoned = std::mem::take(&mut self.lock().openings.abandoned);
        for kind in abandoned {
            // Nobody is told: the node was never there.
            let _ = kind.close().await;
        }
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
        let state = self.lock();
        let Some(node) = state.nodes.get(name) else {
            return Err(invalid(format!(
                "Failed to find node with node-name='{name}'"
            )));
        };
        let mut users = state.uses.of(name);
        // QEMU's mirror has a device of its own for its target, as exports have.
        if users.any(|one| matches!(one.user, User::Export(_)) || one.is_target_of_mirror()) {
            return Err(invalid(format!("Node {name} is in use")));
        }
        state.check_free(name)?;
        if node.owner != name {
            return Err(invalid(format!("Node {name} is not owned by the monitor")));
        }
        let is_own = |one: &Use| matches!(one.user, User::Node(_)) && !state.is_foreign(one, name);
        let is_kept =
            |node: &str| state.uses.of(node).any(|one| !is_own(one)) && !state.has_heir(node, name);
        let is_used = state.owned(name).any(is_kept);
        match is_used {
            true => Err(invalid(format!("Block device {name} is in use"))),
            false => Ok(()),
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
