//! Which pieces of a disk are sent: [`Walk`].

use std::ops::Range;
use std::sync::Arc;

use vellum::{BlockDevice, Result};
use vellum_format::stream::{MAX_DATA_BYTES, SECTOR_BYTES};

/// A piece of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
    /// Only reading it tells what it holds; otherwise it reads as zeroes. Pieces of data are at
    /// most [`MAX_DATA_BYTES`] long, and end with multiples of that.
    pub(super) is_data: bool,
}

/// Goes over ranges of a disk, in their order.
pub(super) struct Walk<I> {
    source: Arc<dyn BlockDevice>,
    ranges: I,
    /// What is left of the range it is in.
    range: Range<u64>,
    /// What was found last: whether it is data, and where that ends.
    known: (bool, u64),
    start_bytes: u64,
}

impl<I: Iterator<Item = Range<u64>>> Walk<I> {
    pub(super) fn new(source: &Arc<dyn BlockDevice>, ranges: I, start_bytes: u64) -> Walk<I> {
        Walk {
            source: source.clone(),
            ranges,
            range: 0..0,
            known: (false, 0),
            start_bytes,
        }
    }

    /// Up to where everything has been told.
    pub(super) fn position_bytes(&self) -> u64 {
        self.range.start.max(self.start_bytes)
    }

    /// The next piece; neighbours of one kind are one piece, wherever they lie.
    pub(super) async fn next(&mut self) -> Result<Option<Piece>> {
        while self.range.is_empty() {
            let Some(range) = self.ranges.next() else {
                return Ok(None);
            };
            let end = range.end.min(self.source.size_bytes());
            self.range = range.start.max(self.start_bytes)..end;
        }
        let start = self.range.start;
        let (is_data, mut end) = self.look(start).await?;
        let limit = match is_data {
            true => (start / u64::from(MAX_DATA_BYTES) + 1) * u64::from(MAX_DATA_BYTES),
            false => u64::MAX,
        };
        let limit = limit.min(self.range.end);
        while end < limit {
            let (next_is_data, next_end) = self.look(end).await?;
            if next_is_data != is_data {
                break;
            }
            end = next_end;
        }
        let end = end.min(limit);
        self.range.start = end;
        Ok(Some(Piece {
            offset_bytes: start,
            len_bytes: end - start,
            is_data,
        }))
    }

    /// What lies at an offset of the range, and up to where.
    async fn look(&mut self, at: u64) -> Result<(bool, u64)> {
        let (is_data, end) = self.known;
        if end > at {
            return Ok((is_data, end));
        }
        let left = self.range.end - at;
        let extent = self.source.block_status(at, left, u32::MAX).await?;
        // Where nothing shows through, it is zeroes.
        let mut is_data = extent.kind.needs_reading();
        let mut len_bytes = extent.len_bytes.clamp(1, left);
        if !len_bytes.is_multiple_of(SECTOR_BYTES) {
            // A file may end inside a sector, of which the rest reads as zeroes.
            is_data |= len_bytes < SECTOR_BYTES;
            len_bytes = match is_data {
                true => len_bytes.next_multiple_of(SECTOR_BYTES).min(left),
                false => len_bytes - len_bytes % SECTOR_BYTES,
            };
        }
        self.known = (is_data, at + len_bytes);
        Ok(self.known)
    }
}
