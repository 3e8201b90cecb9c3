//! What a volume holds, by the marks of file systems and of what lies below them.
//!
//! Pure but for reading: whether it can be read in the end, opening it tells.

use crate::bytes::{be16, has, le16, le32, part, text, u8_at};
use crate::error::Result;
use crate::source::Source;

/// What is looked at, in bytes: what has its mark farthest behind is btrfs.
const HEAD_BYTES: usize = 0x1_0000 + 4096;

/// Where ISO9660 has its mark.
pub(crate) const ISO_MARK_BYTES: usize = 0x8001;

/// What a volume holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contents {
    /// ext2, ext3 or ext4.
    Ext(&'static str),
    /// FAT12, FAT16 or FAT32.
    Fat,
    /// ISO9660, with Joliet or Rock Ridge or without.
    Iso,
    /// XFS.
    Xfs,
    /// Something with a name that cannot be read here.
    Foreign(&'static str),
    /// Nothing but zeroes at its start.
    Empty,
    /// Something without a name.
    Unknown,
}

impl Contents {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Contents::Ext(name) | Contents::Foreign(name) => name,
            Contents::Fat => "FAT",
            Contents::Iso => "ISO9660",
            Contents::Xfs => "XFS",
            Contents::Empty => "nothing",
            Contents::Unknown => "unknown data",
        }
    }

    /// Whether there is a reader for it.
    pub fn is_readable(self) -> bool {
        !matches!(
            self,
            Contents::Foreign(_) | Contents::Empty | Contents::Unknown
        )
    }
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// What it holds.
    pub contents: Contents,
    /// The name that people have given it.
    pub label: Option<String>,
}

/// Marks, their places, and whose they are; the first that is there counts.
const MARKS: &[(usize, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe", "LUKS (encrypted)"),
    (0, b"-FVE-FS-", "BitLocker (encrypted)"),
    (3, b"-FVE-FS-", "BitLocker (encrypted)"),
    (3, b"NTFS    ", "NTFS"),
    (3, b"EXFAT   ", "exFAT"),
    (3, b"ReFS\0", "ReFS"),
    (0, b"hsqs", "squashfs"),
    (32, b"NXSB", "APFS"),
    (0, b"BCFS", "bcachefs"),
    (1024, b"H+\0\x04", "HFS+"),
    (1024, b"HX\0\x05", "HFS+"),
    (1024, b"\x10\x20\xf5\xf2", "F2FS"),
    (1024, b"\xe2\xe1\xf5\xe0", "EROFS"),
    (0x1018, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca", "bcache"),
    (0x8000, b"JFS1", "JFS"),
    (0x1_0034, b"ReIsErFs", "reiserfs"),
    (0x1_0034, b"ReIsEr2Fs", "reiserfs"),
    (0x1_0034, b"ReIsEr3Fs", "reiserfs"),
    (0x1_0040, b"_BHRfS_M", "btrfs"),
    (0x8009, b"CDROM", "High Sierra"),
    (0x8001, b"BEA01", "UDF"),
    (0x1000, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    (0, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4086, b"SWAP-SPACE", "swap space"),
    (0xfff6, b"SWAPSPACE2", "swap space"),
];

/// Finds out what a volume holds.
///
/// # Errors
/// If it cannot be read.
pub fn detect(volume: &Source) -> Result<Volume> {
    let head = volume.head(HEAD_BYTES)?;
    let of = |contents, label: String| Volume {
        contents,
        label: Some(label).filter(|label| !label.is_empty()),
    };
    // The place of some marks is that of a number in the superblock of ext4.
    let is_ext = has(&head, 1024 + 0x38, &[0x53, 0xef]);
    if has(&head, 0, b"XFSB") {
        return Ok(of(Contents::Xfs, crate::xfs::label(&head)));
    }
    let mut marks = MARKS.iter().filter(|(at, ..)| !is_ext || *at != 1024);
    let mark = marks.find(|(at, mark, _)| has(&head, *at, mark));
    if let Some((_, _, name)) = mark {
        return Ok(of(Contents::Foreign(name), String::new()));
    }
    // LVM's label is in one of the first four sectors.
    if (0..4).any(|sector| {
        has(&head, sector * 512, b"LABELONE") && has(&head, sector * 512 + 24, b"LVM2 001")
    }) {
        return Ok(of(Contents::Foreign("a volume of LVM"), String::new()));
    }
    if is_ext {
        let label = text(head.get(1024 + 0x78..1024 + 0x88).unwrap_or_default());
        return Ok(of(ext(&head[1024..]), label));
    }
    if has(&head, ISO_MARK_BYTES, b"CD001") {
        return Ok(of(Contents::Iso, text(part(&head, 0x8028..0x8048))));
    }
    if is_fat(&head) {
        return Ok(of(Contents::Fat, fat_label(&head)));
    }
    let contents = match head.iter().all(|byte| *byte == 0) {
        true => Contents::Empty,
        false => Contents::Unknown,
    };
    Ok(of(contents, String::new()))
}

fn ext(superblock: &[u8]) -> Contents {
    let (compatible, incompatible) = (le32(superblock, 0x5c), le32(superblock, 0x60));
    let read_only = le32(superblock, 0x64);
    const JOURNAL_DEVICE: u32 = 8;
    if incompatible & JOURNAL_DEVICE != 0 {
        return Contents::Foreign("a journal of ext4");
    }
    // What ext3 knows: types in directories, a journal to be replayed, meta groups; sparse
    // superblocks, large files, sorted directories.
    if incompatible & !0x16 != 0 || read_only & !0x7 != 0 {
        return Contents::Ext("ext4");
    }
    match compatible & 4 != 0 {
        true => Contents::Ext("ext3"),
        false => Contents::Ext("ext2"),
    }
}

/// Whether the first sector is that of a FAT: no number in it is impossible.
pub(crate) fn is_fat(head: &[u8]) -> bool {
    let (sector_bytes, cluster_sectors) = (le16(head, 11), u8_at(head, 13));
    let is_media = u8_at(head, 21) == 0xf0 || u8_at(head, 21) >= 0xf8;
    let has_jump = u8_at(head, 0) == 0xe9 || (u8_at(head, 0) == 0xeb && u8_at(head, 2) == 0x90);
    has_jump
        && [512, 1024, 2048, 4096].contains(&sector_bytes)
        && cluster_sectors.is_power_of_two()
        && le16(head, 14) > 0
        && (1..=4).contains(&u8_at(head, 16))
        && (le16(head, 19) != 0 || le32(head, 32) != 0)
        && (le16(head, 22) != 0 || le32(head, 36) != 0)
        && is_media
        && be16(head, 510) == 0x55aa
}

fn fat_label(head: &[u8]) -> String {
    let at = match le16(head, 22) {
        0 => 71,
        _ => 43,
    };
    let label = text(head.get(at..at + 11).unwrap_or_default());
    match label.as_str() {
        "NO NAME" => String::new(),
        _ => label,
    }
}

/// Whether a disk's first sector belongs to a file system, and is no table of partitions.
pub(crate) fn is_boot_sector(sector: &[u8]) -> bool {
    let marks = [(3, &b"NTFS    "[..]), (3, b"EXFAT   "), (3, b"-FVE-FS-")];
    is_fat(sector) || marks.iter().any(|(at, mark)| has(sector, *at, mark))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn found(disk: Vec<u8>) -> Contents {
        let source = Source::new(Arc::new(disk));
        detect(&source).expect("readable").contents
    }

    #[test]
    fn every_mark_is_found_where_it_belongs() {
        for (at, mark, name) in MARKS {
            let mut disk = vec![0; 1 << 20];
            disk[*at..at + mark.len()].copy_from_slice(mark);
            assert_eq!(found(disk.clone()), Contents::Foreign(name));
            disk.truncate(at + mark.len() - 1);
            assert_ne!(found(disk), Contents::Foreign(name));
        }
        assert_eq!(found(Vec::new()), Contents::Empty);
        assert_eq!(found(vec![0; 1 << 20]), Contents::Empty);
        assert_eq!(found(vec![1; 1 << 20]), Contents::Unknown);
    }
}
