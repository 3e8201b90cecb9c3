//! Work for which the whole image has to stand still: snapshots and compaction.
//!
//! Whoever takes several of these locks takes them in this order: `resizing`, `placing`, guest ranges,
//! entries of the L1 table, the commit.

use std::sync::Arc;

use vellum_io::Result;
use vellum_io::range_lock::Mode;

use crate::qcow2::image::Image;

impl Image {
    /// Does `work` while nobody else changes anything: requests that have begun are
    /// over, all they did is durable, and what the mapping has dropped is free. Reads go on.
    /// `operation` is what errors name.
    ///
    /// # Errors
    /// Where the image cannot be changed, what writing back and flushing report, and `work`'s own.
    pub(in crate::qcow2) async fn exclusively<T>(
        self: &Arc<Self>,
        operation: &'static str,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        self.begin_change(operation).await?;
        let _one = self.resizing.lock().await;
        let _unpacked = self.compressed_writes.placing.write().await;
        let _guests = self
            .guest_ranges
            .acquire(0..u64::MAX, Mode::Exclusive)
            .await;
        self.write_back_locked_range(0..u64::MAX).await?;
        let _tables = self.l1_entries.acquire(0..u64::MAX, Mode::Exclusive).await;
        self.seal_packed().await?;
        let durable = async {
            self.reclaim_after_reads().await?;
            work.await
        };
        self.commit_and(durable).await
    }
}
