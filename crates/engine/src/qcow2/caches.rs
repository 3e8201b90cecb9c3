//! All caches of an image together: their sizes, and what they give up for other images.

use vellum_io::Result;

use crate::qcow2::cache_budget::{CacheOwner, CacheShare};
use crate::qcow2::image::Image;
use crate::qcow2::options::CacheOptions;
use crate::qcow2::table_cache::cache::Budget;

impl Image {
    /// Sizes the metadata caches for the device as it is now.
    ///
    /// # Errors
    /// Where the options contradict themselves; nothing has changed then.
    pub(crate) fn set_cache_sizes(&self, options: &CacheOptions) -> Result<()> {
        let mut current = self.cache_options.lock();
        let sizes = options.resolve(&self.geometry, self.size.visible_bytes())?;
        *current = *options;
        self.l2.set_budget(sizes.l2);
        self.allocator.refcounts.cache.set_budget(Budget {
            max_bytes: sizes.refcount_bytes,
            adaptive: false,
            holds_all: false,
        });
        Ok(())
    }
}

impl CacheOwner for Image {
    fn share(&self) -> &CacheShare {
        &self.cache_share
    }

    /// The cache that takes most gives.
    fn evict(&self, wanted_bytes: usize) {
        let refcounts = &self.allocator.refcounts.cache;
        let decompressed = &self.compressed_reads.cache;
        let metadata_bytes = self.l2.used_bytes().max(refcounts.used_bytes());
        let chain_bytes = self.backing_chain.used_bytes();
        if decompressed.used_bytes() > metadata_bytes.max(chain_bytes) {
            decompressed.evict(wanted_bytes);
        } else if chain_bytes > metadata_bytes {
            self.backing_chain.evict(wanted_bytes);
        } else if refcounts.used_bytes() > self.l2.used_bytes() {
            refcounts.evict(wanted_bytes);
        } else {
            self.l2.evict(wanted_bytes);
        }
    }
}
