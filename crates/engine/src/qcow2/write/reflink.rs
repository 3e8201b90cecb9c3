//! Copy-on-write without copying: on a file system that shares blocks, a new cluster
//! takes the old content of a long range by sharing the blocks that hold it.
//!
//! Invariants:
//! - Blocks are shared before anything points at the new place, while the caller holds
//!   the guest range exclusive: what they belonged to cannot be reused meanwhile.
//! - Only whole blocks are shared. A block that the guest writes a part of is copied and
//!   written with its bytes.
//! - Sharing is never needed: whatever is in its way, the range is copied.

use std::ops::Range;

use vellum_format::types::GuestOffset;
use vellum_io::{ErrorKind, Result};

use super::data::PlacedStep;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::RunKind;
use crate::qcow2::read::chain::Located;

/// The largest block of the file systems that share them (XFS, btrfs).
const BLOCK_BYTES: u64 = 4096;
/// What is shorter is copied: sharing costs the file system a transaction.
pub(super) const MIN_SHARED_BYTES: u64 = 256 << 10;

impl Image {
    /// Has the blocks inside a part of a step's fill share what they show now. Gives
    /// the part that is still to be copied: all of it, or what the guest's bytes share
    /// a block with.
    pub(crate) async fn share(&self, placed: &PlacedStep, guest: Range<u64>) -> Result<Range<u64>> {
        let blocks = whole_blocks(&guest);
        let inside = blocks.start - self.geometry.cluster_start(placed.start);
        let host = placed.host.bytes() + inside;
        let _reading = self.read_epochs.enter();
        let Some(parts) = self.sharable(&blocks, host).await? else {
            return Ok(guest);
        };
        let mut at = host;
        for part in parts {
            let from = &*part.storage;
            let shared = self
                .data
                .clone_range(from, part.offset_bytes, at, part.len_bytes);
            match shared.await {
                Ok(()) => at += part.len_bytes,
                Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(guest),
                Err(error) => return Err(error),
            }
        }
        Ok(match blocks.start == guest.start {
            true => blocks.end..guest.end,
            false => guest.start..blocks.start,
        })
    }

    /// Whether [`Image::share`] is going to share a part of what a step fills.
    pub(crate) async fn shares_fill(&self, placed: &PlacedStep) -> Result<bool> {
        let cluster_start = self.geometry.cluster_start(placed.start);
        let _reading = self.read_epochs.enter();
        for fill in [placed.fill_start..placed.start, placed.end..placed.fill_end] {
            let blocks = whole_blocks(&fill);
            let host = placed.host.bytes() + (blocks.start - cluster_start);
            if self.sharable(&blocks, host).await?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Where the content of a guest range lies, if the file system may let `host` share
    /// all of it.
    async fn sharable(&self, guest: &Range<u64>, host: u64) -> Result<Option<Vec<Located>>> {
        let is_long = guest.end.saturating_sub(guest.start) >= MIN_SHARED_BYTES;
        if !is_long
            || !self.reads_as_stored()
            || guest.end > self.size_bytes()
            || !host.is_multiple_of(BLOCK_BYTES)
        {
            return Ok(None);
        }
        let mut parts = Vec::new();
        let mut at = guest.start;
        while at < guest.end {
            let Some(mut part) = self.locate(at, guest.end - at).await? else {
                return Ok(None);
            };
            part.len_bytes = part.len_bytes.min(guest.end - at);
            let in_blocks = (part.offset_bytes | part.len_bytes).is_multiple_of(BLOCK_BYTES);
            if !in_blocks || !self.data.may_clone_from(&*part.storage) {
                return Ok(None);
            }
            at += part.len_bytes;
            parts.push(part);
        }
        Ok(Some(parts))
    }

    /// Where the first of a range's bytes lie as the guest sees them, if they do.
    async fn locate(&self, guest: u64, len_bytes: u64) -> Result<Option<Located>> {
        let run = self.view(GuestOffset(guest), len_bytes).await?[0];
        match run.kind {
            RunKind::Data { host, .. } => Ok(Some(Located {
                storage: self.data.clone(),
                offset_bytes: host.bytes(),
                len_bytes: run.len_bytes,
            })),
            RunKind::Unallocated { .. } => self.backing_chain.locate(guest, run.len_bytes).await,
            _ => Ok(None),
        }
    }
}

/// The whole blocks of a range; empty if only parts of blocks are in it, or neither end
/// is a block's (one of them is the end of a cluster).
fn whole_blocks(range: &Range<u64>) -> Range<u64> {
    let start = range.start.next_multiple_of(BLOCK_BYTES);
    let end = range.end / BLOCK_BYTES * BLOCK_BYTES;
    if start != range.start && end != range.end {
        return start..start;
    }
    start..end.max(start)
}

#[cfg(test)]
mod tests {
    use super::whole_blocks;

    #[test]
    fn the_block_of_the_guest_is_left_out() {
        assert_eq!(whole_blocks(&(0..10_000)), 0..8192);
        assert_eq!(whole_blocks(&(10_000..20_480)), 12_288..20_480);
        assert_eq!(whole_blocks(&(4096..8192)), 4096..8192);
        for nothing in [0..0, 0..4095, 5000..8191, 5000..20_000] {
            assert!(whole_blocks(&nothing).is_empty(), "{nothing:?}");
        }
    }
}
