//! L2 tables: made when first needed, and copied when a snapshot shares them.
//!
//! A new table's content is on disk before its L1 entry is set in memory, so the
//! barrier between tables and mapping (see `order`) covers it.

use std::sync::Arc;

use vellum_format::l1::L1Entry;
use vellum_format::types::{GuestOffset, HostOffset};
use vellum_io::{Buffers, Result};
use vellum_storage::{Event, WriteFlags, ZeroFlags};

use crate::qcow2::alloc::allocator::Allocation;
use crate::qcow2::alloc::host_room::set_aside;
use crate::qcow2::commit::write_order::{DropReason, DroppedRun, WriteOrder};
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::{bad_entry, corrupt};
use crate::qcow2::integrity::overlap::Metadata;
use vellum_io::range_lock::Mode;

/// What is written of a new table that the file does not reach yet.
const LAST_BYTES: u64 = 4096;

impl Image {
    /// Makes the L2 table for `guest`, a copy of the one that a snapshot shares or an
    /// empty one, unless somebody else does meanwhile.
    pub(crate) async fn make_l2_table(self: &Arc<Self>, guest: GuestOffset) -> Result<()> {
        let index = self.geometry.l1_index(guest);
        let _one = self
            .l1_entries
            .acquire(index..index + 1, Mode::Exclusive)
            .await;
        if self.mapper().owned_table(guest)?.is_some() {
            return Ok(());
        }
        let entry = self.l1.get(index);
        let old = entry
            .decode(&self.geometry)
            .map_err(|e| bad_entry("write", &e, "L1 index", index))?;
        let allocation = self.allocate_for("L2 table", None).await?;
        let table = allocation.start;
        // A table of zeroes maps nothing: where the file reads so there is no need to
        // write one.
        let empty = old.is_none() && self.reads_as_zeroes(&allocation)?;
        let prepared = async {
            self.have_room_for_l1_entry(index).await?;
            if !empty {
                self.fill_table(old, &allocation).await?;
            }
            self.count_table().await
        };
        let prepared = prepared.await;
        self.free_unless(&prepared, Some(allocation)).await;
        prepared?;
        self.forget_slices(table);
        if old.is_none() {
            self.keep_empty_slice(guest, table);
        }
        let order = WriteOrder::of_new_clusters(empty && allocation.refcount_durable);
        let change = self.commits.begin_change(order);
        self.overlap
            .add_table(Metadata::ActiveL2, L1Entry::new(table, true));
        if !self.l1.set(index, L1Entry::new(table, true)) {
            return Err(self.name_error(corrupt("write", "the L1 table is too small")));
        }
        drop(change);
        if let Some(old) = old {
            let start = old.cluster(&self.geometry);
            self.commits.defer_free(DroppedRun {
                start,
                count: 1,
                reason: DropReason::Other,
                freeable: 0,
            });
        }
        Ok(())
    }

    /// Has the host set room aside for a piece of the L1 table that is about to change, if it may
    /// be a hole.
    async fn have_room_for_l1_entry(&self, index: u64) -> Result<()> {
        match self.l1.sector_is_empty(index) {
            true => set_aside(&self.file, self.l1.sector_place(index)).await,
            false => Ok(()),
        }
    }

    /// Lets the counts of tables be right on disk also where counts are lazy: there is
    /// one table for many clusters, and less to repair after a crash.
    pub(crate) async fn count_table(&self) -> Result<()> {
        match self.refcounts_are_lazy() {
            true => self.allocator.refcounts.write_back().await,
            false => Ok(()),
        }
    }

    /// Puts the slice of a new, empty table into the cache that is going to be changed.
    fn keep_empty_slice(&self, guest: GuestOffset, table: HostOffset) {
        let slice_bytes = self.l2.table_bytes();
        let entry = self.geometry.l2_index(guest) as u64 * self.geometry.l2_entry_size_bytes();
        let inside = entry / slice_bytes as u64 * slice_bytes as u64;
        self.l2
            .insert_clean(table.bytes() + inside, &vec![0; slice_bytes]);
    }

    /// Writes the content of a new table: that of `old`, or nothing allocated. A
    /// shared table is never changed in memory, so the disk has its content.
    async fn fill_table(&self, old: Option<HostOffset>, new: &Allocation) -> Result<()> {
        let table_bytes = self.geometry.cluster_size_bytes();
        let new_bytes = new.start.bytes();
        if old.is_some() {
            self.emit(Event::L2AllocCowRead).await;
        }
        self.emit(Event::L2AllocWrite).await;
        let Some(old) = old else {
            // Where nothing was ever written it is enough that the file reaches so far.
            let written = match new.reads_as_zeroes {
                true => table_bytes.min(LAST_BYTES),
                false => table_bytes,
            };
            let start = new_bytes + table_bytes - written;
            let flags = ZeroFlags::default();
            return self.file.write_zeroes(start, written, flags).await;
        };
        let content = read_bytes(&self.file, old.bytes(), table_bytes).await?;
        let buffers = Buffers::from_iter([content]);
        self.file
            .write(new_bytes, buffers, WriteFlags::default())
            .await
            .map(drop)
    }

    /// Forgets what the cache may still hold from an earlier use of the cluster, and whether it
    /// had room.
    pub(crate) fn forget_slices(&self, table: HostOffset) {
        let table_bytes = self.geometry.cluster_size_bytes();
        self.mapping_room
            .forget(table.bytes()..table.bytes() + table_bytes);
        for inside in (0..table_bytes).step_by(self.l2.table_bytes()) {
            self.l2.forget(table.bytes() + inside);
        }
    }
}
