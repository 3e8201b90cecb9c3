//! What shows through from the backing file becomes the image's own, with the same bytes: copy-on-read,
//! and a stream.
//!
//! Invariant: whether the image holds a cluster is looked up, and what is read from below is linked,
//! under one exclusive hold of it. So a copy never undoes a write, whoever makes that.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::types::GuestOffset;
use vellum_io::Result;
use vellum_io::range_lock::Mode;

use super::plan;
use super::zero::Outcome;
use crate::qcow2::commit::room::RoomSearch;
use crate::qcow2::commit::write_order::WriteOrder;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::RunKind;

/// What is copied at a time, in whole clusters where there is so much.
const MAX_COPY_BYTES: u64 = 1 << 20;

impl Image {
    /// Takes over what the backing file shows of the subclusters around a range; the range was checked.
    pub(crate) async fn copy_up(self: &Arc<Self>, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        self.begin_change("copy up").await?;
        let cluster = self.geometry.cluster_size_bytes();
        let subcluster = self.geometry.subcluster_size_bytes();
        let end = (offset_bytes + len_bytes).next_multiple_of(subcluster);
        let mut at = offset_bytes - offset_bytes % subcluster;
        let mut search = RoomSearch::default();
        loop {
            let end = end.min(self.size_bytes());
            if at >= end {
                return Ok(());
            }
            // No piece ends within a cluster that goes on.
            let piece_end = self.geometry.cluster_start(at) + MAX_COPY_BYTES.max(cluster);
            let stop = end.min(piece_end);
            let clusters = (stop - at).div_ceil(cluster);
            self.free_before_growth(clusters).await;
            match self.copy_first_run(at..stop).await {
                Ok(end) => at = end,
                Err(error) if self.make_room(&mut search, &error).await => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Copies the first of the runs of a range, unless the image holds it. Tells where it ends.
    async fn copy_first_run(self: &Arc<Self>, range: Range<u64>) -> Result<u64> {
        let table_bytes = self.geometry.bytes_per_l2_table();
        let table_end = (range.start / table_bytes + 1).saturating_mul(table_bytes);
        let range = range.start..range.end.min(table_end);
        // The guest's bytes stay as they are, so no bitmap gets to know of it.
        let _exclusive = self.lock_clusters(range.clone(), Mode::Exclusive).await?;
        self.write_back_locked_range(range.clone()).await?;
        let start = range.start;
        let run = self
            .first_run(GuestOffset(start), range.end - start)
            .await?;
        let RunKind::Unallocated { host } = run.kind else {
            return Ok(start + run.len_bytes);
        };
        let shown = self.status_below(&run, host, u32::MAX).await?;
        let range = start..start + shown.len_bytes;
        if shown.kind.is_zero()
            && self.zero_held(range.clone(), false, false).await? == Outcome::Done
        {
            return Ok(range.end);
        }
        let end = self.copy_held(range).await?;
        self.relieve_l2_cache().await?;
        Ok(end)
    }

    /// Copies the first subclusters of a range, which the caller holds. Tells where they end.
    async fn copy_held(self: &Arc<Self>, Range { start, end }: Range<u64>) -> Result<u64> {
        self.ensure_l2_table(GuestOffset(start)).await?;
        let mappings = self.mappings(start, end).await?;
        let step = plan::first_step(&self.geometry, &mappings);
        let after = self.end_of_data_before(self.geometry.cluster_start(start));
        let placed = self.place_step(&step, mappings, start..end, after).await?;
        let written = match self.read_old(start, placed.end - start).await {
            Ok(piece) => self.write_placed(&placed, piece).await.map(drop),
            Err(error) => Err(error),
        };
        self.free_unless(&written, placed.allocation).await;
        written?;
        self.link(&placed, WriteOrder::AfterBarrier).await?;
        Ok(placed.end)
    }
}
