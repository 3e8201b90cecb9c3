//! A node gets another size, and those above that are as long as it is.

use vellum::Result;

use crate::change::renewed::Noting;
use crate::live::nodes::Nodes;
use crate::live::uses::User;

impl Nodes {
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
}
