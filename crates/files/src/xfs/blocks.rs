//! Where the blocks of a file are: extents in order, listed by the inode or by a tree.
//!
//! ```text
//! extent: 1 bit zeroes   54 bits first block of the file   52 bits block   21 bits blocks
//! node:   BMAP or BMA3   4 level   6 entries   8, 16 neighbours   (version 5: 24 place, 32 LSN,
//!         40 UUID, 56 inode, 64 checksum)   first blocks   blocks of nodes below
//! ```
//!
//! Invariant: a tree is as deep as its root says, and no deeper than [`LEVELS_MAX`]; each lookup
//! visits one node of a level, so that nodes which lead to each other do no harm.

use super::Xfs;
use super::inode::{Form, Inode};
use super::superblock::is_intact;
use crate::bytes::{be16, be64, has, part};
use crate::error::{Error, Result};

/// Neighbouring blocks of a file that are neighbours on the disk as well, or a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    /// The first one's number; `None` for zeroes.
    pub(super) first: Option<u64>,
    /// At least one.
    pub(super) blocks: u64,
    /// Nothing is kept for it, not even room.
    pub(super) is_hole: bool,
}

const LEVELS_MAX: u16 = 9;
const EXTENT_BYTES: usize = 16;
const ROOT_HEAD_BYTES: usize = 4;
const CHECKSUM_AT: usize = 64;
const OWNER_AT: usize = 56;

/// An extent, taken apart.
#[derive(Debug, Clone, Copy)]
struct Extent {
    start: u64,
    first: u64,
    blocks: u64,
    is_written: bool,
}

impl Extent {
    fn decode(bytes: &[u8], number: usize) -> Extent {
        let at = number * EXTENT_BYTES;
        let (high, low) = (be64(bytes, at), be64(bytes, at + 8));
        Extent {
            start: high << 1 >> 10,
            first: (high & 0x1ff) << 43 | low >> 21,
            blocks: low & 0x1f_ffff,
            is_written: high >> 63 == 0,
        }
    }
}

/// The run that begins with the block `index` of a file.
pub(super) fn find(xfs: &Xfs, inode: &Inode, index: u64) -> Result<Run> {
    let damaged = || Error::damaged("the extents of inode", inode.number);
    let fork = inode.fork();
    match inode.form {
        Form::Extents => {
            let count = usize::try_from(inode.extents()).unwrap_or(usize::MAX);
            let len = count.checked_mul(EXTENT_BYTES);
            let extents = len.and_then(|len| fork.get(..len));
            Ok(in_list(extents.ok_or_else(damaged)?, index, u64::MAX))
        }
        Form::Tree => find_in_tree(xfs, inode, index),
        Form::Device | Form::Local => Err(damaged()),
    }
}

/// The last of `count` entries in order that does not begin behind `index`, if there is one, and
/// where the next one begins.
fn last_before(count: usize, index: u64, start: impl Fn(usize) -> u64) -> (Option<usize>, u64) {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low.midpoint(high);
        match start(middle) <= index {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    let next = if low < count { start(low) } else { u64::MAX };
    (low.checked_sub(1), next)
}

/// What begins with a block, as a list of extents has it; what follows the list begins at `end`.
fn in_list(extents: &[u8], index: u64, end: u64) -> Run {
    let extent = |number| Extent::decode(extents, number);
    let count = extents.len() / EXTENT_BYTES;
    let (found, next) = last_before(count, index, |number| extent(number).start);
    let hole = Run {
        first: None,
        blocks: next.min(end).saturating_sub(index).max(1),
        is_hole: true,
    };
    let Some(found) = found.map(extent) else {
        return hole;
    };
    let skipped = index - found.start;
    match skipped < found.blocks {
        true => Run {
            first: found.is_written.then_some(found.first + skipped),
            blocks: found.blocks - skipped,
            is_hole: false,
        },
        false => hole,
    }
}

fn find_in_tree(xfs: &Xfs, inode: &Inode, index: u64) -> Result<Run> {
    let damaged = || Error::damaged("the extents of inode", inode.number);
    let root = inode.fork();
    let mut level = be16(root, 0);
    if !(1..=LEVELS_MAX).contains(&level) {
        return Err(damaged());
    }
    // The root has no neighbours, and less room.
    let mut node = part(root, ROOT_HEAD_BYTES..root.len()).to_vec();
    let mut count = usize::from(be16(root, 2));
    let mut end = u64::MAX;
    loop {
        // Keys come first, and room for as many as there may be.
        let room = node.len() / 16;
        if count == 0 || count > room {
            return Err(damaged());
        }
        if level == 0 {
            return Ok(in_list(part(&node, 0..count * EXTENT_BYTES), index, end));
        }
        let (found, next) = last_before(count, index, |number| be64(&node, number * 8));
        end = end.min(next);
        let Some(found) = found else {
            return Ok(Run {
                first: None,
                blocks: end.saturating_sub(index).max(1),
                is_hole: true,
            });
        };
        let below = be64(&node, (room + found) * 8);
        let bytes = xfs.bytes_of_block(below)?;
        let head_bytes = check(xfs, inode, &bytes, below)?;
        level -= 1;
        if be16(&bytes, 4) != level {
            return Err(damaged());
        }
        count = usize::from(be16(&bytes, 6));
        node = part(&bytes, head_bytes..bytes.len()).to_vec();
    }
}

/// Compares a node with its checksum; how long its head is.
fn check(xfs: &Xfs, inode: &Inode, node: &[u8], block: u64) -> Result<usize> {
    let (mark, head_bytes) = match xfs.superblock.is_version_5 {
        true => (b"BMA3", 72),
        false => (b"BMAP", 24),
    };
    let is_sound = has(node, 0, mark)
        && (!xfs.superblock.is_version_5
            || (be64(node, OWNER_AT) == inode.number && is_intact(node, CHECKSUM_AT)));
    match is_sound {
        true => Ok(head_bytes),
        false => Err(Error::damaged("a node of extents in block", block)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_have_their_bits_where_they_belong() {
        let mut bytes = (1_u64 << 63 | 5 << 9 | 1).to_be_bytes().to_vec();
        bytes.extend((7_u64 << 21 | 3).to_be_bytes());
        let written = (9_u64 << 9).to_be_bytes();
        bytes.extend(written);
        bytes.extend((100_u64 << 21 | 2).to_be_bytes());
        let run = |index| in_list(&bytes, index, 20);
        let of = |first, blocks, is_hole| Run {
            first,
            blocks,
            is_hole,
        };
        assert_eq!(run(0), of(None, 5, true));
        assert_eq!(run(6), of(None, 2, false));
        assert_eq!(run(8), of(None, 1, true));
        assert_eq!(run(10), of(Some(101), 1, false));
        assert_eq!(run(11), of(None, 9, true));
        assert_eq!(Extent::decode(&bytes, 0).first, 1 << 43 | 7);
    }
}
