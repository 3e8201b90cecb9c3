//! The last step of a write: the mapping changes, and what it replaced is dropped.

use vellum_format::l2::Mapping;
use vellum_format::types::{GuestOffset, HostOffset};
use vellum_io::Result;

use super::PlacedStep;
use crate::qcow2::commit::write_order::{DropReason, DroppedRun, WriteOrder};
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::corrupt;
use crate::qcow2::mapping::lookup::{EntryPlace, Slice};
use crate::qcow2::mapping::packed::is_empty;
use crate::qcow2::write::plan;

impl Image {
    /// Points the mapping at what was written. If that fails on the way, the new clusters
    /// that nothing points at yet are given back.
    pub(crate) async fn link(&self, placed: &PlacedStep, order: WriteOrder) -> Result<()> {
        self.note_unwritten(placed);
        for index in 0..placed.old.len() {
            let linked = self.link_cluster(placed, index, order).await;
            if let Err(error) = linked {
                let unused = placed
                    .allocation
                    .map(|new| new.skip(index as u64, &self.geometry));
                let failed = Err(error);
                self.free_unless(&failed, unused).await;
                return failed;
            }
        }
        Ok(())
    }

    pub(super) async fn link_cluster(
        &self,
        placed: &PlacedStep,
        index: usize,
        order: WriteOrder,
    ) -> Result<()> {
        let old = &placed.old[index];
        let inside = index as u64 * self.geometry.cluster_size_bytes();
        let guest = self.geometry.cluster_start(placed.start) + inside;
        let host = HostOffset(placed.host.bytes() + inside);
        let (start, end) = (placed.fill_start, placed.fill_end);
        let bits = plan::touched_bits(&self.geometry, guest, start, end);
        let new = plan::written(&self.geometry, old, host, bits);
        if new != *old {
            self.set_mapping(GuestOffset(guest), new, order).await?;
            self.defer_free_replaced(old, &new, DropReason::Replaced);
        }
        Ok(())
    }

    /// Changes the mapping of the cluster at `guest`; its L2 table exists.
    pub(crate) async fn set_mapping(
        &self,
        guest: GuestOffset,
        mapping: Mapping,
        order: WriteOrder,
    ) -> Result<()> {
        let entry = mapping.encode(&self.geometry);
        let place = self.mapper().place(guest)?;
        let EntryPlace { slice, index } =
            place.ok_or_else(|| corrupt("write", "the L2 table has gone"))?;
        loop {
            self.have_room_for_slice(slice).await?;
            let change = self.commits.begin_change(order);
            let set = self
                .l2
                .update(slice.key, |slice| entry.write(slice, index, &self.geometry));
            drop(change);
            match set {
                Some(true) => return Ok(()),
                Some(false) => return Err(corrupt("write", "L2 entry outside its slice")),
                None => self.load_slice(slice).await?,
            }
        }
    }

    /// Has the host set room aside for a slice that is about to change, if it may be a hole.
    async fn have_room_for_slice(&self, slice: Slice) -> Result<()> {
        let room = &self.mapping_room;
        if room.is_there(slice.key) || !self.l2.is_clean_and(slice.key, |slice| is_empty(&slice)) {
            return Ok(());
        }
        room.set_aside(&self.file, slice.key).await
    }

    /// Notes the clusters that `old` used and `new` does not. Call it after the
    /// mapping has changed.
    pub(crate) fn defer_free_replaced(&self, old: &Mapping, new: &Mapping, reason: DropReason) {
        if self.has_external_data() {
            return;
        }
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let (start, end) = match old {
            Mapping::Compressed(descriptor) => {
                (descriptor.host_offset.bytes(), descriptor.end().bytes())
            }
            _ => match old.host() {
                Some(host) if new.host() != Some(host) => {
                    (host.bytes(), host.bytes() + cluster_bytes)
                }
                _ => return,
            },
        };
        let first = HostOffset(start).cluster(&self.geometry);
        let count = end.div_ceil(cluster_bytes) - first.index();
        let freeable = self.clusters_freed_by(old, count);
        self.unwritten.forget(first.index()..first.index() + count);
        self.allocator.note_pending_frees(freeable as i64);
        self.commits.defer_free(DroppedRun {
            start: first,
            count,
            reason,
            freeable,
        });
    }

    /// How many clusters become free when `old` is dropped, which touches `count`: none that a
    /// snapshot shares. Of compressed data that shares its clusters the last piece frees them.
    fn clusters_freed_by(&self, old: &Mapping, count: u64) -> u64 {
        match old {
            Mapping::Compressed(_) => count.saturating_sub(1),
            _ if old.copied() => count,
            _ => 0,
        }
    }
}
