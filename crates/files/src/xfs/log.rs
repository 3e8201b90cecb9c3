//! Whether the log holds what is not in its place: it does, unless its last record is that of an
//! unmount.
//!
//! ```text
//! record: 0 fe ed ba be   4 cycle   8 version   12 bytes behind its head   40 operations
//!         320 most bytes of a record of this log
//! first operation, behind the head: 9 flags (20: unmounted)
//! ```
//!
//! The log is a ring of sectors. The first word of each is the number of the round in which it
//! was written (in a head: the second word), so the end is where that becomes smaller.

use super::Xfs;
use crate::bytes::{be32, has, u8_at};
use crate::error::Result;

const SECTOR_BYTES: u64 = 512;
const MARK: &[u8] = b"\xfe\xed\xba\xbe";
/// So far behind the end is the head of the last record: the longest record, and its head.
const RECORD_SECTORS_MAX: u64 = 520;
/// A head has room for so many bytes of a record; longer ones have several.
const HEAD_COVERS_BYTES: u32 = 32 << 10;
const UNMOUNTED: u8 = 0x20;

struct Log<'a> {
    xfs: &'a Xfs,
    start_bytes: u64,
    sectors: u64,
}

impl Log<'_> {
    fn sector(&self, number: u64) -> Result<Vec<u8>> {
        let at = self.start_bytes + number % self.sectors * SECTOR_BYTES;
        self.xfs.source.bytes(at, SECTOR_BYTES as usize)
    }

    /// The round in which a sector was written.
    fn round(&self, number: u64) -> Result<u32> {
        let sector = self.sector(number)?;
        Ok(match has(&sector, 0, MARK) {
            true => be32(&sector, 4),
            false => be32(&sector, 0),
        })
    }

    /// The first sector that is older than the one at the start; 0 if there is none.
    fn end(&self) -> Result<u64> {
        let first = self.round(0)?;
        if self.round(self.sectors - 1)? == first {
            return Ok(0);
        }
        let (mut low, mut high) = (0, self.sectors - 1);
        while low + 1 < high {
            let middle = low.midpoint(high);
            match self.round(middle)? == first {
                true => low = middle,
                false => high = middle,
            }
        }
        Ok(high)
    }
}

/// Whether it was unmounted.
pub(super) fn is_clean(xfs: &Xfs) -> Result<bool> {
    let superblock = &xfs.superblock;
    let len_bytes = u64::from(superblock.log_blocks) * superblock.block_bytes as u64;
    let place = superblock.block_place(superblock.log_block);
    let Some(start_bytes) = place.filter(|_| len_bytes > 0) else {
        return Ok(false);
    };
    let log = Log {
        xfs,
        start_bytes,
        sectors: len_bytes / SECTOR_BYTES,
    };
    let end = log.end()?;
    for back in 1..=RECORD_SECTORS_MAX.min(log.sectors) {
        let head_at = (end + log.sectors - back) % log.sectors;
        let head = log.sector(head_at)?;
        if !has(&head, 0, MARK) {
            continue;
        }
        let most = be32(&head, 320);
        let heads = match be32(&head, 8) & 2 != 0 && most > HEAD_COVERS_BYTES {
            true => most.div_ceil(HEAD_COVERS_BYTES),
            false => 1,
        };
        let body_sectors = u64::from(be32(&head, 12)).div_ceil(SECTOR_BYTES);
        let first_at = head_at + u64::from(heads);
        let is_last = (first_at + body_sectors) % log.sectors == end;
        let is_one = be32(&head, 40) == 1;
        let flags = u8_at(&log.sector(first_at)?, 9);
        return Ok(is_last && is_one && flags & UNMOUNTED != 0);
    }
    Ok(false)
}
