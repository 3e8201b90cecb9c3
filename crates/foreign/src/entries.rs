//! [`Entries`]: a table of 32-bit numbers that is wholly in memory, and which sectors of it are to be
//! written.
//!
//! For formats whose table is small: 4 bytes for each block of a MiB or more.

use std::collections::BTreeSet;

use vellum::{Result, Storage};
use vellum_io::finish_all;

use crate::fields::{read_at, write_at};

/// What is written at once at least: a sector of a disk.
const SECTOR_BYTES: usize = 512;
const ENTRY_BYTES: usize = 4;
/// Tables are read in pieces of this size.
const READ_BYTES: u64 = 1 << 20;
const WRITES_AT_ONCE: usize = 16;

/// In which order the bytes of a number lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endian {
    Little,
    Big,
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Entries {
    endian: Endian,
    /// Where the table is in its file, in bytes.
    at_bytes: u64,
    values: Vec<u32>,
    /// Sectors of the table that differ from those on disk.
    changed: BTreeSet<usize>,
}

/// Sectors of a table as they were, and where they belong.
#[derive(Debug)]
pub(crate) struct ChangedEntries(Vec<(u64, Vec<u8>)>);

impl Entries {
    /// Reads `count` entries, which whoever asks has found to be few enough.
    pub(crate) async fn read(
        file: &dyn Storage,
        at_bytes: u64,
        count: usize,
        endian: Endian,
    ) -> Result<Entries> {
        let mut values = Vec::with_capacity(count);
        let len_bytes = (count * ENTRY_BYTES) as u64;
        let mut at = 0;
        while at < len_bytes {
            let piece_bytes = READ_BYTES.min(len_bytes - at);
            let piece = read_at(file, at_bytes + at, piece_bytes as usize).await?;
            let (entries, _) = piece.as_chunks::<ENTRY_BYTES>();
            values.extend(entries.iter().map(|bytes| match endian {
                Endian::Little => u32::from_le_bytes(*bytes),
                Endian::Big => u32::from_be_bytes(*bytes),
            }));
            at += piece_bytes;
        }
        Ok(Entries {
            endian,
            at_bytes,
            values,
            changed: BTreeSet::new(),
        })
    }

    pub(crate) fn values(&self) -> &[u32] {
        &self.values
    }

    pub(crate) fn get(&self, index: usize) -> Option<u32> {
        self.values.get(index).copied()
    }

    /// Changes an entry in memory; `false` if there is no such entry.
    pub(crate) fn set(&mut self, index: usize, value: u32) -> bool {
        let Some(entry) = self.values.get_mut(index) else {
            return false;
        };
        if *entry != value {
            *entry = value;
            self.changed.insert(index * ENTRY_BYTES / SECTOR_BYTES);
        }
        true
    }

    pub(crate) fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    pub(crate) fn changed_bytes(&self) -> u64 {
        (self.changed.len() * SECTOR_BYTES) as u64
    }

    /// The sectors that changed, neighbours as one; they count as written from now on.
    pub(crate) fn take_changed(&mut self) -> ChangedEntries {
        let per_sector = SECTOR_BYTES / ENTRY_BYTES;
        let mut pieces: Vec<(u64, Vec<u8>)> = Vec::new();
        for sector in std::mem::take(&mut self.changed) {
            let from = sector * per_sector;
            let to = (from + per_sector).min(self.values.len());
            let values = self.values.get(from..to).unwrap_or_default();
            let bytes = values.iter().flat_map(|value| match self.endian {
                Endian::Little => value.to_le_bytes(),
                Endian::Big => value.to_be_bytes(),
            });
            let at_bytes = self.at_bytes + (sector * SECTOR_BYTES) as u64;
            match pieces.last_mut() {
                Some((start, last)) if *start + last.len() as u64 == at_bytes => last.extend(bytes),
                _ => pieces.push((at_bytes, bytes.collect())),
            }
        }
        ChangedEntries(pieces)
    }
}

impl ChangedEntries {
    /// Writes them where they belong.
    pub(crate) async fn write(&self, file: &dyn Storage) -> Result<()> {
        let pieces = self.0.iter();
        let writes = pieces.map(|(at_bytes, bytes)| write_at(file, *at_bytes, bytes));
        finish_all(WRITES_AT_ONCE, writes).await.map(drop)
    }
}
