//! What the caches of all images may take together.

use std::sync::Arc;

use vellum::qcow2::CacheBudget;

use super::Nodes;

impl Nodes {
    /// Has the caches of all images that are opened from now on take no more than so many
    /// bytes together.
    #[must_use]
    pub fn with_cache_budget(mut self, total_bytes: u64) -> Self {
        self.cache_budget = Some(CacheBudget::new(total_bytes));
        self
    }

    /// What the caches of all images may take together, if that is bounded.
    pub fn cache_budget(&self) -> Option<&Arc<CacheBudget>> {
        self.cache_budget.as_ref()
    }
}
