//! Jobs as users of nodes: which of them go together, and images that a commit leads on.
//!
//! Invariant: of two jobs on one node neither changes what the other one reads or relies on.

use vellum::Result;

use super::named::busy;
use super::{Nodes, RequiredAccess, Use, User};

impl Nodes {
    /// Refuses a node that another job than this one works on, which wants it as `role`.
    ///
    /// # Errors
    /// As [`Nodes::check_no_job`].
    pub fn check_no_other_job(&self, name: &str, job: &User, role: &str) -> Result<()> {
        let named = self.lock();
        let wanted = Use::new(job.clone(), name, RequiredAccess::reading(role), None);
        let goes_together = |other: &Use| {
            (wanted.is_between_of_stream() && other.is_overlay_of_commit())
                || (wanted.is_overlay_of_commit() && other.is_between_of_stream())
        };
        let others = named.uses.of(name);
        let mut others = others.filter(|one| one.user != *job && !goes_together(one));
        busy(name, others.find_map(Use::job))
    }

    /// Has a commit that `lowest` is the overlay of know `image` too as one: a stream has brought up
    /// what was between.
    ///
    /// # Errors
    /// If what the commit wants gets in the way of others.
    pub fn also_overlay(&self, lowest: &str, image: &str) -> Result<()> {
        let mut named = self.lock();
        let uses = named.uses.of(lowest);
        let commits: Vec<Use> = uses
            .filter(|one| one.is_overlay_of_commit())
            .cloned()
            .collect();
        for one in commits {
            named.add_use(Use::new(one.user, image, one.wanted, None))?;
        }
        Ok(())
    }

    /// The images that a job leads from one layer to another.
    pub fn overlays_of_job(&self, job: &User) -> Vec<String> {
        let named = self.lock();
        let uses = named.uses.iter();
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
        let mut named = self.lock();
        let uses = named.uses.iter().filter(|one| one.user == *job);
        let ids: Vec<u64> = uses.map(|one| one.id).collect();
        ids.into_iter().for_each(|id| named.uses.remove(id));
    }
}
