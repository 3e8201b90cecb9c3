//! L2 tables that snapshots use, in new places. The rules of `shared` hold here, too.

use std::sync::Arc;

use vellum_format::l1::L1Entry;
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::range_lock::Mode;
use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::WriteFlags;

use super::shared::SharedTable;
use crate::qcow2::commit::write_order::{DropReason, WriteOrder};
use crate::qcow2::image::Image;
use crate::qcow2::integrity::overlap::Metadata;

impl Image {
    /// Moves tables that lie above the limit. Tells how many bytes that are; `None`: there is no
    /// room for all of them.
    pub(super) async fn move_shared_tables(
        self: &Arc<Self>,
        l1_index: u64,
        mut tables: Vec<SharedTable>,
        limit: HostCluster,
    ) -> Result<Option<u64>> {
        let _table = self
            .l1_entries
            .acquire(l1_index..l1_index + 1, Mode::Exclusive)
            .await;
        self.find_users(l1_index, &mut tables)?;
        let mut moved_bytes = 0;
        for table in tables {
            let place = table.place.cluster(&self.geometry);
            let is_known = self.refcount(place).await? == table.uses();
            if place.index() < limit.index() || !is_known {
                continue;
            }
            self.begin_allocation().await?;
            let Some(new) = self.allocator.allocate_below(limit, 1).await? else {
                return Ok(None);
            };
            let counted = self.copy_shared_table(&table, new.start).await;
            if !matches!(counted, Ok(true)) {
                self.give_back(new).await;
            }
            if counted? {
                self.lead_to_shared_table(l1_index, &table, new.start)
                    .await?;
                moved_bytes += self.geometry.cluster_size_bytes();
            }
        }
        Ok(Some(moved_bytes))
    }

    /// Writes a table to another place, durably; `false`: that cannot be counted as often.
    async fn copy_shared_table(
        self: &Arc<Self>,
        table: &SharedTable,
        new: HostOffset,
    ) -> Result<bool> {
        let cluster = new.cluster(&self.geometry);
        let more = table.uses() - 1;
        if self
            .allocator
            .refcounts
            .raise(cluster, more)
            .await?
            .is_none()
        {
            return Ok(false);
        }
        let content = Buffers::from_iter([Buffer::copy_of(&table.content)]);
        let flags = WriteFlags::default();
        self.file.write(new.bytes(), content, flags).await?;
        self.count_table().await?;
        self.forget_slices(new);
        // Rule 1: it is durable before anything leads there.
        self.commit().await?;
        Ok(true)
    }

    async fn lead_to_shared_table(
        self: &Arc<Self>,
        l1_index: u64,
        table: &SharedTable,
        new: HostOffset,
    ) -> Result<()> {
        let entry = L1Entry::new(new, false);
        let kind = match table.by_disk {
            true => Metadata::ActiveL2,
            false => Metadata::InactiveL2,
        };
        self.overlap.add_table(kind, entry);
        for at in &table.l1_entries {
            let bytes = Buffers::from_iter([Buffer::copy_of(&entry.0.to_be_bytes())]);
            let flags = WriteFlags::default();
            self.file.write(at.bytes(), bytes, flags).await?;
        }
        if table.by_disk {
            let change = self.commits.begin_change(WriteOrder::AfterBarrier);
            let is_set = self.l1.set(l1_index, entry);
            drop(change);
            debug_assert!(is_set, "the entry was there");
        }
        self.commit().await?;
        self.forget_slices(table.place);
        self.drop_often(table.place, table.uses(), DropReason::Other);
        Ok(())
    }
}
