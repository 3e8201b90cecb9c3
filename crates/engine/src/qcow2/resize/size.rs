//! [`Size`]: the virtual size of an open image.

use std::sync::atomic::{AtomicU64, Ordering};

/// The virtual size of an open image.
#[derive(Debug)]
pub(crate) struct Size {
    /// What guests see and may ask for.
    visible_bytes: AtomicU64,
    /// What the engine itself may touch: more while the image grows.
    reach_bytes: AtomicU64,
}

impl Size {
    /// A size that nobody is changing.
    pub(crate) fn new(size_bytes: u64) -> Self {
        Size {
            visible_bytes: AtomicU64::new(size_bytes),
            reach_bytes: AtomicU64::new(size_bytes),
        }
    }

    /// What guests see.
    pub(crate) fn visible_bytes(&self) -> u64 {
        self.visible_bytes.load(Ordering::Acquire)
    }

    /// What may be touched.
    #[inline]
    pub(crate) fn addressable_bytes(&self) -> u64 {
        self.reach_bytes.load(Ordering::Acquire)
    }

    pub(crate) fn set(&self, size_bytes: u64) {
        self.reach_bytes.store(size_bytes, Ordering::Release);
        self.visible_bytes.store(size_bytes, Ordering::Release);
    }

    pub(super) fn set_visible(&self, size_bytes: u64) {
        self.visible_bytes.store(size_bytes, Ordering::Release);
    }

    pub(crate) fn set_reach(&self, size_bytes: u64) {
        self.reach_bytes.store(size_bytes, Ordering::Release);
    }
}
