//! Guest clusters in new places.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::l2::Mapping;
use vellum_format::types::{GuestOffset, HostCluster, HostOffset};
use vellum_io::buffer::is_zero;
use vellum_io::range_lock::Mode;
use vellum_io::{Buffers, Result};
use vellum_storage::{BlockStatus, WriteFlags, ZeroFlags};

use crate::qcow2::alloc::allocator::Allocation;
use crate::qcow2::commit::write_order::{DropReason, WriteOrder};
use crate::qcow2::image::Image;

impl Image {
    /// Moves those of some guest clusters below the limit that lie above it. Tells how many bytes
    /// these are; `None`: there is no room for all of them.
    pub(super) async fn move_data(
        self: &Arc<Self>,
        start: GuestOffset,
        end: u64,
        limit: HostCluster,
    ) -> Result<Option<u64>> {
        let start = start.bytes();
        let _exclusive = self.guest_ranges.acquire(start..end, Mode::Exclusive).await;
        let Some(end) = self.end_inside(start, end) else {
            return Ok(Some(0));
        };
        if self.mapper().owned_table(GuestOffset(start))?.is_none() {
            // A snapshot has been taken meanwhile.
            return Ok(Some(0));
        }
        self.write_back_locked_range(start..end).await?;
        let mappings = self.mappings(start, end).await?;
        let mut moved_bytes = 0;
        let cluster = self.geometry.cluster_size_bytes();
        for run in runs_above(&mappings, |mapping| {
            self.is_above(mapping, limit) == Some(false)
        }) {
            let mut at = run.start;
            while at < run.end {
                let want = (run.end - at) as u64;
                self.begin_allocation().await?;
                let Some(new) = self.allocator.allocate_below(limit, want).await? else {
                    return Ok(None);
                };
                let next = at + new.clusters as usize;
                let guest = start + at as u64 * cluster;
                self.move_run(guest, &mappings[at..next], new).await?;
                moved_bytes += new.clusters * cluster;
                at = next;
            }
        }
        self.relieve_l2_cache().await?;
        Ok(Some(moved_bytes))
    }

    /// The end of a guest range that is held, or of the disk, which may have become smaller; `None`:
    /// it begins behind that.
    pub(super) fn end_inside(&self, start: u64, end: u64) -> Option<u64> {
        let end = end.min(self.size_bytes());
        (start < end).then_some(end)
    }

    /// Moves clusters side by side to new ones. The caller holds them.
    async fn move_run(
        self: &Arc<Self>,
        guest: u64,
        old: &[Mapping],
        new: Allocation,
    ) -> Result<()> {
        let cluster = self.geometry.cluster_size_bytes();
        let first = new.start.cluster(&self.geometry).index();
        self.unwritten.forget(first..first + new.clusters);
        // Rule 1: the data comes before the link.
        let copied = self.copy_data(guest, old, new.start).await;
        self.free_unless(&copied, Some(new)).await;
        copied?;
        for (index, old) in (0..).zip(old) {
            let inside = index * cluster;
            let moved = at_place(old, HostOffset(new.start.bytes() + inside));
            let linked = self
                .set_mapping(GuestOffset(guest + inside), moved, WriteOrder::AfterBarrier)
                .await;
            self.free_unless(&linked, Some(new.skip(index, &self.geometry)))
                .await;
            linked?;
            self.defer_free_replaced(old, &moved, DropReason::Replaced);
        }
        Ok(())
    }

    async fn copy_data(
        self: &Arc<Self>,
        guest: u64,
        old: &[Mapping],
        to: HostOffset,
    ) -> Result<()> {
        let cluster = self.geometry.cluster_size_bytes();
        for part in data_in(old, cluster, self.geometry.subcluster_size_bytes()) {
            let len_bytes = part.end - part.start;
            let bytes = self.read_old(guest + part.start, len_bytes).await?;
            let host = to.bytes() + part.start;
            if !self.is_encrypted() && is_zero(&bytes) {
                self.keep_holes(host..host + len_bytes).await?;
                continue;
            }
            let buffers = Buffers::from_iter([bytes]);
            self.write_data(guest + part.start, host, buffers, WriteFlags::default())
                .await?;
        }
        Ok(())
    }

    /// Has a range of new clusters read as zeroes; holes in it stay holes, or the file would take more
    /// room than before.
    async fn keep_holes(&self, host: Range<u64>) -> Result<()> {
        let mut at = host.start;
        while at < host.end {
            let extent = self.data.block_status(at, host.end - at).await?;
            let len_bytes = extent.len_bytes.clamp(1, host.end - at);
            if !matches!(extent.status, BlockStatus::Hole | BlockStatus::Zeroes) {
                let flags = ZeroFlags {
                    may_unmap: true,
                    ..ZeroFlags::default()
                };
                self.data.write_zeroes(at, len_bytes, flags).await?;
            }
            at += len_bytes;
        }
        Ok(())
    }
}

/// The runs of mappings for which `moves` holds.
fn runs_above(mappings: &[Mapping], moves: impl Fn(&Mapping) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (index, _) in mappings.iter().enumerate().filter(|(_, m)| moves(m)) {
        match runs.last_mut() {
            Some(run) if run.end == index => run.end += 1,
            _ => runs.push(index..index + 1),
        }
    }
    runs
}

/// A mapping with its data in another place.
pub(super) fn at_place(mapping: &Mapping, host: HostOffset) -> Mapping {
    match *mapping {
        Mapping::Zero { copied, .. } => Mapping::Zero {
            host: Some(host),
            copied,
        },
        Mapping::Subclusters {
            copied,
            allocated,
            zero,
            ..
        } => Mapping::Subclusters {
            host: Some(host),
            copied,
            allocated,
            zero,
        },
        _ => Mapping::Data {
            host,
            copied: mapping.copied(),
        },
    }
}

/// Where there is data in clusters side by side, in bytes from the first one's start: ranges as
/// long as possible.
fn data_in(mappings: &[Mapping], cluster_bytes: u64, subcluster_bytes: u64) -> Vec<Range<u64>> {
    let mut parts: Vec<Range<u64>> = Vec::new();
    let mut add = |part: Range<u64>| match parts.last_mut() {
        Some(last) if last.end == part.start => last.end = part.end,
        _ => parts.push(part),
    };
    for (start, mapping) in (0..).step_by(cluster_bytes as usize).zip(mappings) {
        match mapping {
            Mapping::Data { .. } => add(start..start + cluster_bytes),
            Mapping::Subclusters { allocated, .. } => {
                for bit in (0..32).filter(|bit| allocated >> bit & 1 == 1) {
                    let at = start + bit * subcluster_bytes;
                    add(at..at + subcluster_bytes);
                }
            }
            _ => {}
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: HostOffset = HostOffset(0x10_0000);

    fn subclusters(allocated: u32) -> Mapping {
        Mapping::Subclusters {
            host: Some(PLACE),
            copied: true,
            allocated,
            zero: 0,
        }
    }

    fn data() -> Mapping {
        Mapping::Data {
            host: PLACE,
            copied: true,
        }
    }

    #[test]
    fn only_data_is_copied_in_long_ranges() {
        let zero = Mapping::Zero {
            host: Some(PLACE),
            copied: true,
        };
        assert_eq!(
            data_in(&[data(), data(), zero, data()], 64, 2),
            [0..128, 192..256]
        );
        let parts = data_in(
            &[subclusters(0b110), subclusters(1 << 31), subclusters(1)],
            64,
            2,
        );
        assert_eq!(parts, [2..6, 126..130]);
    }

    #[test]
    fn nothing_but_the_place_changes() {
        for old in [data(), subclusters(7)] {
            let moved = at_place(&old, HostOffset(0x20_0000));
            assert_eq!(moved.host(), Some(HostOffset(0x20_0000)));
            assert_eq!(at_place(&moved, PLACE), old);
        }
    }

    #[test]
    fn runs_end_where_something_stays() {
        let mappings = [data(), data(), Mapping::Unallocated, data()];
        let runs = runs_above(&mappings, |mapping| mapping.host().is_some());
        assert_eq!(runs, [0..2, 3..4]);
    }
}
