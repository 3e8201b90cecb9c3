//! Write-zeroes and discard: changes of the mapping without data.
//!
//! What becomes of each kind of cluster follows QEMU, since tools compare the
//! resulting maps. A request is cut into an unaligned head, an aligned middle and
//! an unaligned tail; what the mapping cannot express is written as zero bytes.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::l2::Mapping;
use vellum_format::types::GuestOffset;
use vellum_io::{Buffer, Error, Result};
use vellum_storage::ZeroFlags;

use super::plan::touched_bits;
use crate::ZeroRequest;
use crate::qcow2::commit::room::RoomSearch;
use crate::qcow2::commit::write_order::{DropReason, WriteOrder};
use crate::qcow2::image::Image;
use vellum_io::range_lock::Mode;

/// Zero bytes written at a time where the mapping cannot say "zero".
const MAX_WRITTEN_ZEROES_BYTES: u64 = 16 << 20;
/// Length of one such write.
const ZERO_WRITE_BYTES: u64 = 1 << 20;

/// Whether the mapping could express what was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    Impossible,
}

impl Image {
    /// Makes a range read as zeroes; the range was checked.
    pub(crate) async fn zero(
        self: &Arc<Self>,
        offset_bytes: u64,
        len_bytes: u64,
        request: ZeroRequest,
    ) -> Result<()> {
        self.begin_change("write zeroes").await?;
        let may_unmap = request.may_unmap && self.discards.enabled;
        for piece in pieces(
            offset_bytes,
            len_bytes,
            self.geometry.subcluster_size_bytes(),
        ) {
            self.zero_piece_with_room(piece, may_unmap, request.no_fallback)
                .await?;
        }
        if request.fua {
            // Zeroes that had to be written may be in the write buffer.
            self.write_back_range(offset_bytes..offset_bytes + len_bytes)
                .await?;
            self.commit().await?;
        }
        Ok(())
    }

    async fn zero_piece_with_room(
        self: &Arc<Self>,
        piece: Range<u64>,
        may_unmap: bool,
        no_fallback: bool,
    ) -> Result<()> {
        let mut search = RoomSearch::default();
        loop {
            let zeroed = self.zero_piece(piece.clone(), may_unmap, no_fallback).await;
            match zeroed {
                Err(error) if self.make_room(&mut search, &error).await => {}
                done => return done,
            }
        }
    }

    async fn zero_piece(
        self: &Arc<Self>,
        mut piece: Range<u64>,
        may_unmap: bool,
        no_fallback: bool,
    ) -> Result<()> {
        while !piece.is_empty() {
            let zeroed = self.zero_mapping(piece.clone(), may_unmap, no_fallback);
            if zeroed.await? == Outcome::Done {
                return Ok(());
            }
            if no_fallback {
                return Err(Error::from_errno("write zeroes", 95).target(self.name.clone()));
            }
            let stop = piece.end.min(piece.start + MAX_WRITTEN_ZEROES_BYTES);
            self.write_zero_bytes(piece.start..stop).await?;
            piece.start = stop;
        }
        Ok(())
    }

    /// Whether a raw data file, which is zeroed too, can take the piece without
    /// reading and writing what lies around it.
    fn data_file_takes_whole(&self, piece: &Range<u64>) -> bool {
        let unit = u64::from(self.data.capabilities().request_alignment_bytes);
        !self.data_is_raw() || (piece.start.is_multiple_of(unit) && piece.end.is_multiple_of(unit))
    }

    pub(crate) async fn write_zero_bytes(self: &Arc<Self>, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let len_bytes = (range.end - at).min(ZERO_WRITE_BYTES);
            let zeroes = Buffer::zeroed(len_bytes as usize);
            self.write_at_once(at, zeroes).await?;
            at += len_bytes;
        }
        Ok(())
    }

    /// Zeroes a range by the mapping alone, if that is possible.
    async fn zero_mapping(
        self: &Arc<Self>,
        range: Range<u64>,
        may_unmap: bool,
        no_fallback: bool,
    ) -> Result<Outcome> {
        let _exclusive = self.begin_mapping_change(range.clone()).await?;
        let replaced = range.clone();
        let outcome = self.zero_held(range, may_unmap, no_fallback).await?;
        if outcome == Outcome::Done {
            self.discard_replaced(&replaced);
        }
        Ok(outcome)
    }

    /// Zeroes a range by the mapping alone; the caller holds it.
    pub(super) async fn zero_held(
        self: &Arc<Self>,
        range: Range<u64>,
        may_unmap: bool,
        no_fallback: bool,
    ) -> Result<Outcome> {
        let Some(range) = self.whole_subclusters(range).await? else {
            return Ok(Outcome::Impossible);
        };
        if no_fallback && !self.data_file_takes_whole(&range) {
            return Ok(Outcome::Impossible);
        }
        if self.geometry.version < 3 {
            // It promises nothing without a fallback, though it could where nothing lies behind.
            if no_fallback || self.backing.is_some() {
                return Ok(Outcome::Impossible);
            }
            self.discard_clusters(range).await?;
            return Ok(Outcome::Done);
        }
        if self.data_is_raw() {
            let flags = ZeroFlags {
                may_unmap,
                ..ZeroFlags::default()
            };
            let end = range.end.min(self.size_bytes());
            self.zero_raw_data(range.start..end, flags).await?;
        }
        self.zero_clusters(range, may_unmap).await
    }

    /// Widens a range to whole subclusters, if what that adds and touches reads
    /// as zeroes already and holds no data.
    async fn whole_subclusters(&self, range: Range<u64>) -> Result<Option<Range<u64>>> {
        let size = self.geometry.subcluster_size_bytes();
        let starts_whole = range.start.is_multiple_of(size);
        let ends_whole = range.end.is_multiple_of(size) || range.end == self.size_bytes();
        if starts_whole && ends_whole {
            return Ok(Some(range));
        }
        let whole = range.start / size * size..range.end.div_ceil(size) * size;
        let before = self.chain_reads_as_zeroes(whole.start..range.start).await?;
        let after = before && self.chain_reads_as_zeroes(range.end..whole.end).await?;
        let touched = GuestOffset(whole.start);
        Ok((after && !self.holds_data(touched).await?).then_some(whole))
    }

    async fn holds_data(&self, guest: GuestOffset) -> Result<bool> {
        use crate::qcow2::mapping::lookup::RunKind::{Compressed, Data};
        Ok(matches!(
            self.view(guest, 1).await?[0].kind,
            Data { .. } | Compressed(_)
        ))
    }

    async fn chain_reads_as_zeroes(&self, range: Range<u64>) -> Result<bool> {
        let end = range.end.min(self.size_bytes());
        let mut at = range.start;
        while at < end {
            let extent = self.status(at, end - at, u32::MAX).await?;
            if !extent.kind.is_zero() {
                return Ok(false);
            }
            at += extent.len_bytes;
        }
        Ok(true)
    }

    async fn zero_clusters(self: &Arc<Self>, range: Range<u64>, unmap: bool) -> Result<Outcome> {
        let cluster = self.geometry.cluster_size_bytes();
        let mut at = range.start;
        while at < range.end {
            let start = self.geometry.cluster_start(at);
            let stop = range.end.min(start + cluster);
            let whole = at == start && (stop == start + cluster || stop >= self.size_bytes());
            self.ensure_l2_table(GuestOffset(start)).await?;
            let old = self.mapping(GuestOffset(start)).await?;
            let new = if whole {
                Some(self.zeroed_cluster(&old, unmap))
            } else {
                zeroed_subclusters(&old, touched_bits(&self.geometry, start, at, stop))
            };
            let Some(new) = new else {
                return Ok(Outcome::Impossible);
            };
            self.change_cluster(start, &old, new).await?;
            if whole && unmap {
                self.punch_kept(start, &old, &new).await;
            }
            at = stop;
        }
        Ok(Outcome::Done)
    }

    /// A whole cluster's mapping after its bytes became zero.
    fn zeroed_cluster(&self, old: &Mapping, unmap: bool) -> Mapping {
        let keep = !unmap || self.discards.keep_references;
        let host = old.host().filter(|_| keep);
        let copied = old.copied() && host.is_some();
        if self.geometry.extended_l2 {
            return Mapping::Subclusters {
                host,
                copied,
                allocated: 0,
                zero: u32::MAX,
            };
        }
        Mapping::Zero { host, copied }
    }

    /// Gives up the clusters that lie wholly in a range; the range was checked.
    pub(crate) async fn discard(self: &Arc<Self>, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        self.begin_change("discard").await?;
        if !self.discards.enabled || (self.geometry.version < 3 && self.backing.is_some()) {
            return Ok(());
        }
        let cluster = self.geometry.cluster_size_bytes();
        let end = offset_bytes + len_bytes;
        let asked = offset_bytes..end;
        let start = offset_bytes.div_ceil(cluster) * cluster;
        let end = if end == self.size_bytes() {
            end
        } else {
            self.geometry.cluster_start(end)
        };
        if start >= end {
            // As in QEMU all of a discard is dirty, also what it leaves alone.
            return self.mark_dirty(asked).await;
        }
        let mut search = RoomSearch::default();
        loop {
            let discarded = self.discard_whole(asked.clone(), start..end).await;
            match discarded {
                Err(error) if self.make_room(&mut search, &error).await => {}
                done => return done,
            }
        }
    }

    /// Discards the whole clusters of a range that was asked for.
    async fn discard_whole(
        self: &Arc<Self>,
        asked: Range<u64>,
        clusters: Range<u64>,
    ) -> Result<()> {
        let _exclusive = self.lock_clusters(asked.clone(), Mode::Exclusive).await?;
        self.mark_dirty(asked).await?;
        self.write_back_beside(clusters.clone()).await?;
        self.discard_clusters(clusters.clone()).await?;
        self.discard_replaced(&clusters);
        Ok(())
    }

    /// Discards clusters; the caller holds them.
    async fn discard_clusters(self: &Arc<Self>, range: Range<u64>) -> Result<()> {
        let cluster = self.geometry.cluster_size_bytes();
        let mut at = range.start;
        while at < range.end {
            let guest = GuestOffset(at);
            if self.backing.is_none() && self.mapper().place(guest)?.is_none() {
                let table_bytes = self.geometry.bytes_per_l2_table();
                at = (at / table_bytes + 1).saturating_mul(table_bytes);
                continue;
            }
            let old = self.mapping(guest).await?;
            if let Some(new) = self.discarded_cluster(&old) {
                self.ensure_l2_table(guest).await?;
                self.change_cluster(at, &old, new).await?;
                self.punch_kept(at, &old, &new).await;
            }
            at += cluster;
        }
        Ok(())
    }

    /// A cluster's mapping after a discard; `None`: it stays as it is.
    fn discarded_cluster(&self, old: &Mapping) -> Option<Mapping> {
        let nothing_here = match old {
            Mapping::Unallocated | Mapping::Subclusters { host: None, .. } => true,
            Mapping::Zero { host, .. } => host.is_none(),
            _ => false,
        };
        if self.geometry.version < 3 {
            return (!nothing_here).then_some(Mapping::Unallocated);
        }
        if nothing_here && self.backing.is_none() {
            return None;
        }
        Some(self.zeroed_cluster(old, true))
    }

    /// Gives the space of a cluster back that stays allocated (`discard-no-unref`);
    /// the caller holds it. Before its mapping is durable it may read as zeroes or
    /// as what it was, as after any discard; a cluster that others share is kept.
    async fn punch_kept(&self, start: u64, old: &Mapping, new: &Mapping) {
        let kept = old.host().filter(|&host| new.host() == Some(host));
        let Some(host) = kept.filter(|_| old.copied()) else {
            return;
        };
        if !self.discards.keep_references || !self.passes_discard(DropReason::Discarded) {
            return;
        }
        let mut len_bytes = self.geometry.cluster_size_bytes();
        if self.has_external_data() {
            len_bytes = len_bytes.min(self.size_bytes() - start);
        }
        self.hint_discard(host.bytes(), len_bytes).await;
    }

    /// Gives space of the data file back before the mapping that no longer leads there is durable, and
    /// while some may still read there: until then it reads as what it was, or as zeroes. A hint, like every
    /// discard.
    async fn hint_discard(&self, host_bytes: u64, len_bytes: u64) {
        // Zeroes that are decrypted are neither.
        if self.reads_as_stored() {
            drop(self.data.discard(host_bytes, len_bytes).await);
        }
    }

    /// Puts a mapping without data in the place of `old`.
    async fn change_cluster(
        self: &Arc<Self>,
        start: u64,
        old: &Mapping,
        new: Mapping,
    ) -> Result<()> {
        if new == *old {
            return Ok(());
        }
        self.set_mapping(GuestOffset(start), new, WriteOrder::AfterBarrier)
            .await?;
        self.defer_free_replaced(old, &new, DropReason::Discarded);
        if self.has_external_data() && old.host().is_some() && new.host().is_none() {
            let len_bytes = self
                .geometry
                .cluster_size_bytes()
                .min(self.size_bytes() - start);
            self.hint_discard(start, len_bytes).await;
        }
        self.relieve_l2_cache().await
    }
}

/// Cuts a range into an unaligned head, an aligned middle and an unaligned tail.
fn pieces(offset_bytes: u64, len_bytes: u64, alignment: u64) -> impl Iterator<Item = Range<u64>> {
    let end = offset_bytes + len_bytes;
    let head_end = offset_bytes.next_multiple_of(alignment).min(end);
    let tail_start = (end / alignment * alignment).max(head_end);
    [
        offset_bytes..head_end,
        head_end..tail_start,
        tail_start..end,
    ]
    .into_iter()
    .filter(|piece| !piece.is_empty())
}

/// A cluster's mapping after some of its subclusters became zero; `None` where
/// it has no subclusters.
fn zeroed_subclusters(old: &Mapping, bits: u32) -> Option<Mapping> {
    match *old {
        Mapping::Unallocated => Some(Mapping::Subclusters {
            host: None,
            copied: false,
            allocated: 0,
            zero: bits,
        }),
        Mapping::Subclusters {
            host,
            copied,
            allocated,
            zero,
        } => Some(Mapping::Subclusters {
            host,
            copied,
            allocated: allocated & !bits,
            zero: zero | bits,
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_cut_at_the_alignment() {
        let cut = |offset, len| pieces(offset, len, 100).collect::<Vec<_>>();
        assert_eq!(cut(0, 200), [0..200]);
        assert_eq!(cut(50, 200), [50..100, 100..200, 200..250]);
        assert_eq!(cut(110, 50), [110..160]);
        assert_eq!(cut(150, 50), [150..200]);
        assert_eq!(cut(200, 50), [200..250]);
    }
}
