//! The partitions of a disk: `mbr` (with logical ones) and `gpt`.
//!
//! Invariants:
//! - What is called a partition lies inside the disk, at least its first byte does.
//! - However tables lead to each other, reading them ends.

mod gpt;
mod mbr;

use crate::detect;
use crate::error::Result;
use crate::source::Source;

/// A partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// Its number, as Linux counts: from 1; logical ones of an MBR from 5.
    pub number: u32,
    /// Where it begins, in bytes.
    pub start_bytes: u64,
    /// How long it is in bytes, as far as the disk reaches.
    pub len_bytes: u64,
    /// What its table says that it is for: a name, or a number.
    pub purpose: String,
    /// The name that a GPT gives it.
    pub name: Option<String>,
}

/// The kind of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// The classic one, of four partitions and chains of logical ones.
    Mbr,
    /// The one of UEFI.
    Gpt,
}

/// A table of partitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Its kind.
    pub scheme: Scheme,
    /// By their numbers.
    pub partitions: Vec<Partition>,
    /// What users are to know of it, such as that it is damaged.
    pub remarks: Vec<String>,
}

/// The table of a disk; `None` if it has none, as where one file system takes all of it.
///
/// # Errors
/// If the disk cannot be read.
pub fn read(disk: &Source) -> Result<Option<Table>> {
    if let Some(table) = gpt::read(disk)? {
        return Ok(Some(table));
    }
    // The start of a file system may look like a table.
    let sector = disk.head(512)?;
    if detect::is_boot_sector(&sector) {
        return Ok(None);
    }
    mbr::read(disk)
}

/// What of a partition of `sectors` sectors there is.
fn place(disk: &Source, sector_bytes: u64, first_sector: u64, sectors: u64) -> Option<(u64, u64)> {
    let start_bytes = first_sector.checked_mul(sector_bytes)?;
    let len_bytes = sectors.saturating_mul(sector_bytes);
    let there = disk.len_bytes().checked_sub(start_bytes)?;
    let len_bytes = len_bytes.min(there);
    (len_bytes > 0).then_some((start_bytes, len_bytes))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    pub(super) fn source(disk: Vec<u8>) -> Source {
        Source::new(Arc::new(disk))
    }

    #[test]
    fn noise_and_empty_disks_have_no_table() {
        for len in [0, 1, 511, 512, 1024, 5000] {
            assert_eq!(read(&source(vec![0; len])).expect("readable"), None);
        }
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..2000 {
            let mut disk: Vec<u8> = (0..4096).map(|_| random.u8(..)).collect();
            disk[510..512].copy_from_slice(&[0x55, 0xaa]);
            let table = read(&source(disk)).expect("readable");
            for partition in table.iter().flat_map(|table| &table.partitions) {
                assert!(partition.start_bytes + partition.len_bytes <= 4096);
            }
        }
    }
}
