//! Changes of a file that are not durable yet.

use std::ops::Range;
use std::sync::Arc;

use crate::disk_room::BlockUse;
use crate::sparse_bytes::{SECTOR_BYTES, SparseBytes};

/// The bytes that a record carries.
#[derive(Debug, Clone)]
pub enum Payload {
    /// Bytes as they are.
    Bytes(Arc<[u8]>),
    /// This many zeroes.
    Zeroes(u64),
}

impl Payload {
    fn len_bytes(&self) -> u64 {
        match self {
            Payload::Bytes(bytes) => bytes.len() as u64,
            Payload::Zeroes(len_bytes) => *len_bytes,
        }
    }
}

/// One change of one file.
#[derive(Debug, Clone)]
pub struct Record {
    /// The file's number on its disk.
    pub file: usize,
    /// Where the payload goes.
    pub offset_bytes: u64,
    /// What goes there.
    pub payload: Payload,
    /// The file becomes at least this long.
    pub grows_to: Option<u64>,
    /// The file gets this length first.
    pub truncates_to: Option<u64>,
    /// No cut loses it (it was written through).
    pub forced: bool,
    /// The next flush passes it by: see [`crate::disk_bugs`].
    pub late: bool,
    /// What it does to the blocks of the file.
    pub blocks: BlockUse,
}

impl Record {
    /// A write, or zeroes, at an offset.
    pub fn new(file: usize, offset_bytes: u64, payload: Payload, grows: bool) -> Self {
        let end = offset_bytes + payload.len_bytes();
        Record {
            file,
            offset_bytes,
            payload,
            grows_to: grows.then_some(end),
            truncates_to: None,
            forced: false,
            late: false,
            blocks: BlockUse::Allocates(offset_bytes..end),
        }
    }

    /// Zeroes inside of the file, whose blocks are freed.
    pub fn punch(file: usize, range: Range<u64>) -> Self {
        let zeroes = Payload::Zeroes(range.end - range.start);
        Record {
            blocks: BlockUse::Frees(range.clone()),
            ..Record::new(file, range.start, zeroes, false)
        }
    }

    /// A change of length to exactly `len_bytes`.
    pub fn truncate(file: usize, len_bytes: u64) -> Self {
        let nothing = Record::new(file, 0, Payload::Zeroes(0), false);
        Record {
            truncates_to: Some(len_bytes),
            blocks: BlockUse::Frees(len_bytes..u64::MAX),
            ..nothing
        }
    }

    /// The allocation of a range: the file becomes at least as long.
    pub fn allocate(file: usize, range: Range<u64>) -> Self {
        let nothing = Record::new(file, 0, Payload::Zeroes(0), false);
        Record {
            grows_to: Some(range.end),
            blocks: BlockUse::Allocates(range),
            ..nothing
        }
    }

    /// Where the first sector begins.
    pub fn start_bytes(&self) -> u64 {
        self.offset_bytes / SECTOR_BYTES * SECTOR_BYTES
    }

    /// Where the payload ends.
    pub fn end_bytes(&self) -> u64 {
        self.offset_bytes + self.payload.len_bytes()
    }

    /// How many sectors the payload touches.
    pub fn sectors(&self) -> u64 {
        if self.payload.len_bytes() == 0 {
            return 0;
        }
        self.end_bytes().div_ceil(SECTOR_BYTES) - self.offset_bytes / SECTOR_BYTES
    }

    /// The bytes that the record carries, if it is not about zeroes.
    pub fn bytes(&self) -> &[u8] {
        match &self.payload {
            Payload::Bytes(bytes) => bytes,
            Payload::Zeroes(_) => &[],
        }
    }

    /// The record as it takes effect on a file that holds `pages`: widened to whole
    /// sectors, whose other bytes are those of `pages`, for a device never holds part
    /// of a sector; and bringing a length that the file really has by then.
    #[must_use]
    pub fn landed(&self, pages: &SparseBytes) -> Record {
        let (start, end) = (
            self.start_bytes(),
            self.start_bytes() + self.sectors() * SECTOR_BYTES,
        );
        let grows_to = self.grows_to.map(|end| end.max(pages.len_bytes()));
        if start == self.offset_bytes && end == self.end_bytes() || self.sectors() == 0 {
            return Record {
                grows_to,
                ..self.clone()
            };
        }
        let mut bytes = pages.bytes(start, end - start);
        let inside = (self.offset_bytes - start) as usize;
        match &self.payload {
            Payload::Bytes(payload) => {
                bytes[inside..inside + payload.len()].copy_from_slice(payload);
            }
            Payload::Zeroes(len_bytes) => bytes[inside..inside + *len_bytes as usize].fill(0),
        }
        let payload = Payload::Bytes(bytes.into());
        Record {
            offset_bytes: start,
            payload,
            grows_to,
            ..self.clone()
        }
    }

    /// Applies the whole record.
    pub fn apply(&self, pages: &mut SparseBytes) {
        if let Some(len_bytes) = self.truncates_to {
            pages.set_len(len_bytes);
        }
        if let Some(end) = self.grows_to {
            pages.set_len(pages.len_bytes().max(end));
        }
        let end = self.end_bytes().min(pages.len_bytes());
        if self.offset_bytes < end {
            self.copy_to(pages, self.offset_bytes, end - self.offset_bytes);
        }
    }

    /// Copies a range of the payload to its place.
    pub(crate) fn copy_to(&self, pages: &mut SparseBytes, start_bytes: u64, len_bytes: u64) {
        match &self.payload {
            Payload::Zeroes(_) => pages.zero(start_bytes, len_bytes),
            Payload::Bytes(bytes) => {
                let from = (start_bytes - self.offset_bytes) as usize;
                pages.write(start_bytes, &bytes[from..from + len_bytes as usize]);
            }
        }
    }

    /// Whether two records of one file touch a common sector.
    pub(crate) fn overlaps(&self, other: &Record) -> bool {
        self.start_bytes() < other.end_bytes() && other.start_bytes() < self.end_bytes()
    }
}

/// A moment at which the power may fail.
#[derive(Debug, Clone)]
pub struct CutPoint {
    /// What every file holds durably.
    pub durable: Vec<SparseBytes>,
    /// What a reader of every file sees.
    pub volatile: Vec<SparseBytes>,
    /// What is not durable: completed records in the order of completion, then
    /// those in flight.
    pub records: Vec<Record>,
    /// How many of the records are complete.
    pub completed: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_landed_record_keeps_its_neighbours() {
        let mut pages = SparseBytes::new();
        pages.write(0, &[7; 1024]);
        let record = Record::new(0, 500, Payload::Bytes(vec![1; 24].into()), true);
        let landed = record.landed(&pages);
        assert_eq!((landed.offset_bytes, landed.sectors()), (0, 2));
        assert_eq!(landed.grows_to, Some(1024));
        assert_eq!(
            (
                landed.bytes()[499],
                landed.bytes()[500],
                landed.bytes()[524]
            ),
            (7, 1, 7)
        );
    }

    #[test]
    fn what_lies_beyond_the_length_is_not_written() {
        let mut pages = SparseBytes::new();
        let record = Record::new(0, 100, Payload::Bytes(vec![1; 100].into()), true);
        record.landed(&pages).apply(&mut pages);
        assert_eq!(pages.len_bytes(), 200);
        Record::truncate(0, 150).apply(&mut pages);
        Record::allocate(0, 0..120).apply(&mut pages);
        assert_eq!(pages.len_bytes(), 150);
        Record::new(0, 0, Payload::Zeroes(512), false).apply(&mut pages);
        assert_eq!(pages.bytes(0, 150), [0; 150]);
    }
}
