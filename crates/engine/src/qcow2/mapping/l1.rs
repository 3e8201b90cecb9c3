//! The L1 table, wholly in memory.
//!
//! Reads are lock-free; changes mark the 512-byte sector of the table dirty, which
//! is what the next commit writes.
//!
//! Invariants:
//! - An entry in memory never moves: a table that grows gets further pieces, each as
//!   long as everything before it.
//! - Where the table lies changes only while it is clean and nobody changes entries.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use vellum_format::l1::L1Entry;
use vellum_format::types::HostOffset;
use vellum_io::Buffer;

use crate::qcow2::table_cache::cache::WriteBack;

const SECTOR_BYTES: usize = 512;
const ENTRIES_PER_SECTOR: usize = SECTOR_BYTES / 8;
/// Doublings from one sector to far more entries than the format allows.
const MAX_PIECES: usize = 24;

type Piece = Box<[AtomicU64]>;

/// The active L1 table.
#[derive(Debug)]
pub(crate) struct L1Table {
    offset_bytes: AtomicU64,
    /// Entries that the table on disk has.
    len: AtomicU64,
    /// Those that it had when the image was opened, filled up to whole sectors.
    first: Piece,
    /// What growth added.
    more: [OnceLock<Piece>; MAX_PIECES],
    dirty_sectors: Mutex<BTreeSet<usize>>,
}

/// A sector of the table to write.
#[derive(Debug)]
pub(crate) struct L1Sector {
    sector: usize,
    /// Host offset in bytes to write at.
    pub(crate) offset_bytes: u64,
    /// The sector's bytes, shorter at the end of the table.
    pub(crate) bytes: Buffer,
}

fn empty_piece(len: usize) -> Piece {
    std::iter::repeat_with(AtomicU64::default)
        .take(len)
        .collect()
}

impl L1Table {
    /// The table at `offset`, from its on-disk bytes.
    pub(crate) fn new(offset: HostOffset, bytes: &[u8]) -> Self {
        // Up to 4 million entries: no bounds check for each.
        let entries = bytes.as_chunks().0;
        let whole = entries.len().next_multiple_of(ENTRIES_PER_SECTOR);
        let filling = whole.max(ENTRIES_PER_SECTOR) - entries.len();
        let values = entries.iter().copied().map(u64::from_be_bytes);
        let values = values.chain(std::iter::repeat_n(0, filling));
        L1Table {
            offset_bytes: AtomicU64::new(offset.bytes()),
            len: AtomicU64::new(entries.len() as u64),
            first: values.map(AtomicU64::new).collect(),
            more: Default::default(),
            dirty_sectors: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<usize>> {
        self.dirty_sectors.lock()
    }

    /// Where the table lies.
    pub(crate) fn offset(&self) -> HostOffset {
        HostOffset(self.offset_bytes.load(Ordering::Acquire))
    }

    /// The number of entries that the table has on disk.
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    fn slot(&self, index: u64) -> Option<&AtomicU64> {
        let index = usize::try_from(index).ok()?;
        match self.first.get(index) {
            Some(slot) => Some(slot),
            None => self.later_slot(index),
        }
    }

    /// Piece number `k` holds the entries from `first.len() << k` on.
    #[cold]
    fn later_slot(&self, index: usize) -> Option<&AtomicU64> {
        let number = (index / self.first.len()).checked_ilog2()? as usize;
        let piece = self.more.get(number)?.get()?;
        piece.get(index - (self.first.len() << number))
    }

    /// The entry at `index`; beyond the table nothing is allocated.
    #[inline]
    pub(crate) fn get(&self, index: u64) -> L1Entry {
        let slot = self.slot(index);
        L1Entry(slot.map_or(0, |entry| entry.load(Ordering::Acquire)))
    }

    /// The bytes of the file that are written when the entry at `index` changes.
    pub(crate) fn sector_place(&self, index: u64) -> Range<u64> {
        let first = index / ENTRIES_PER_SECTOR as u64 * ENTRIES_PER_SECTOR as u64;
        let end = (first + ENTRIES_PER_SECTOR as u64).min(self.len());
        let table = self.offset().bytes();
        table + first * 8..table + end * 8
    }

    /// Whether no entry there leads anywhere.
    pub(crate) fn sector_is_empty(&self, index: u64) -> bool {
        let first = index / ENTRIES_PER_SECTOR as u64 * ENTRIES_PER_SECTOR as u64;
        (first..first + ENTRIES_PER_SECTOR as u64).all(|index| self.get(index).0 == 0)
    }

    /// Sets the entry at `index`; `false` if the table has no such entry.
    #[must_use]
    pub(crate) fn set(&self, index: u64, entry: L1Entry) -> bool {
        if index >= self.len() {
            return false;
        }
        let Some(slot) = self.slot(index) else {
            return false;
        };
        slot.store(entry.0, Ordering::Release);
        self.lock().insert(index as usize / ENTRIES_PER_SECTOR);
        true
    }

    /// Notes that the table lies at `offset` now and has `len` entries there, those
    /// added being unallocated. The table must be clean, and nobody may change it.
    pub(crate) fn moved(&self, offset: HostOffset, len: u64) {
        let mut reached = self.first.len() as u64;
        for piece in &self.more {
            if reached >= len {
                break;
            }
            piece.get_or_init(|| empty_piece(reached as usize));
            reached *= 2;
        }
        self.offset_bytes.store(offset.bytes(), Ordering::Release);
        self.len.fetch_max(len, Ordering::AcqRel);
    }

    /// Takes the content of another table, which is as long as this one or longer and
    /// is on disk at `offset`. The table must be clean, and nobody else may change it.
    pub(crate) fn replace(&self, offset: HostOffset, entries: &[L1Entry]) {
        self.moved(offset, entries.len() as u64);
        for (index, entry) in (0..).zip(entries) {
            if let Some(slot) = self.slot(index) {
                slot.store(entry.0, Ordering::Release);
            }
        }
    }

    /// Whether no sector waits for being written.
    pub(crate) fn is_clean(&self) -> bool {
        self.lock().is_empty()
    }

    /// Copies every dirty sector for writing and counts it as clean.
    pub(crate) fn take_dirty(&self) -> Vec<L1Sector> {
        let sectors = std::mem::take(&mut *self.lock());
        sectors
            .into_iter()
            .map(|sector| self.copy_sector(sector))
            .collect()
    }

    fn copy_sector(&self, sector: usize) -> L1Sector {
        let first = (sector * ENTRIES_PER_SECTOR) as u64;
        let end = (first + ENTRIES_PER_SECTOR as u64).min(self.len());
        let mut bytes = Buffer::zeroed((end - first) as usize * 8);
        for (place, index) in bytes.chunks_exact_mut(8).zip(first..end) {
            place.copy_from_slice(&self.get(index).0.to_be_bytes());
        }
        let offset_bytes = self.offset().bytes() + (sector * SECTOR_BYTES) as u64;
        L1Sector {
            sector,
            offset_bytes,
            bytes,
        }
    }

    /// Marks sectors dirty again whose write failed.
    pub(crate) fn mark_dirty(&self, sectors: impl IntoIterator<Item = usize>) {
        self.lock().extend(sectors);
    }
}

impl L1Sector {
    /// Which sector of the table this is.
    pub(crate) fn sector(&self) -> usize {
        self.sector
    }

    /// The write that puts it to disk.
    pub(crate) fn into_write(self) -> WriteBack {
        WriteBack {
            key: self.offset_bytes,
            bytes: self.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_sectors_are_written() {
        let table = L1Table::new(HostOffset(0x30000), &[0; 100 * 8]);
        assert!(table.set(70, L1Entry::new(HostOffset(0x50000), true)));
        assert!(!table.set(100, L1Entry::default()));
        let dirty = table.take_dirty();
        assert_eq!(dirty.len(), 1);
        assert_eq!(
            (dirty[0].offset_bytes, dirty[0].bytes.len()),
            (0x30200, 36 * 8)
        );
        assert_eq!(L1Entry::read(&dirty[0].bytes, 6), Some(table.get(70)));
        assert!(table.take_dirty().is_empty());
        table.mark_dirty([1]);
        assert_eq!(table.take_dirty().len(), 1);
    }

    #[test]
    fn a_table_that_grows_keeps_its_entries() {
        let table = L1Table::new(HostOffset(0x30000), &[0; 3 * 8]);
        assert!(table.set(2, L1Entry(7)));
        assert_eq!(table.take_dirty().len(), 1);
        table.moved(HostOffset(0x90000), 1000);
        assert_eq!((table.offset(), table.len()), (HostOffset(0x90000), 1000));
        for index in [3, 63, 64, 127, 128, 511, 512, 999] {
            assert_eq!(table.get(index).0, 0);
            assert!(table.set(index, L1Entry(index)));
        }
        assert!(!table.set(1000, L1Entry(1)));
        table.moved(HostOffset(0x90000), 1 << 22);
        assert!(table.set((1 << 22) - 1, L1Entry(9)));
        assert_eq!((table.get(2).0, table.get(999).0), (7, 999));
        let dirty = table.take_dirty();
        let last = dirty.last().expect("the last sector");
        assert_eq!(last.offset_bytes, 0x90000 + (32 << 20) - 512);
        assert_eq!(L1Entry::read(&last.bytes, 63), Some(L1Entry(9)));
    }
}
