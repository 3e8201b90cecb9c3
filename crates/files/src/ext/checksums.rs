//! Checksums of blocks that belong to an inode: nodes of its extents, and blocks of a directory.
//!
//! ```text
//! extents:    behind the room for entries: checksum u32
//! names:      an entry at the end: inode 0 u32, length 12 u16, 0 u8, 0xde u8, checksum u32
//! name tree:  behind the room for entries: 0 u32, checksum u32
//! ```
//!
//! All begin with the number and the generation of the inode, so that a block of another file is noticed, too.

use super::inode::Inode;
use super::superblock::raw_crc32c;
use crate::bytes::{le16, le32, part};
use crate::error::{Error, Result};

/// Head and entries of a node of extents.
const EXTENT_BYTES: usize = 12;
/// The last entry of a block of names.
const TAIL_BYTES: usize = 12;
const TAIL_KIND: u8 = 0xde;
/// Entries of a tree of names.
const HASH_BYTES: usize = 8;

fn compare(is_right: bool, what: &'static str, inode: &Inode) -> Result<()> {
    match is_right {
        true => Ok(()),
        false => Err(Error::damaged(what, inode.number.into())),
    }
}

/// Compares a block of extents with its checksum.
pub(super) fn check_extents(inode: &Inode, block: &[u8]) -> Result<()> {
    let Some(seed) = inode.seed else {
        return Ok(());
    };
    let at = EXTENT_BYTES + EXTENT_BYTES * usize::from(le16(block, 4));
    let is_right = at + 4 <= block.len() && raw_crc32c(seed, &block[..at]) == le32(block, at);
    compare(
        is_right,
        "the checksum of a block of extents of inode",
        inode,
    )
}

/// Compares a block of a directory, the first one or not, with its checksum.
pub(super) fn check_directory(inode: &Inode, is_first: bool, block: &[u8]) -> Result<()> {
    let Some(seed) = inode.seed else {
        return Ok(());
    };
    let is_right = match hash_entries_at(inode, is_first, block) {
        Some(at) => are_hashes_right(seed, block, at),
        None => are_names_right(seed, block),
    };
    compare(is_right, "the checksum of a block of directory", inode)
}

/// Where the entries of a tree of names begin, if the block is a node of one.
fn hash_entries_at(inode: &Inode, is_first: bool, block: &[u8]) -> Option<usize> {
    if !inode.has_name_tree() {
        return None;
    }
    if is_first {
        // Behind the entries of the directory itself and the one above, and what is said of the tree.
        return Some(32);
    }
    // Such a node is one entry without a file, as long as the block.
    let is_whole = match usize::from(le16(block, 4)) {
        0 | 0xffff => block.len() == 0x1_0000,
        len => len == block.len(),
    };
    (le32(block, 0) == 0 && is_whole).then_some(8)
}

fn are_hashes_right(seed: u32, block: &[u8], at: usize) -> bool {
    let (limit, count) = (
        usize::from(le16(block, at)),
        usize::from(le16(block, at + 2)),
    );
    let (tail, end) = (at + limit * HASH_BYTES, at + count * HASH_BYTES);
    if count > limit || tail + 8 > block.len() {
        return false;
    }
    let mut sum = raw_crc32c(seed, &block[..end]);
    sum = raw_crc32c(sum, part(block, tail..tail + 4));
    // The checksum counts as zero.
    raw_crc32c(sum, &[0; 4]) == le32(block, tail + 4)
}

fn are_names_right(seed: u32, block: &[u8]) -> bool {
    let Some(at) = block.len().checked_sub(TAIL_BYTES) else {
        return false;
    };
    let is_tail = le32(block, at) == 0
        && usize::from(le16(block, at + 4)) == TAIL_BYTES
        && part(block, at + 6..at + 8) == [0, TAIL_KIND];
    is_tail && raw_crc32c(seed, &block[..at]) == le32(block, at + 8)
}
