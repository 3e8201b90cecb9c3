//! Inodes.
//!
//! ```text
//! 00 mode     10 changed    1c blocks         64 generation        80 bytes beyond 128 in use
//! 02 user     14 deleted    20 flags          68 block of          82 checksum, high
//! 04 size     18 group      28 60 bytes:         attributes        84, 88, 8c rest of ctime,
//! 08 atime    1a links         blocks, or     6c size, high           mtime, atime
//! 0c ctime                     content        78 user, 7a group, high; 7c checksum
//! ```

use super::superblock::{Superblock, raw_crc32c};
use crate::bytes::{le16, le32, part};
use crate::error::{Error, Result};
use crate::file_system::{Attributes, Kind, Time};

const HUGE: u32 = 0x4_0000;
const ENCRYPTED: u32 = 0x800;
const NAME_TREE: u32 = 0x1000;
const EXTENTS: u32 = 0x8_0000;
const INLINE: u32 = 0x1000_0000;

/// What a file keeps beside its content.
#[derive(Debug)]
pub(super) struct Inode {
    pub(super) number: u32,
    pub(super) size_bytes: u64,
    mode: u32,
    flags: u32,
    /// Where checksums of its blocks begin; `None` if there are none.
    pub(super) seed: Option<u32>,
    /// All of it.
    bytes: Vec<u8>,
}

impl Inode {
    /// Takes it apart.
    pub(super) fn decode(number: u32, bytes: Vec<u8>, of: &Superblock) -> Result<Inode> {
        if let Some(seed) = of.seed {
            check(number, &bytes, seed)?;
        }
        let mut inode = Inode {
            number,
            size_bytes: u64::from(le32(&bytes, 0x04)),
            mode: u32::from(le16(&bytes, 0)),
            flags: le32(&bytes, 0x20),
            seed: of.seed.map(|seed| own_seed(number, &bytes, seed)),
            bytes,
        };
        let has_high_size = match inode.kind() {
            Some(Kind::File) => true,
            Some(Kind::Directory) => of.has_large_directories(),
            _ => false,
        };
        if has_high_size {
            inode.size_bytes |= u64::from(le32(&inode.bytes, 0x6c)) << 32;
        }
        let is_sound = inode.kind().is_some() && inode.size_bytes <= i64::MAX as u64;
        match is_sound {
            true => Ok(inode),
            false => Err(Error::damaged("inode", number.into())),
        }
    }

    pub(super) fn kind(&self) -> Option<Kind> {
        Kind::of_mode(self.mode)
    }

    pub(super) fn is_encrypted(&self) -> bool {
        self.flags & ENCRYPTED != 0
    }

    pub(super) fn is_inline(&self) -> bool {
        self.flags & INLINE != 0
    }

    /// Whether a directory has a tree by which names are found.
    pub(super) fn has_name_tree(&self) -> bool {
        self.flags & NAME_TREE != 0
    }

    pub(super) fn has_extents(&self) -> bool {
        self.flags & EXTENTS != 0
    }

    /// The 60 bytes for blocks or content.
    pub(super) fn root(&self) -> &[u8] {
        part(&self.bytes, 0x28..0x64)
    }

    /// What lies behind the fixed part: attributes, if there are any.
    pub(super) fn tail(&self) -> &[u8] {
        let used = 128 + usize::from(le16(&self.bytes, 0x80));
        match self.bytes.len() > 128 {
            true => part(&self.bytes, used..self.bytes.len()),
            false => &[],
        }
    }

    /// The target of a symbolic link without blocks.
    pub(super) fn short_target(&self) -> Option<&[u8]> {
        let attributes = if le32(&self.bytes, 0x68) == 0 {
            0
        } else {
            self.blocks_field()
        };
        let is_short = self.size_bytes < 60
            && !self.is_inline()
            && !self.is_encrypted()
            // Attributes take one block, or cluster; the content would take one more.
            && (self.blocks_field() == 0 || (attributes > 0 && !self.has_blocks()));
        is_short.then(|| self.root())
    }

    /// Whether the 60 bytes look like numbers of blocks, and not like text.
    fn has_blocks(&self) -> bool {
        if self.has_extents() {
            return le16(self.root(), 0) == 0xf30a;
        }
        part(self.root(), 4..60).iter().all(|byte| *byte == 0)
    }

    fn blocks_field(&self) -> u64 {
        u64::from(le32(&self.bytes, 0x1c)) | u64::from(le16(&self.bytes, 0x74)) << 32
    }

    pub(super) fn attributes(&self, of: &Superblock) -> Result<Attributes> {
        let kind = self
            .kind()
            .ok_or(Error::damaged("inode", self.number.into()))?;
        let bytes = &self.bytes;
        let unit = match self.flags & HUGE != 0 {
            true => of.block_bytes as u64 / 512,
            false => 1,
        };
        let owner = |low, high| u32::from(le16(bytes, low)) | u32::from(le16(bytes, high)) << 16;
        let is_device = matches!(kind, Kind::CharacterDevice | Kind::BlockDevice);
        // The first is the old form, the same but for large numbers.
        let numbers = [0, 4].map(|at| le32(self.root(), at));
        let device = if numbers[0] != 0 {
            numbers[0]
        } else {
            numbers[1]
        };
        Ok(Attributes {
            kind,
            permissions: self.mode & 0o7777,
            inode: self.number.into(),
            links: le16(bytes, 0x1a).into(),
            owner: Some((owner(0x02, 0x78), owner(0x18, 0x7a))),
            device: if is_device { device } else { 0 },
            size_bytes: self.size_bytes,
            blocks: self.blocks_field().saturating_mul(unit),
            accessed: self.time(0x08, 0x8c),
            modified: self.time(0x10, 0x88),
            changed: self.time(0x0c, 0x84),
        })
    }

    /// Seconds, and what larger inodes have of them beside: two bits more, and nanoseconds.
    fn time(&self, at: usize, more_at: usize) -> Time {
        let used = 128 + usize::from(le16(&self.bytes, 0x80));
        let more = match self.bytes.len() > 128 && used >= more_at + 4 {
            true => le32(&self.bytes, more_at),
            false => 0,
        };
        let seconds = i64::from(le32(&self.bytes, at) as i32);
        Time {
            seconds: seconds + (i64::from(more & 3) << 32),
            nanoseconds: (more >> 2).min(999_999_999),
        }
    }
}

/// Where the checksums of an inode begin: its number, and how often that was used anew.
fn own_seed(number: u32, bytes: &[u8], seed: u32) -> u32 {
    let seed = raw_crc32c(seed, &number.to_le_bytes());
    raw_crc32c(seed, part(bytes, 0x64..0x68))
}

/// Compares an inode with its checksum.
fn check(number: u32, bytes: &[u8], seed: u32) -> Result<()> {
    let has_high = bytes.len() > 128 && le16(bytes, 0x80) >= 4;
    let mut copy = bytes.to_vec();
    let low = u32::from(le16(&copy, 0x7c));
    copy[0x7c..0x7e].fill(0);
    let mut expected = low;
    if has_high {
        expected |= u32::from(le16(&copy, 0x82)) << 16;
        copy[0x82..0x84].fill(0);
    }
    let mut sum = raw_crc32c(own_seed(number, bytes, seed), &copy);
    if !has_high {
        sum &= 0xffff;
    }
    match sum == expected {
        true => Ok(()),
        false => Err(Error::damaged("the checksum of inode", number.into())),
    }
}
