//! Lazy refcounts: while the image is in use, refcounts stay in memory, and the
//! header's dirty bit says that those on disk are not to be trusted.
//!
//! Invariants:
//! - The dirty bit is durable before the first cluster is handed out whose count is
//!   not going to be written.
//! - It is cleared only after the close has written all counts, durably. Whoever
//!   opens a dirty image for writing counts its clusters again.
//!
//! Counts may still reach the disk at any time, where the cache needs room.

use std::sync::atomic::{AtomicBool, Ordering};

use vellum_format::features::Compatible;
use vellum_format::header::Header;
use vellum_io::{Error, ErrorKind, Result};

/// Whether refcounts are postponed, in an image whose refcounts may be.
#[derive(Debug, Default)]
pub(crate) struct LazyRefcounts {
    /// The dirty bit is set, durably, and counts are not written.
    pub(super) postponed: AtomicBool,
    pub(super) changing: async_lock::Mutex<()>,
}

impl LazyRefcounts {
    /// `None` where neither the image nor the option `lazy-refcounts` asks for them.
    ///
    /// # Errors
    /// In QEMU's words, if the image is too old for what the option asks for.
    pub(crate) fn new(header: &Header, option: Option<bool>) -> Result<Option<Self>> {
        let wanted = option.unwrap_or(header.compatible.contains(Compatible::LAZY_REFCOUNTS));
        if wanted && header.geometry().version < 3 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "open",
                "Lazy refcounts require a qcow2 image with at least qemu 1.1 compatibility level",
            ));
        }
        Ok(wanted.then(Self::default))
    }

    /// Whether commits leave the counts in memory.
    pub(crate) fn are_on(&self) -> bool {
        self.postponed.load(Ordering::Acquire)
    }
}
