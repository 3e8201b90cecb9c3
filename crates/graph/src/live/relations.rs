//! What stands on what, and what forbids a change of it, as commands ask.

use vellum::Result;

use crate::live::nodes::Nodes;
use crate::live::uses::{RequiredAccess, Use, User};
use crate::node::errors::{busy, unknown_node};

impl Nodes {
    /// Refuses what cannot be done with a node because of who uses it.
    ///
    /// # Errors
    /// In QEMU's words, if there is no such node, or something is in the way.
    pub fn check_free(&self, name: &str) -> Result<()> {
        let state = self.lock();
        if !state.nodes.contains_key(name) {
            return Err(unknown_node(name));
        }
        state.check_free(name)
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
        let state = self.lock();
        let mut owned = state.owned(name).filter(|node| !state.has_heir(node, name));
        owned.try_for_each(|node| state.check_no_job(node))
    }

    /// Refuses to open a node anew that a job works on.
    ///
    /// # Errors
    /// As [`Nodes::check_no_job`].
    pub fn check_not_watched(&self, name: &str) -> Result<()> {
        self.lock().check_not_watched(name)
    }

    /// The node below another one: its backing file.
    pub fn backing_of(&self, name: &str) -> Option<String> {
        self.child_of(name, "backing")
    }

    /// The node that is `role` to another one: `file`, `backing`.
    pub fn child_of(&self, name: &str, role: &str) -> Option<String> {
        let state = self.lock();
        let found = state.uses.by_as(name, role)?;
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
        let state = self.lock();
        let overlay = |one: &Use| match &one.user {
            User::Node(user) if one.wanted.role == "backing" => Some(user.clone()),
            _ => None,
        };
        state.uses.of(name).filter_map(overlay).collect()
    }

    /// Whether a node has a user of a kind.
    pub fn is_used_by(&self, name: &str, kind: impl Fn(&User) -> bool) -> bool {
        let state = self.lock();
        state.uses.of(name).any(|one| kind(&one.user))
    }

    /// Who uses which node, and for what: the number of the use, the user, the node, and what is
    /// wanted of it, also by those who use it through the user.
    pub fn uses(&self) -> Vec<(u64, User, String, RequiredAccess)> {
        let state = self.lock();
        let is_shown = |name: &str| state.nodes.contains_key(name);
        let uses = state.uses_with_reach().into_iter();
        // Those of nodes that are being opened are nobody else's business.
        let uses = uses.filter(|one| match &one.user {
            User::Node(above) => is_shown(above) && is_shown(&one.node),
            _ => true,
        });
        uses.map(|one| (one.id, one.user, one.node, one.wanted))
            .collect()
    }

    /// The names of all nodes, each after those that it stands on.
    pub fn bottom_up(&self) -> Vec<String> {
        let state = self.lock();
        let mut names = state.top_down(state.nodes.keys().cloned().collect());
        names.reverse();
        names
    }

    /// Refuses a node that another job than this one works on, which wants it as `role`.
    ///
    /// # Errors
    /// As [`Nodes::check_no_job`].
    pub fn check_no_other_job(&self, name: &str, job: &User, role: &str) -> Result<()> {
        let state = self.lock();
        let wanted = Use::new(job.clone(), name, RequiredAccess::reading(role), None);
        let goes_together = |other: &Use| {
            (wanted.is_between_of_stream() && other.is_overlay_of_commit())
                || (wanted.is_overlay_of_commit() && other.is_between_of_stream())
        };
        let others = state.uses.of(name);
        let mut others = others.filter(|one| one.user != *job && !goes_together(one));
        busy(name, others.find_map(Use::job))
    }

    /// Has a commit that `lowest` is the overlay of know `image` too as one: a stream has brought up
    /// what was between.
    ///
    /// # Errors
    /// If what the commit wants gets in the way of others.
    pub fn also_overlay(&self, lowest: &str, image: &str) -> Result<()> {
        let mut state = self.lock();
        let uses = state.uses.of(lowest);
        let commits: Vec<Use> = uses
            .filter(|one| one.is_overlay_of_commit())
            .cloned()
            .collect();
        for one in commits {
            state.add_use(Use::new(one.user, image, one.wanted, None))?;
        }
        Ok(())
    }

    /// The images that a job leads from one layer to another.
    pub fn overlays_of_job(&self, job: &User) -> Vec<String> {
        let state = self.lock();
        let uses = state.uses.iter();
        let uses = uses.filter(|one| one.user == *job && one.is_overlay_of_commit());
        uses.map(|one| one.node.clone()).collect()
    }

    /// Notes that a job has opened a node for itself, or that it has left it to others.
    pub fn note_of_job(&self, name: &str, is_of_job: bool) {
        if let Some(node) = self.lock().nodes.get_mut(name) {
            node.is_of_job = is_of_job;
        }
    }

    /// Ends all uses of a job.
    pub fn leave_all(&self, job: &User) {
        let mut state = self.lock();
        let uses = state.uses.iter().filter(|one| one.user == *job);
        let ids: Vec<u64> = uses.map(|one| one.id).collect();
        ids.into_iter().for_each(|id| state.uses.remove(id));
    }
}
