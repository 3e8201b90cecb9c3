//! The superblock, and where inodes are.
//!
//! ```text
//! 00 inodes          28 inodes in a group   60 incompatible features   e0 journal's inode
//! 04 blocks          38 53 ef               64 read-only features      fe bytes of a descriptor
//! 0c free blocks     4c revision            68 UUID                   104 first meta group
//! 14 first block     58 bytes of an inode   78 name                   150 blocks, high
//! 18 block size      20 blocks in a group                             270 seed of checksums
//! ```

use crate::bytes::{le16, le32, part};
use crate::error::{Error, Result};
use crate::source::Source;

const PLACE_BYTES: u64 = 1024;
const BYTES: usize = 1024;

const FILE_TYPES: u32 = 0x2;
const RECOVER: u32 = 0x4;
const META_GROUPS: u32 = 0x10;
const WIDE: u32 = 0x80;
const SEED: u32 = 0x2000;
const LARGE_DIRECTORIES: u32 = 0x4000;
/// Features without which nothing can be read, and that are known: beside those above extents,
/// guard against two mounts, flexible groups, large attributes in inodes, data in inodes,
/// encryption (of which names and attributes are shown) and names without case.
const KNOWN: u32 = FILE_TYPES
    | RECOVER
    | META_GROUPS
    | 0x40
    | WIDE
    | 0x100
    | 0x200
    | 0x400
    | SEED
    | LARGE_DIRECTORIES
    | 0x8000
    | 0x1_0000
    | 0x2_0000;

const SPARSE_SUPERBLOCKS: u32 = 0x1;
const CHECKSUMS: u32 = 0x400;
/// A compatible feature: copies of the superblock are in two groups.
const SPARSE_SUPERBLOCKS_2: u32 = 0x200;

/// What is known of the whole.
#[derive(Debug)]
pub(super) struct Superblock {
    pub(super) block_bytes: usize,
    pub(super) blocks: u64,
    pub(super) free_blocks: u64,
    pub(super) inode_bytes: usize,
    /// The journal's inode; 0 for none.
    pub(super) journal: u32,
    /// Where checksums of metadata begin; `None` if there are none.
    pub(super) seed: Option<u32>,
    inodes: u32,
    first_block: u64,
    group_blocks: u64,
    group_inodes: u32,
    descriptor_bytes: usize,
    first_meta_group: u64,
    incompatible: u32,
    read_only: u32,
    compatible: u32,
    copies: [u64; 2],
}

/// Reads inside a block.
type ReadBlock<'a> = &'a mut dyn FnMut(u64, usize, &mut [u8]) -> Result<()>;

/// A place in a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) block: u64,
    pub(super) offset: usize,
}

impl Superblock {
    pub(super) fn read(source: &Source) -> Result<Superblock> {
        let bytes = source.bytes(PLACE_BYTES, BYTES)?;
        let damaged = |structure, at: u64| Error::damaged(structure, PLACE_BYTES + at);
        if le16(&bytes, 0x38) != 0xef53 {
            return Err(damaged("the mark of the superblock", 0x38));
        }
        let is_dynamic = le32(&bytes, 0x4c) >= 1;
        let feature = |at| if is_dynamic { le32(&bytes, at) } else { 0 };
        let incompatible = feature(0x60);
        if incompatible & !KNOWN != 0 {
            let bits = incompatible & !KNOWN;
            return Err(Error::Unsupported(format!("ext4 with features {bits:#x}")));
        }
        let has_checksums = feature(0x64) & CHECKSUMS != 0;
        if has_checksums && raw_crc32c(!0, part(&bytes, 0..0x3fc)) != le32(&bytes, 0x3fc) {
            return Err(damaged("the checksum of the superblock", 0x3fc));
        }
        let block_bits = le32(&bytes, 0x18);
        if block_bits > 6 {
            return Err(damaged("the size of blocks", 0x18));
        }
        let block_bytes = 1024_usize << block_bits;
        let inode_bytes = match is_dynamic {
            true => usize::from(le16(&bytes, 0x58)),
            false => 128,
        };
        if !(128..=block_bytes).contains(&inode_bytes) || !inode_bytes.is_power_of_two() {
            return Err(damaged("the size of inodes", 0x58));
        }
        let wide = |low, high| match incompatible & WIDE != 0 {
            true => u64::from(le32(&bytes, low)) | u64::from(le32(&bytes, high)) << 32,
            false => u64::from(le32(&bytes, low)),
        };
        let descriptor_bytes = match incompatible & WIDE != 0 {
            true => usize::from(le16(&bytes, 0xfe)),
            false => 32,
        };
        if !(32..=1024).contains(&descriptor_bytes) || !descriptor_bytes.is_power_of_two() {
            return Err(damaged("the size of group descriptors", 0xfe));
        }
        let superblock = Superblock {
            block_bytes,
            // Whatever lies beyond the end of the volume cannot be read.
            blocks: wide(0x04, 0x150).min(source.len_bytes() / block_bytes as u64),
            free_blocks: wide(0x0c, 0x158),
            inode_bytes,
            journal: le32(&bytes, 0xe0),
            seed: has_checksums.then(|| match incompatible & SEED != 0 {
                true => le32(&bytes, 0x270),
                false => raw_crc32c(!0, part(&bytes, 0x68..0x78)),
            }),
            inodes: le32(&bytes, 0),
            first_block: u64::from(le32(&bytes, 0x14)),
            group_blocks: u64::from(le32(&bytes, 0x20)),
            group_inodes: le32(&bytes, 0x28),
            descriptor_bytes,
            first_meta_group: u64::from(le32(&bytes, 0x104)),
            incompatible,
            read_only: feature(0x64),
            compatible: feature(0x5c),
            copies: [0x24c, 0x250].map(|at| u64::from(le32(&bytes, at))),
        };
        if superblock.group_blocks == 0 || superblock.group_inodes == 0 {
            return Err(damaged("the size of groups", 0x20));
        }
        Ok(superblock)
    }

    /// Whether changes may be in the journal alone.
    pub(super) fn needs_recovery(&self) -> bool {
        self.incompatible & RECOVER != 0 && self.journal != 0
    }

    /// Whether directories tell what files are.
    pub(super) fn has_file_types(&self) -> bool {
        self.incompatible & FILE_TYPES != 0
    }

    /// Whether directories may be longer than 4 GiB.
    pub(super) fn has_large_directories(&self) -> bool {
        self.incompatible & LARGE_DIRECTORIES != 0
    }

    /// Where an inode is; `read` reads a part of a block.
    pub(super) fn inode_place(&self, number: u32, read: ReadBlock<'_>) -> Result<Place> {
        if number == 0 || number > self.inodes {
            return Err(Error::damaged("the number of an inode", number.into()));
        }
        let group = u64::from((number - 1) / self.group_inodes);
        let place = self.descriptor_place(group);
        let mut descriptor = vec![0; self.descriptor_bytes];
        read(place.block, place.offset, &mut descriptor)?;
        let mut table = u64::from(le32(&descriptor, 0x08));
        if self.descriptor_bytes >= 64 {
            table |= u64::from(le32(&descriptor, 0x28)) << 32;
        }
        let index = u64::from((number - 1) % self.group_inodes);
        let in_block = (self.block_bytes / self.inode_bytes) as u64;
        let block = table.checked_add(index / in_block).filter(|_| table != 0);
        Ok(Place {
            block: block.ok_or(Error::damaged("the inodes of group", group))?,
            offset: (index % in_block) as usize * self.inode_bytes,
        })
    }

    /// Where a group's descriptor is: behind the superblock, or in the first group of its meta
    /// group.
    fn descriptor_place(&self, group: u64) -> Place {
        let in_block = (self.block_bytes / self.descriptor_bytes) as u64;
        let meta_group = group / in_block;
        let is_meta = self.incompatible & META_GROUPS != 0 && meta_group >= self.first_meta_group;
        let block = match is_meta {
            // With blocks of 1024 bytes the superblock is block 1, else in block 0.
            false => PLACE_BYTES / self.block_bytes as u64 + 1 + meta_group,
            true => {
                let first = meta_group * in_block;
                let start = self.first_block + first * self.group_blocks;
                start + u64::from(self.has_superblock(first))
            }
        };
        Place {
            block,
            offset: (group % in_block) as usize * self.descriptor_bytes,
        }
    }

    /// Whether a group begins with a copy of the superblock.
    fn has_superblock(&self, group: u64) -> bool {
        if group == 0 {
            return true;
        }
        if self.compatible & SPARSE_SUPERBLOCKS_2 != 0 {
            return self.copies.contains(&group);
        }
        let is_power_of = |base: u64| {
            let mut power = base;
            while power < group {
                power = power.saturating_mul(base);
            }
            power == group
        };
        self.read_only & SPARSE_SUPERBLOCKS == 0
            || group == 1
            || [3, 5, 7].into_iter().any(is_power_of)
    }
}

/// A CRC-32C from a state on, without the inversions at the start and the end.
pub(super) fn raw_crc32c(state: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!state, bytes)
}
