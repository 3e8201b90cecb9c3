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

#[cfg(all(test, not(shuttle)))]
mod tests {
    use vellum_io::{Buffer, lane};
    use vellum_storage::MemStorage;
    use vellum_storage::wrap::{Matching, Operation, TraceStorage};

    use crate::gate::DenyAll;
    use crate::qcow2::create::{CreateOptions, create};
    use crate::qcow2::{OpenOptions, Qcow2};
    use crate::{BlockDevice, RequestFlags};

    use super::*;

    /// Flushes that wait for the commits' turn have their share in it: what was written in place must be durable,
    /// although no mapping has changed and the work itself makes nothing so.
    #[test]
    fn what_was_written_in_place_is_made_durable_before() {
        lane::block_on(async {
            let file = TraceStorage::new(Arc::new(MemStorage::new()));
            let options = CreateOptions::default().size_bytes(1 << 20);
            let created = create(file.clone(), None, &options).await;
            created.expect("created");
            let image = Qcow2::open(file.clone(), Arc::new(DenyAll), OpenOptions::default());
            let image = image.await.expect("opened");
            let write = || image.write(0, Buffer::copy_of(&[1; 512]), RequestFlags::default());
            write().await.expect("written");
            image.flush().await.expect("flushed");
            file.take();
            write().await.expect("written in place");
            let nothing = image.image.exclusively("test", async { Ok(()) });
            nothing.await.expect("done");
            let records = file.take();
            let last = |operation| {
                let matching = Matching::operation(operation);
                records
                    .iter()
                    .rposition(|record| matching.accepts(&record.call))
            };
            assert!(last(Operation::Flush) > last(Operation::Write));
            image.close().await.expect("closed");
        });
    }
}
