//! Nodes become writable or read-only under their users.

use vellum::Result;
use vellum_storage::mutants::{self, Mutant};

use crate::change::graph_change::GraphChange;
use crate::change::reopen_changes::ReopenChanges;
use crate::live::nodes::Nodes;
use crate::node::errors::{unavailable, unknown_node};

impl Nodes {
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
            return Err(unavailable("write"));
        }
        let changes = ReopenChanges {
            writable: Some(writable),
            ..ReopenChanges::default()
        };
        let change = GraphChange::reopening(vec![(name.to_owned(), changes)]);
        change.apply(self).await
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
}
