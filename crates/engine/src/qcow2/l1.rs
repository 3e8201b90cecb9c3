//! The L1 table, wholly in memory.
//!
//! Reads are lock-free; changes mark the 512-byte sector of the table dirty, which
//! is what the next commit writes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vellum_format::l1::L1Entry;
use vellum_format::types::HostOffset;
use vellum_storage::Buffer;

use super::cache::WriteBack;

const SECTOR_BYTES: usize = 512;
const ENTRIES_PER_SECTOR: usize = SECTOR_BYTES / 8;

/// The active L1 table.
#[derive(Debug)]
pub(crate) struct L1Table {
    offset: HostOffset,
    entries: Box<[AtomicU64]>,
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

impl L1Table {
    /// The table at `offset`, from its on-disk bytes.
    pub(crate) fn new(offset: HostOffset, bytes: &[u8]) -> Self {
        // Up to 4 million entries: no bounds check for each.
        let entries = bytes.as_chunks().0.iter().copied();
        L1Table {
            offset,
            entries: entries
                .map(u64::from_be_bytes)
                .map(AtomicU64::new)
                .collect(),
            dirty_sectors: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<usize>> {
        self.dirty_sectors
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The entry at `index`; beyond the table nothing is allocated.
    #[inline]
    pub(crate) fn get(&self, index: u64) -> L1Entry {
        let entry = usize::try_from(index)
            .ok()
            .and_then(|index| self.entries.get(index));
        L1Entry(entry.map_or(0, |entry| entry.load(Ordering::Acquire)))
    }

    /// Sets the entry at `index`; `false` if the table has no such entry.
    #[must_use]
    pub(crate) fn set(&self, index: u64, entry: L1Entry) -> bool {
        let Ok(index) = usize::try_from(index) else {
            return false;
        };
        let Some(slot) = self.entries.get(index) else {
            return false;
        };
        slot.store(entry.0, Ordering::Release);
        self.lock().insert(index / ENTRIES_PER_SECTOR);
        true
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
        let first = sector * ENTRIES_PER_SECTOR;
        let entries = &self.entries[first..(first + ENTRIES_PER_SECTOR).min(self.entries.len())];
        let mut bytes = Buffer::zeroed(entries.len() * 8);
        for (place, entry) in bytes.chunks_exact_mut(8).zip(entries) {
            place.copy_from_slice(&entry.load(Ordering::Acquire).to_be_bytes());
        }
        let offset_bytes = self.offset.bytes() + (sector * SECTOR_BYTES) as u64;
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
}
