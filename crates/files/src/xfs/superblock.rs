//! The superblock, and where blocks and inodes are.
//!
//! ```text
//! 00 XFSB            38 root inode       68 bytes of an inode   c8 more features
//! 04 block size      54 blocks of a      6c name                    of version 4
//! 08 blocks             group            78 logarithms: block,  d8 incompatible features,
//! 10 blocks for      58 groups              7a inode, 7b inodes    e0 checksum: version 5
//!    real time       60 blocks of log       of a block,         f8 UUID of metadata
//! 20 UUID            64 version             7c blocks of a group
//! 30 log's block     66 bytes of a       90 free blocks
//!                       sector           c0 logarithm of blocks of a directory
//! ```
//!
//! A block's number has the number of its group in its upper bits, and so has an inode's.

use crate::bytes::{be16, be32, be64, le32, part, text, u8_at};
use crate::error::{Error, Result};
use crate::source::Source;

const BYTES: usize = 512;
const CHECKSUM_AT: usize = 0xe0;

/// Features of version 4 in its number of the version, and those in the second word.
const MORE_FEATURES: u16 = 0x8000;
const DIRECTORIES_2: u16 = 0x2000;
const FILE_TYPES_4: u32 = 0x200;

/// Incompatible features of version 5.
const FILE_TYPES: u32 = 0x1;
const SPARSE_INODES: u32 = 0x2;
const METADATA_UUID: u32 = 0x4;
const BIG_TIMES: u32 = 0x8;
const NEEDS_REPAIR: u32 = 0x10;
const LARGE_COUNTS: u32 = 0x20;
const EXCHANGED_RANGES: u32 = 0x40;
const PARENT_POINTERS: u32 = 0x80;
const KNOWN: u32 = FILE_TYPES
    | SPARSE_INODES
    | METADATA_UUID
    | BIG_TIMES
    | NEEDS_REPAIR
    | LARGE_COUNTS
    | EXCHANGED_RANGES
    | PARENT_POINTERS;
/// Those that have names and are not known here.
const NAMED: [(u32, &str); 3] = [
    (0x100, "directories of metadata"),
    (0x200, "zones"),
    (0x400, "gaps between zones"),
];

/// What is known of the whole.
#[derive(Debug)]
pub(super) struct Superblock {
    /// Structures have checksums.
    pub(super) is_version_5: bool,
    pub(super) block_bytes: usize,
    pub(super) blocks: u64,
    pub(super) free_blocks: u64,
    pub(super) inode_bytes: usize,
    pub(super) root_inode: u64,
    /// Of a block of a directory.
    pub(super) directory_block_bytes: usize,
    pub(super) has_file_types: bool,
    pub(super) needs_repair: bool,
    /// What structures have of it.
    pub(super) uuid: [u8; 16],
    pub(super) log_block: u64,
    pub(super) log_blocks: u32,
    group_blocks: u32,
    groups: u32,
    block_in_group_bits: u32,
    inode_in_block_bits: u32,
}

impl Superblock {
    pub(super) fn read(source: &Source) -> Result<Superblock> {
        let bytes = source.bytes(0, BYTES)?;
        let damaged = |structure, at| Error::damaged(structure, at);
        if be32(&bytes, 0) != 0x5846_5342 {
            return Err(damaged("the mark of the superblock", 0));
        }
        let version = be16(&bytes, 0x64);
        let is_version_5 = match version & 0xf {
            4 => false,
            5 => true,
            other => return Err(Error::Unsupported(format!("XFS of version {other}"))),
        };
        let incompatible = if is_version_5 { be32(&bytes, 0xd8) } else { 0 };
        if is_version_5 {
            check(source, &bytes)?;
        }
        refuse_unknown(version, incompatible)?;
        let superblock = decode(&bytes, is_version_5, incompatible);
        let log = |at| u32::from(u8_at(&bytes, at));
        let (block_bits, inode_bits) = (log(0x78), log(0x7a));
        let group_blocks = superblock.group_blocks;
        let is_sound = [
            (9..=16).contains(&block_bits) && superblock.block_bytes == 1 << block_bits,
            (8..=11).contains(&inode_bits) && superblock.inode_bytes == 1 << inode_bits,
            inode_bits <= block_bits && log(0x7b) == block_bits - inode_bits,
            group_blocks > 0 && superblock.groups > 0 && log(0x7c) <= 31,
            group_blocks <= 1 << log(0x7c).min(31),
            superblock.blocks <= u64::from(superblock.groups) * u64::from(group_blocks),
            block_bits + log(0xc0) <= 16,
            u8_at(&bytes, 0x7e) == 0,
        ];
        if let Some(number) = is_sound.iter().position(|is_sound| !is_sound) {
            let places = [0x04, 0x68, 0x7b, 0x54, 0x7c, 0x08, 0xc0, 0x7e];
            return Err(damaged("a number in the superblock", places[number]));
        }
        if superblock.log_block == 0 {
            let what = "XFS whose log is on another device".to_owned();
            return Err(Error::Unsupported(what));
        }
        Ok(superblock)
    }

    /// Where a block is in bytes; `None` if there is no such block.
    pub(super) fn block_place(&self, block: u64) -> Option<u64> {
        let group = block >> self.block_in_group_bits;
        let in_group = block & ((1 << self.block_in_group_bits) - 1);
        if group >= self.groups.into() || in_group >= self.group_blocks.into() {
            return None;
        }
        let linear = group * u64::from(self.group_blocks) + in_group;
        (linear < self.blocks).then(|| linear * self.block_bytes as u64)
    }

    /// Where an inode is in bytes; `None` if there is no place for it.
    pub(super) fn inode_place(&self, number: u64) -> Option<u64> {
        let block = number >> self.inode_in_block_bits;
        let in_block = number & ((1 << self.inode_in_block_bits) - 1);
        let at = self.block_place(block)?;
        Some(at + in_block * self.inode_bytes as u64)
    }
}

fn decode(bytes: &[u8], is_version_5: bool, incompatible: u32) -> Superblock {
    let version = be16(bytes, 0x64);
    let more = match version & MORE_FEATURES != 0 {
        true => be32(bytes, 0xc8),
        false => 0,
    };
    let uuid_at = match incompatible & METADATA_UUID != 0 {
        true => 0xf8,
        false => 0x20,
    };
    let block_bytes = be32(bytes, 0x04) as usize;
    Superblock {
        is_version_5,
        block_bytes,
        blocks: be64(bytes, 0x08),
        free_blocks: be64(bytes, 0x90),
        inode_bytes: usize::from(be16(bytes, 0x68)),
        root_inode: be64(bytes, 0x38),
        directory_block_bytes: block_bytes.min(1 << 16) << u8_at(bytes, 0xc0).min(7),
        has_file_types: match is_version_5 {
            true => incompatible & FILE_TYPES != 0,
            false => more & FILE_TYPES_4 != 0,
        },
        needs_repair: incompatible & NEEDS_REPAIR != 0,
        uuid: part(bytes, uuid_at..uuid_at + 16)
            .try_into()
            .unwrap_or_default(),
        log_block: be64(bytes, 0x30),
        log_blocks: be32(bytes, 0x60),
        group_blocks: be32(bytes, 0x54),
        groups: be32(bytes, 0x58),
        block_in_group_bits: u32::from(u8_at(bytes, 0x7c)).min(31),
        inode_in_block_bits: u32::from(u8_at(bytes, 0x7b)).min(8),
    }
}

/// The name that people have given it, from the first sector.
pub(crate) fn label(bytes: &[u8]) -> String {
    text(part(bytes, 0x6c..0x78))
}

fn refuse_unknown(version: u16, incompatible: u32) -> Result<()> {
    if version & DIRECTORIES_2 == 0 {
        let what = "XFS with directories of version 1".to_owned();
        return Err(Error::Unsupported(what));
    }
    let unknown = incompatible & !KNOWN;
    if unknown == 0 {
        return Ok(());
    }
    let names = NAMED.iter().filter(|(bit, _)| unknown & bit != 0);
    let mut words: Vec<String> = names.map(|(_, name)| (*name).to_owned()).collect();
    let nameless = NAMED.iter().fold(unknown, |bits, (bit, _)| bits & !bit);
    if nameless != 0 {
        words.push(format!("features {nameless:#x}"));
    }
    let what = format!("XFS with {}", words.join(" and "));
    Err(Error::Unsupported(what))
}

fn check(source: &Source, bytes: &[u8]) -> Result<()> {
    let sector_bytes = usize::from(be16(bytes, 0x66));
    if !(512..=32768).contains(&sector_bytes) || !sector_bytes.is_power_of_two() {
        return Err(Error::damaged("the size of sectors", 0x66));
    }
    let sector = source.bytes(0, sector_bytes)?;
    match is_intact(&sector, CHECKSUM_AT) {
        true => Ok(()),
        false => Err(Error::damaged("the checksum of the superblock", 0)),
    }
}

/// Whether a structure has the sum that stands in it.
pub(super) fn is_intact(bytes: &[u8], sum_at: usize) -> bool {
    let before = crc32c::crc32c(part(bytes, 0..sum_at));
    let sum = crc32c::crc32c_append(before, &[0; 4]);
    let rest = part(bytes, sum_at.saturating_add(4)..bytes.len());
    crc32c::crc32c_append(sum, rest) == le32(bytes, sum_at)
}
