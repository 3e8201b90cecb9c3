//! The header's dirty bit, which says that the refcounts on disk are not to be trusted: set before
//! the first cluster is handed out whose count is not going to be written, cleared by the close
//! once all are durable (see [`lazy`](super::lazy)).

use super::lazy::LazyRefcounts;
use crate::qcow2::image::Image;
use std::sync::atomic::Ordering;
use vellum_format::features::Incompatible;
use vellum_io::Result;

impl Image {
    /// Marks the image dirty, if its refcounts are lazy, before clusters are
    /// handed out.
    pub(crate) async fn begin_lazy_refcounts(&self) -> Result<()> {
        let Some(lazy) = self.lazy_refcounts.as_ref().filter(|lazy| !lazy.are_on()) else {
            return Ok(());
        };
        let _one = lazy.changing.lock().await;
        if lazy.are_on() {
            return Ok(());
        }
        // Rule 6: durable before a cluster is handed out whose count stays in memory.
        self.set_dirty_bit(true).await?;
        lazy.postponed.store(true, Ordering::Release);
        self.allocator.set_refcounts_lazy(true);
        Ok(())
    }

    /// Whether commits leave the counts in memory.
    pub(crate) fn refcounts_are_lazy(&self) -> bool {
        let lazy = self.lazy_refcounts.as_ref();
        lazy.is_some_and(LazyRefcounts::are_on)
    }

    /// Lets commits write the counts again; for the close, whose commits then do.
    pub(crate) fn resume_refcounts(&self) {
        let lazy = self.lazy_refcounts.as_ref();
        if lazy.is_some_and(|lazy| lazy.postponed.swap(false, Ordering::AcqRel)) {
            self.allocator.set_refcounts_lazy(false);
        }
    }

    /// Clears the dirty bit, if this program has set it; all counts are durable.
    pub(crate) async fn end_lazy_refcounts(&self) -> Result<()> {
        let dirty = self.header().incompatible.contains(Incompatible::DIRTY);
        if self.lazy_refcounts.is_some() && dirty {
            self.set_dirty_bit(false).await?;
        }
        Ok(())
    }

    async fn set_dirty_bit(&self, dirty: bool) -> Result<()> {
        self.change_incompatible(|bits| match dirty {
            true => bits.with(Incompatible::DIRTY),
            false => bits.without(Incompatible::DIRTY),
        })
        .await
    }
}
