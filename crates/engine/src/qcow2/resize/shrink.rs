//! Giving up what lies beyond the end of a device: its mapping, its clusters, and the
//! end of the file.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::l1::L1Entry;
use vellum_format::l2::Mapping;
use vellum_format::types::{GuestOffset, HostCluster, HostOffset};
use vellum_io::Result;
use vellum_storage::Event;

use crate::qcow2::alloc::allocator::Allocator;
use crate::qcow2::commit::write_order::{DropReason, DroppedRun, WriteOrder};
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::{bad_format, corrupt};
use vellum_io::range_lock::Mode;

/// After so many clusters were dropped, they are made durable before more are: what
/// is noted about them takes memory.
const CLUSTERS_PER_COMMIT: u64 = 1 << 16;

impl Image {
    /// Unmaps every cluster from the guest offset `start` on, which is that of a
    /// cluster, and says whether there were any. No request may touch these.
    pub(crate) async fn cut_mapping(self: &Arc<Self>, start: u64) -> Result<bool> {
        let table_bytes = self.geometry.bytes_per_l2_table();
        let whole_tables = start.div_ceil(table_bytes);
        let rest = start..whole_tables.saturating_mul(table_bytes);
        let mut cut = false;
        if !rest.is_empty() && self.mapper().place(GuestOffset(start))?.is_some() {
            cut |= self.cut_entries(rest.start, rest.end).await?;
        }
        let mut dropped = 0;
        for index in whole_tables..self.l1.len() {
            if self.l1.get(index) == L1Entry::UNALLOCATED {
                continue;
            }
            if !cut {
                self.emit(Event::L1ShrinkWriteTable).await;
            }
            cut = true;
            self.emit(Event::L1ShrinkFreeL2Clusters).await;
            dropped += self.cut_table(index).await?;
            if dropped >= CLUSTERS_PER_COMMIT {
                self.commit().await?;
                dropped = 0;
            }
        }
        Ok(cut)
    }

    /// Unmaps a part of an L2 table that stays.
    async fn cut_entries(self: &Arc<Self>, start: u64, end: u64) -> Result<bool> {
        let mut cut = false;
        let mut at = start;
        while at < end {
            let guest = GuestOffset(at);
            let old = self.mapping(guest).await?;
            if !is_empty(&old) {
                cut = true;
                self.ensure_l2_table(guest).await?;
                self.set_mapping(guest, Mapping::Unallocated, WriteOrder::AfterBarrier)
                    .await?;
                self.defer_free_replaced(&old, &Mapping::Unallocated, DropReason::Shrunk);
                self.relieve_l2_cache().await?;
            }
            at += self.geometry.cluster_size_bytes();
        }
        Ok(cut)
    }

    /// Drops an L2 table with all that it maps; returns how many clusters that were.
    async fn cut_table(self: &Arc<Self>, index: u64) -> Result<u64> {
        let start = index * self.geometry.bytes_per_l2_table();
        let mut clusters = Vec::new();
        for number in 0..self.geometry.l2_entries() {
            let guest = start + number * self.geometry.cluster_size_bytes();
            let mapping = self.mapping(GuestOffset(guest)).await?;
            if !is_empty(&mapping) {
                clusters.push(mapping);
            }
        }
        let _one = self
            .l1_entries
            .acquire(index..index + 1, Mode::Exclusive)
            .await;
        let entry = self.l1.get(index);
        let table = entry
            .decode(&self.geometry)
            .map_err(|e| bad_format("resize", &e))?;
        let change = self.commits.begin_change(WriteOrder::AfterBarrier);
        let set = self.l1.set(index, L1Entry::UNALLOCATED);
        drop(change);
        debug_assert!(set, "the entry was there");
        self.drop_all(&clusters);
        if let Some(table) = table {
            self.drop_table(table);
        }
        Ok(clusters.len() as u64 + 1)
    }

    /// Notes the clusters of some mappings as dropped, in runs.
    fn drop_all(&self, mappings: &[Mapping]) {
        if self.has_external_data() {
            return;
        }
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let mut run = 0..0;
        for mapping in mappings {
            match (mapping, mapping.host()) {
                (Mapping::Compressed(_), _) => {
                    self.defer_free_replaced(mapping, &Mapping::Unallocated, DropReason::Shrunk);
                }
                (_, Some(host)) if host.bytes() == run.end => run.end += cluster_bytes,
                (_, Some(host)) => {
                    let start = host.bytes();
                    self.drop_run(std::mem::replace(&mut run, start..start + cluster_bytes));
                }
                (_, None) => {}
            }
        }
        self.drop_run(run);
    }

    fn drop_run(&self, bytes: Range<u64>) {
        if bytes.is_empty() {
            return;
        }
        let first = HostOffset(bytes.start).cluster(&self.geometry);
        let count = (bytes.end - bytes.start) / self.geometry.cluster_size_bytes();
        self.unwritten.forget(first.index()..first.index() + count);
        self.commits.defer_free(DroppedRun {
            start: first,
            count,
            reason: DropReason::Shrunk,
            freeable: 0,
        });
    }

    fn drop_table(&self, table: HostOffset) {
        self.forget_slices(table);
        self.commits.defer_free(DroppedRun {
            start: table.cluster(&self.geometry),
            count: 1,
            reason: DropReason::Shrunk,
            freeable: 0,
        });
    }

    /// Cuts the file behind the last cluster that is in use.
    pub(crate) async fn cut_tail(self: &Arc<Self>) -> Result<()> {
        // Nobody allocates, or writes what was allocated, meanwhile: neither by guest
        // ranges nor for compressed data that has no mapping yet.
        let _unpacked = self.compressed_writes.placing.write().await;
        let _all = self
            .guest_ranges
            .acquire(0..u64::MAX, Mode::Exclusive)
            .await;
        match self.allocator.cut_tail().await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.mark_corrupt(error).await),
        }
    }
}

impl Allocator {
    /// Gives back what was counted ahead, and cuts the file behind the last cluster
    /// that is in use. Nobody may allocate, or write to what was allocated, meanwhile.
    ///
    /// # Errors
    /// When the refcounts cannot be read. What could not be cut off is wasted, no more.
    pub(crate) async fn cut_tail(&self) -> Result<()> {
        let file = &self.refcounts.file;
        if !file.capabilities().growable {
            return Ok(());
        }
        self.count_beyond().await?;
        let _held = self.hold_end().await;
        self.empty_reserve().await?;
        self.drop_idle_blocks().await?;
        let clusters = self.refcounts.geometry.clusters_for(file.len_bytes()?);
        let tail = self.state().tail;
        let end = self.last_used_end(clusters.max(tail)).await?;
        if end == 0 {
            let message =
                "no cluster is counted, not even the header's: 'vellum check -r all' first";
            return Err(corrupt("truncate", message));
        }
        let end_bytes = end * self.cluster_bytes();
        if end_bytes < file.len_bytes()? && file.truncate(end_bytes).await.is_ok() {
            self.note_cut(end);
        }
        Ok(())
    }

    /// Forgets everything from cluster `end` on: the file was cut there.
    fn note_cut(&self, end: u64) {
        let mut state = self.state();
        let tail = state.tail.min(end);
        state.tail = tail;
        state
            .length
            .note_truncated(end * self.cluster_bytes(), tail);
        state.free.remove(end..u64::MAX);
        state.scan.shrink(end);
        state.written_beyond.retain(|written| written.start < end);
    }

    /// The number of clusters up to the last of the first `clusters` that is in use.
    async fn last_used_end(&self, mut clusters: u64) -> Result<u64> {
        let refcounts = &self.refcounts;
        let per_block = refcounts.geometry.refcount_block_entries();
        let per_slice = refcounts.entries_per_slice();
        while clusters > 0 {
            let last = clusters - 1;
            let Some(place) = refcounts.place(HostCluster(last))? else {
                clusters = last / per_block * per_block;
                continue;
            };
            match refcounts.last_used(place.key, 0..place.index + 1) {
                None => refcounts.load(place.key).await?,
                Some(Some(used)) => return Ok(last / per_slice * per_slice + used as u64 + 1),
                Some(None) => clusters = last / per_slice * per_slice,
            }
        }
        Ok(0)
    }
}

fn is_empty(mapping: &Mapping) -> bool {
    matches!(
        mapping,
        Mapping::Unallocated
            | Mapping::Subclusters {
                host: None,
                allocated: 0,
                zero: 0,
                ..
            }
    )
}
