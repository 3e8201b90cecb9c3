//! A node gets another size, and those above that are as long as it is.

use vellum::Result;

use crate::change::graph_change::GraphChange;
use crate::change::reopen_changes::ReopenChanges;
use crate::live::nodes::Nodes;

impl Nodes {
    /// Gives a node another size. Where it shrinks, users are held up: what they have begun beyond the new
    /// end lands before, and is cut off. Nodes above that are as long as it is are opened anew, with their users
    /// held up; they are closed before, as what one has made ahead of writes it cuts off then.
    ///
    /// # Errors
    /// If it cannot have that size, or a node above cannot be opened anew.
    pub async fn resize(&self, name: &str, size_bytes: u64) -> Result<()> {
        let following = self.lock().following_size(name);
        let unchanged = |name| (name, ReopenChanges::default());
        let change = GraphChange {
            reopened: following.into_iter().map(unchanged).collect(),
            keeps_children: true,
            resized: Some((name.to_owned(), size_bytes)),
            ..GraphChange::default()
        };
        change.apply(self).await
    }
}
