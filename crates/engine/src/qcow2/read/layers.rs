//! [`BackingChain`]: what an image knows of what lies below it.

use super::chain_index::ChainIndex;
use crate::BlockDevice;
use crate::qcow2::image::Image;
use std::sync::{Arc, OnceLock};

/// What lies below an image; see [`chain`](super::chain).
#[derive(Debug)]
pub(crate) struct BackingChain {
    pub(super) below: Option<Arc<dyn BlockDevice>>,
    /// Two or more images that are open read-only lie below: an index is worth while.
    pub(crate) is_indexed: bool,
    /// An image that is read there has checksums.
    pub(crate) may_heal: bool,
    pub(super) index: ChainIndex,
    /// Found when something is first read there; `None` where nothing is indexed.
    pub(super) layers: OnceLock<Option<Layers>>,
}

/// The images below, and what stands below them.
#[derive(Debug)]
pub(super) struct Layers {
    pub(super) images: Vec<Layer>,
    pub(super) rest: Option<Arc<dyn BlockDevice>>,
    pub(super) region_bytes: u64,
}

#[derive(Debug)]
pub(super) struct Layer {
    pub(super) image: Arc<Image>,
    /// Its data is read from its storage as the guest sees it.
    pub(super) plain: bool,
}

impl BackingChain {
    /// Bytes of memory that the index takes.
    pub(crate) fn used_bytes(&self) -> usize {
        self.index.used_bytes()
    }

    /// Drops parts of the index until so many bytes are free.
    pub(crate) fn evict(&self, wanted_bytes: usize) {
        self.index.evict(wanted_bytes);
    }

    /// Drops what was not used since the last call.
    pub(crate) fn drop_unused(&self) {
        self.index.drop_unused();
    }
}
