//! L2 tables in new places.

use std::sync::Arc;

use vellum_format::l1::L1Entry;
use vellum_format::types::{GuestOffset, HostCluster, HostOffset};
use vellum_io::range_lock::Mode;
use vellum_io::{Buffers, Result};
use vellum_storage::WriteFlags;

use crate::qcow2::alloc::allocator::Allocation;
use crate::qcow2::commit::write_order::{DropReason, DroppedRun, WriteOrder};
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::corrupt;
use crate::qcow2::integrity::overlap::Metadata;

impl Image {
    /// Moves the L2 table for the guest offset `guest` below the limit, if it lies above. Tells how
    /// many bytes that are; `None`: there is no room.
    pub(super) async fn move_table(
        self: &Arc<Self>,
        guest: u64,
        limit: HostCluster,
    ) -> Result<Option<u64>> {
        let index = self.geometry.l1_index(GuestOffset(guest));
        let lies_above = |table: Option<HostOffset>| {
            table.filter(|table| table.cluster(&self.geometry).index() >= limit.index())
        };
        if lies_above(self.mapper().owned_table(GuestOffset(guest))?).is_none() {
            return Ok(Some(0));
        }
        let start = index * self.geometry.bytes_per_l2_table();
        let end = start.saturating_add(self.geometry.bytes_per_l2_table());
        // Whoever changes an entry holds its cluster.
        let _entries = self.guest_ranges.acquire(start..end, Mode::Exclusive).await;
        let _one = self
            .l1_entries
            .acquire(index..index + 1, Mode::Exclusive)
            .await;
        let Some(old) = lies_above(self.mapper().owned_table(GuestOffset(guest))?) else {
            return Ok(Some(0));
        };
        self.begin_allocation().await?;
        let Some(new) = self.allocator.allocate_below(limit, 1).await? else {
            return Ok(None);
        };
        // Afterwards the disk has what memory has of it.
        let copied = match self.commit().await {
            Ok(()) => self.copy_table(old, &new).await,
            Err(error) => Err(error),
        };
        self.free_unless(&copied, Some(new)).await;
        copied?;
        self.lead_to_table(index, old, new.start)?;
        Ok(Some(self.geometry.cluster_size_bytes()))
    }

    async fn copy_table(&self, old: HostOffset, new: &Allocation) -> Result<()> {
        let table_bytes = self.geometry.cluster_size_bytes();
        let content = read_bytes(&self.file, old.bytes(), table_bytes).await?;
        let buffers = Buffers::from_iter([content]);
        let flags = WriteFlags::default();
        self.file.write(new.start.bytes(), buffers, flags).await?;
        self.count_table().await
    }

    fn lead_to_table(&self, index: u64, old: HostOffset, new: HostOffset) -> Result<()> {
        self.forget_slices(new);
        // Rule 1: its content is on its way to the disk; a barrier follows before this entry does.
        let change = self.commits.begin_change(WriteOrder::AfterBarrier);
        self.overlap
            .add_table(Metadata::ActiveL2, L1Entry::new(new, true));
        let is_set = self.l1.set(index, L1Entry::new(new, true));
        drop(change);
        if !is_set {
            return Err(self.name_error(corrupt("compact", "the L1 table is too small")));
        }
        self.forget_slices(old);
        self.commits.defer_free(DroppedRun {
            start: old.cluster(&self.geometry),
            count: 1,
            reason: DropReason::Other,
            freeable: 0,
        });
        Ok(())
    }
}
