//! What becomes of dropped clusters that are nobody's on disk: they wait for the requests
//! that read them, their space goes back to the storage where that is wanted, and their
//! refcounts go down.

use std::ops::Range;
use std::sync::Arc;

use vellum_io::Result;

use crate::qcow2::commit::write_order::{DropReason, DroppedRun, merged};
use crate::qcow2::image::Image;

impl Image {
    /// Gives back clusters that are dropped on disk and that no request reads.
    pub(in crate::qcow2::commit) async fn reclaim(&self) -> Result<()> {
        // Rule 5: these are dropped on disk, and no request reads them.
        // The second round serves what only waited for the readers' turn.
        for _ in 0..2 {
            let Some(ready) = self.commits.take_quiescent(&self.read_epochs) else {
                return Ok(());
            };
            for dropped in merged(ready) {
                self.release_clusters(dropped).await?;
            }
        }
        Ok(())
    }

    /// Gives back whatever has been dropped until now. For the close, after which nothing
    /// is allocated: reads that still run find their bytes where they were, for what they
    /// may look at is not punched.
    pub(in crate::qcow2) async fn release_all_dropped(self: &Arc<Self>) -> Result<()> {
        let any_noted = !self.commits.lists().not_durable.is_empty();
        if any_noted {
            self.commit().await?;
        }
        let left = {
            let mut lists = self.commits.lists();
            let mut left = std::mem::take(&mut lists.quiescing);
            left.append(&mut lists.durable);
            left
        };
        for dropped in merged(left) {
            self.release_counts(dropped).await?;
        }
        Ok(())
    }

    pub(in crate::qcow2) async fn release_clusters(&self, dropped: DroppedRun) -> Result<()> {
        if self.passes_discard(dropped.reason) {
            // A hint: what cannot be looked up now is not punched.
            drop(self.punch_unshared(dropped).await);
        }
        self.release_counts(dropped).await
    }

    async fn release_counts(&self, dropped: DroppedRun) -> Result<()> {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let start = dropped.start.index() * cluster_bytes;
        let end = start + dropped.count * cluster_bytes;
        self.compressed_reads.cache.forget(start..end);
        let released = self.allocator.release(dropped.start, dropped.count).await;
        self.allocator
            .note_pending_frees(-(dropped.freeable as i64));
        match released {
            Ok(()) => Ok(()),
            Err(error) => Err(self.mark_corrupt(error).await),
        }
    }

    /// Whether the space of clusters that were dropped for `reason` goes back to the
    /// storage when nobody else uses them.
    pub(crate) fn passes_discard(&self, reason: DropReason) -> bool {
        match reason {
            DropReason::Discarded => self.discards.pass_request,
            DropReason::Shrunk => true,
            DropReason::Replaced => false,
            DropReason::Snapshot => self.discards.pass_snapshot,
            DropReason::Other => self.discards.pass_other,
        }
    }

    /// Punches those clusters whose last user is gone, while their count still
    /// keeps them from being allocated.
    async fn punch_unshared(&self, dropped: DroppedRun) -> Result<()> {
        let mut left = dropped.start.index()..dropped.start.index() + dropped.count;
        let mut run = left.start..left.start;
        while !left.is_empty() {
            let (owned, slice_end) = self
                .allocator
                .refcounts
                .owned_in_slice(left.clone())
                .await?;
            for owned in owned {
                if owned.start != run.end {
                    self.punch(std::mem::replace(&mut run, owned.clone())).await;
                }
                run.end = owned.end;
            }
            left.start = slice_end.min(left.end);
        }
        self.punch(run).await;
        Ok(())
    }

    pub(in crate::qcow2) async fn punch(&self, clusters: Range<u64>) {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let len_bytes = (clusters.end - clusters.start) * cluster_bytes;
        if len_bytes > 0 {
            // A hint: that it failed does not matter to anybody.
            drop(
                self.file
                    .discard(clusters.start * cluster_bytes, len_bytes)
                    .await,
            );
        }
    }
}
