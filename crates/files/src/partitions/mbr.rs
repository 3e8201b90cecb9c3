//! The classic table in the first sector, and its chains of logical partitions.
//!
//! ```text
//! 446  four entries of 16 bytes: flags, CHS, type, CHS, first sector, sectors
//! 510  55 aa
//! ```
//!
//! A partition of type 05, 0f or 85 holds others: its first sector is such a table, whose first
//! entry is a partition, from that sector on, and whose second leads to the next such sector,
//! from the start of the whole chain on.

use super::{Partition, Scheme, Table, place};
use crate::bytes::{has, le32, u8_at};
use crate::error::Result;
use crate::source::Source;

const ENTRIES_AT: usize = 446;
const ENTRY_BYTES: usize = 16;
/// Logical partitions that are looked at; Linux has 251 numbers for them.
const LOGICAL_MAX: usize = 128;
/// Of a table that only says that there is a GPT.
const PROTECTIVE: u8 = 0xee;

/// Types with a name.
const PURPOSES: &[(u8, &str)] = &[
    (0x01, "FAT12"),
    (0x04, "FAT16"),
    (0x06, "FAT16"),
    (0x07, "NTFS or exFAT"),
    (0x0b, "FAT32"),
    (0x0c, "FAT32"),
    (0x0e, "FAT16"),
    (0x27, "Windows recovery"),
    (0x42, "Windows dynamic disk"),
    (0x82, "Linux swap"),
    (0x83, "Linux"),
    (0x8e, "Linux LVM"),
    (0xa5, "FreeBSD"),
    (0xa6, "OpenBSD"),
    (0xa9, "NetBSD"),
    (0xaf, "Apple HFS"),
    (0xbf, "Solaris"),
    (0xef, "EFI system"),
    (0xfd, "Linux RAID"),
];

#[derive(Debug, Clone, Copy)]
struct Entry {
    purpose: u8,
    first_sector: u64,
    sectors: u64,
}

impl Entry {
    fn is_extended(self) -> bool {
        matches!(self.purpose, 0x05 | 0x0f | 0x85)
    }
}

/// The entries that are used, with their places; `None` if the sector is no table.
fn entries(sector: &[u8]) -> Option<Vec<(usize, Entry)>> {
    if !has(sector, 510, &[0x55, 0xaa]) {
        return None;
    }
    let mut entries = Vec::new();
    for number in 0..4 {
        let at = ENTRIES_AT + number * ENTRY_BYTES;
        // Code is here, and no table.
        if u8_at(sector, at) & 0x7f != 0 {
            return None;
        }
        let entry = Entry {
            purpose: u8_at(sector, at + 4),
            first_sector: u64::from(le32(sector, at + 8)),
            sectors: u64::from(le32(sector, at + 12)),
        };
        if entry.purpose != 0 && entry.sectors != 0 {
            entries.push((number, entry));
        }
    }
    Some(entries)
}

fn partition(disk: &Source, sector_bytes: u64, number: u32, entry: Entry) -> Option<Partition> {
    let (start_bytes, len_bytes) = place(disk, sector_bytes, entry.first_sector, entry.sectors)?;
    let named = PURPOSES.iter().find(|(code, _)| *code == entry.purpose);
    Some(Partition {
        number,
        start_bytes,
        len_bytes,
        purpose: named.map_or_else(
            || format!("type {:02x}", entry.purpose),
            |(_, name)| (*name).to_owned(),
        ),
        name: None,
    })
}

/// Reads the table.
pub(super) fn read(disk: &Source) -> Result<Option<Table>> {
    let Some(entries) = entries(&disk.head(512)?) else {
        return Ok(None);
    };
    if entries.is_empty() {
        return Ok(None);
    }
    let sector_bytes = sector_bytes(disk, &entries)?;
    let mut table = Table {
        scheme: Scheme::Mbr,
        partitions: Vec::new(),
        remarks: Vec::new(),
    };
    if entries.iter().any(|(_, entry)| entry.purpose == PROTECTIVE) {
        let text = "the disk had a GPT, of which neither copy is sound".to_owned();
        table.remarks.push(text);
    }
    for (index, entry) in entries.iter().copied() {
        if entry.is_extended() || entry.purpose == PROTECTIVE {
            continue;
        }
        let found = partition(disk, sector_bytes, index as u32 + 1, entry);
        table.partitions.extend(found);
    }
    let mut next_number = 5;
    for (_, entry) in entries.iter().filter(|(_, entry)| entry.is_extended()) {
        read_logical(disk, sector_bytes, *entry, &mut next_number, &mut table)?;
    }
    Ok((!table.partitions.is_empty() || !table.remarks.is_empty()).then_some(table))
}

/// The length of the sectors that the table counts in: 512, unless what it says makes sense only
/// with 4096.
fn sector_bytes(disk: &Source, entries: &[(usize, Entry)]) -> Result<u64> {
    let fits = |sector_bytes: u64| {
        let mut ends = entries
            .iter()
            .map(|(_, entry)| entry.first_sector + entry.sectors);
        ends.all(|end| end * sector_bytes <= disk.len_bytes())
    };
    if !fits(4096) {
        return Ok(512);
    }
    for (_, entry) in entries {
        for sector_bytes in [512, 4096] {
            let found = place(disk, sector_bytes, entry.first_sector, entry.sectors);
            let Some((start, len)) = found else { continue };
            let part = disk.part(start, len);
            let makes_sense = match entry.is_extended() {
                true => self::entries(&part.head(512)?).is_some(),
                false => crate::detect(&part)?.contents != crate::Contents::Unknown,
            };
            if makes_sense {
                return Ok(sector_bytes);
            }
        }
    }
    Ok(512)
}

fn read_logical(
    disk: &Source,
    sector_bytes: u64,
    extended: Entry,
    next_number: &mut u32,
    table: &mut Table,
) -> Result<()> {
    let mut at = extended.first_sector;
    let mut seen = Vec::new();
    loop {
        if seen.contains(&at) || seen.len() == LOGICAL_MAX {
            let text = "its logical partitions lead to each other without an end".to_owned();
            table.remarks.push(text);
            return Ok(());
        }
        seen.push(at);
        let Some((start, len)) = place(disk, sector_bytes, at, 1) else {
            let text = "its logical partitions lead beyond the end of the disk".to_owned();
            table.remarks.push(text);
            return Ok(());
        };
        let entries = entries(&disk.part(start, len).head(512)?).unwrap_or_default();
        let mut next = None;
        for (_, mut entry) in entries {
            if entry.is_extended() {
                next.get_or_insert(extended.first_sector + entry.first_sector);
                continue;
            }
            entry.first_sector += at;
            let found = partition(disk, sector_bytes, *next_number, entry);
            *next_number += 1;
            table.partitions.extend(found);
        }
        match next {
            Some(next) => at = next,
            None => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::source;
    use super::*;

    fn put(disk: &mut [u8], sector: usize, index: usize, entry: (u8, u32, u32)) {
        let sector = &mut disk[sector * 512..][..512];
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        let at = ENTRIES_AT + index * ENTRY_BYTES;
        sector[at + 4] = entry.0;
        sector[at + 8..at + 12].copy_from_slice(&entry.1.to_le_bytes());
        sector[at + 12..at + 16].copy_from_slice(&entry.2.to_le_bytes());
    }

    fn places(table: &Table) -> Vec<(u32, u64, u64)> {
        let all = table.partitions.iter();
        all.map(|one| (one.number, one.start_bytes / 512, one.len_bytes / 512))
            .collect()
    }

    #[test]
    fn primary_and_logical_partitions_are_found() {
        let mut disk = vec![0; 1000 * 512];
        put(&mut disk, 0, 0, (0x83, 10, 20));
        put(&mut disk, 0, 2, (0x05, 100, 300));
        put(&mut disk, 100, 0, (0x83, 1, 20));
        put(&mut disk, 100, 1, (0x05, 50, 50));
        put(&mut disk, 150, 0, (0x82, 2, 30));
        let table = read(&source(disk)).expect("readable").expect("a table");
        assert_eq!(places(&table), [(1, 10, 20), (5, 101, 20), (6, 152, 30)]);
        assert_eq!(table.partitions[2].purpose, "Linux swap");
        assert_eq!(table.remarks, [""; 0]);
    }

    #[test]
    fn chains_that_bite_their_tail_end() {
        let mut disk = vec![0; 1000 * 512];
        put(&mut disk, 0, 0, (0x0f, 100, 300));
        put(&mut disk, 100, 0, (0x83, 1, 20));
        put(&mut disk, 100, 1, (0x05, 50, 50));
        put(&mut disk, 150, 1, (0x05, 0, 50));
        let table = read(&source(disk)).expect("readable").expect("a table");
        assert_eq!(places(&table), [(5, 101, 20)]);
        assert_eq!(table.remarks.len(), 1);
    }

    #[test]
    fn what_lies_outside_of_the_disk_is_left_out_or_cut() {
        let mut disk = vec![0; 1000 * 512];
        put(&mut disk, 0, 0, (0x83, 10, u32::MAX));
        put(&mut disk, 0, 1, (0x83, 1000, 1));
        put(&mut disk, 0, 2, (0x83, u32::MAX, u32::MAX));
        put(&mut disk, 0, 3, (0x05, u32::MAX, u32::MAX));
        let table = read(&source(disk)).expect("readable").expect("a table");
        assert_eq!(places(&table), [(1, 10, 990)]);
        assert_eq!(table.remarks.len(), 1);
    }
}
