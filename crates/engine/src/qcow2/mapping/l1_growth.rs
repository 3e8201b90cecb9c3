//! Making the L1 table longer: in place where its last cluster has room, else by a
//! copy in a new place, which is durable before the header points at it.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::header::field;
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::Result;
use vellum_storage::Event;

use crate::qcow2::commit::write_order::{DropReason, DroppedRun};
use crate::qcow2::create::write::region;
use crate::qcow2::image::Image;
use crate::qcow2::integrity::overlap::Metadata;
use vellum_io::range_lock::Mode;

impl Image {
    /// Gives the L1 table at least `entries` entries.
    pub(crate) async fn grow_l1(self: &Arc<Self>, entries: u64) -> Result<()> {
        let old_entries = self.l1.len();
        if entries <= old_entries {
            return Ok(());
        }
        // Nobody changes the table from here on, and after a commit nothing of it
        // is on its way to the disk.
        let _all = self.l1_entries.acquire(0..u64::MAX, Mode::Exclusive).await;
        self.commit().await?;
        self.emit(Event::L1GrowAllocTable).await;
        let old = self.l1_clusters(self.l1.offset(), old_entries);
        let has_room = self.geometry.clusters_for(entries * 8) <= old.end - old.start;
        let offset = match has_room {
            true => self.l1.offset(),
            false => {
                let clusters = self.geometry.clusters_for(entries * 8);
                self.emit(Event::ClusterAlloc).await;
                self.allocator.allocate_run(clusters).await?
            }
        };
        let first = if has_room { old_entries } else { 0 };
        if let Err(error) = self.put_l1(offset, first..entries).await {
            if !has_room && self.fail_stop.check("write", &self.name).is_ok() {
                // Nothing leads to the new table.
                let new = self.l1_clusters(offset, entries);
                let count = new.end - new.start;
                drop(self.allocator.release(HostCluster(new.start), count).await);
            }
            return Err(error);
        }
        self.l1.moved(offset, entries);
        if !has_room {
            self.drop_old_l1(old, offset, entries);
        }
        Ok(())
    }

    /// Writes some entries of the table at `offset`, up to its end, and has the header
    /// lead there.
    async fn put_l1(&self, offset: HostOffset, entries: Range<u64>) -> Result<()> {
        let start = offset.bytes();
        self.emit(Event::L1GrowWriteTable).await;
        region(
            &self.file,
            start + entries.start * 8..start + entries.end * 8,
            |at, bytes| {
                for (index, place) in (entries.start + at / 8..).zip(bytes.chunks_exact_mut(8)) {
                    place.copy_from_slice(&self.l1.get(index).0.to_be_bytes());
                }
            },
        )
        .await?;
        self.allocator.refcounts.write_back().await?;
        self.file.flush().await?;
        self.emit(Event::L1GrowActivateTable).await;
        self.point_at_l1(offset, entries.end).await
    }

    fn l1_clusters(&self, offset: HostOffset, entries: u64) -> Range<u64> {
        let first = offset.cluster(&self.geometry).index();
        first..first + self.geometry.clusters_for(entries * 8)
    }

    /// The size and the place of the table lie side by side in the header, so a
    /// crash leaves both old or both new.
    async fn point_at_l1(&self, offset: HostOffset, entries: u64) -> Result<()> {
        let fields = |entries: u64, offset: HostOffset| {
            let mut fields = [0; 12];
            fields[..4].copy_from_slice(&(entries as u32).to_be_bytes());
            fields[4..].copy_from_slice(&offset.bytes().to_be_bytes());
            fields
        };
        let header = self.header();
        let old = fields(header.l1_entries.into(), header.l1_table_offset);
        self.switch_header_fields(field::L1_SIZE, &old, &fields(entries, offset))
            .await?;
        self.change_header(|header| {
            header.l1_entries = entries as u32;
            header.l1_table_offset = offset;
        });
        Ok(())
    }

    fn drop_old_l1(&self, old: Range<u64>, offset: HostOffset, entries: u64) {
        let new = self.l1_clusters(offset, entries);
        self.overlap.move_area(Metadata::ActiveL1, new);
        if !old.is_empty() {
            self.commits.defer_free(DroppedRun {
                start: HostCluster(old.start),
                count: old.end - old.start,
                reason: DropReason::Other,
                freeable: 0,
            });
        }
    }
}
