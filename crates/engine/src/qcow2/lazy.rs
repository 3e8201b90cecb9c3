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

use vellum_format::features::{Compatible, Incompatible};
use vellum_format::header::{Header, field};
use vellum_storage::{Error, ErrorKind, Result};

use super::image::Image;

/// Whether refcounts are postponed.
#[derive(Debug, Default)]
pub(crate) struct LazyRefcounts {
    wanted: bool,
    /// The dirty bit is set, durably, and counts are not written.
    postponed: AtomicBool,
    changing: async_lock::Mutex<()>,
}

impl LazyRefcounts {
    /// What the image and the option `lazy-refcounts` ask for.
    ///
    /// # Errors
    /// In QEMU's words, if the image is too old for what the option asks for.
    pub(crate) fn new(header: &Header, option: Option<bool>) -> Result<Self> {
        let wanted = option.unwrap_or(header.compatible.contains(Compatible::LAZY_REFCOUNTS));
        if wanted && header.geometry().version < 3 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "open",
                "Lazy refcounts require a qcow2 image with at least qemu 1.1 compatibility level",
            ));
        }
        Ok(LazyRefcounts {
            wanted,
            ..Self::default()
        })
    }

    /// Whether commits leave the counts in memory.
    pub(crate) fn are_postponed(&self) -> bool {
        self.postponed.load(Ordering::Acquire)
    }
}

impl Image {
    /// Marks the image dirty, if its refcounts are lazy, before clusters are
    /// handed out.
    pub(crate) async fn begin_lazy_refcounts(&self) -> Result<()> {
        if !self.lazy.wanted || self.lazy.are_postponed() {
            return Ok(());
        }
        let _one = self.lazy.changing.lock().await;
        if self.lazy.are_postponed() {
            return Ok(());
        }
        self.set_dirty_bit(true).await?;
        self.lazy.postponed.store(true, Ordering::Release);
        self.allocator.set_counts_postponed(true);
        Ok(())
    }

    /// Lets commits write the counts again; for the close, whose commits then do.
    pub(crate) fn resume_refcounts(&self) {
        if self.lazy.postponed.swap(false, Ordering::AcqRel) {
            self.allocator.set_counts_postponed(false);
        }
    }

    /// Clears the dirty bit, if this program has set it; all counts are durable.
    pub(crate) async fn end_lazy_refcounts(&self) -> Result<()> {
        let dirty = self.header().incompatible.contains(Incompatible::DIRTY);
        if self.lazy.wanted && dirty {
            self.set_dirty_bit(false).await?;
        }
        Ok(())
    }

    async fn set_dirty_bit(&self, dirty: bool) -> Result<()> {
        let old = self.header().incompatible;
        let new = match dirty {
            true => old.with(Incompatible::DIRTY),
            false => old.without(Incompatible::DIRTY),
        };
        let bits = new.bits().to_be_bytes();
        self.write_header_field(field::INCOMPATIBLE_FEATURES, &bits)
            .await?;
        self.change_header(|header| header.incompatible = new);
        Ok(())
    }
}
