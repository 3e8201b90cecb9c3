//! Where the blocks of a file are: trees of extents, or of single blocks.
//!
//! Invariant: a tree is as deep as its kind allows, and each lookup visits one node of a depth,
//! so that nodes which lead to each other do no harm.

use super::inode::Inode;
use super::{Ext, checksums};
use crate::bytes::{le16, le32};
use crate::error::{Error, Result};

/// Neighbouring blocks of a file that are neighbours on the disk as well, or a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    /// The first one's number; `None` for zeroes.
    pub(super) first: Option<u64>,
    /// At least one.
    pub(super) blocks: u64,
}

const DEPTH_MAX: u16 = 5;
const EXTENT_MARK: u16 = 0xf30a;
const NODE_HEAD_BYTES: usize = 12;
const NODE_ENTRY_BYTES: usize = 12;
/// Of an extent whose blocks read as zeroes, the length is so much more.
const UNWRITTEN: u64 = 0x8000;
/// Blocks that the inode itself names, without trees.
const DIRECT: u64 = 12;

/// The run that begins with the block `index` of a file.
pub(super) fn find(ext: &Ext, inode: &Inode, index: u64) -> Result<Run> {
    if inode.has_extents() {
        return find_extent(ext, inode, index);
    }
    find_mapped(ext, inode, index)
}

fn find_extent(ext: &Ext, inode: &Inode, index: u64) -> Result<Run> {
    let damaged = || Error::damaged("the extents of inode", inode.number.into());
    let mut node = inode.root().to_vec();
    let mut depth = None;
    // Where the next node's first block is: a hole ends there.
    let mut end = u64::MAX;
    loop {
        let (mark, entries) = (le16(&node, 0), usize::from(le16(&node, 2)));
        let own_depth = le16(&node, 6);
        let fits = NODE_HEAD_BYTES + entries * NODE_ENTRY_BYTES <= node.len();
        let is_expected = match depth {
            None => own_depth <= DEPTH_MAX,
            Some(above) => own_depth + 1 == above,
        };
        if mark != EXTENT_MARK || !fits || !is_expected {
            return Err(damaged());
        }
        let entry = |number: usize| &node[NODE_HEAD_BYTES + number * NODE_ENTRY_BYTES..];
        let first = |number: usize| u64::from(le32(entry(number), 0));
        // The last one that does not begin behind the block.
        let (mut low, mut high) = (0, entries);
        while low < high {
            let middle = low.midpoint(high);
            match first(middle) <= index {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        if low < entries {
            end = end.min(first(low));
        }
        let hole = Run {
            first: None,
            blocks: end.saturating_sub(index).max(1),
        };
        let Some(found) = low.checked_sub(1) else {
            return Ok(hole);
        };
        if own_depth == 0 {
            return Ok(run(entry(found), index).unwrap_or(hole));
        }
        let below = u64::from(le32(entry(found), 4)) | u64::from(le16(entry(found), 8)) << 32;
        let mut bytes = vec![0; ext.superblock.block_bytes];
        ext.read_block(below, 0, &mut bytes)?;
        checksums::check_extents(inode, &bytes)?;
        (node, depth) = (bytes, Some(own_depth));
    }
}

/// What of an extent begins with a block; `None` if it ends before that.
fn run(extent: &[u8], index: u64) -> Option<Run> {
    let (first, len) = (u64::from(le32(extent, 0)), u64::from(le16(extent, 4)));
    let start = u64::from(le32(extent, 8)) | u64::from(le16(extent, 6)) << 32;
    let (len, is_written) = match len > UNWRITTEN {
        true => (len - UNWRITTEN, false),
        false => (len, true),
    };
    let skipped = index - first;
    (skipped < len).then(|| Run {
        first: is_written.then_some(start + skipped),
        blocks: len - skipped,
    })
}

fn find_mapped(ext: &Ext, inode: &Inode, index: u64) -> Result<Run> {
    let numbers = (ext.superblock.block_bytes / 4) as u64;
    let one = |block: u32| Run {
        first: (block != 0).then_some(block.into()),
        blocks: 1,
    };
    if index < DIRECT {
        let inode_numbers = inode.root();
        let at = |index: u64| le32(inode_numbers, index as usize * 4);
        return Ok(with_neighbours(one(at(index)), index, DIRECT, at));
    }
    let mut rest = index - DIRECT;
    // Trees of one, two and three levels.
    let mut covered = numbers;
    for (level, root) in (1..=3_u32).zip(12..) {
        if rest < covered {
            let block = le32(inode.root(), root * 4);
            return descend(ext, block, level, rest, numbers);
        }
        rest -= covered;
        covered = covered.saturating_mul(numbers);
    }
    Err(Error::damaged("the size of inode", inode.number.into()))
}

fn descend(ext: &Ext, root: u32, levels: u32, index: u64, numbers: u64) -> Result<Run> {
    let mut block = root;
    for level in (0..levels).rev() {
        // So many blocks of the file are below one number of this level.
        let below = numbers.pow(level);
        let own = index / below % numbers;
        if block == 0 {
            let covered = below * numbers;
            return Ok(Run {
                first: None,
                blocks: covered - index % covered,
            });
        }
        if level > 0 {
            let mut bytes = [0; 4];
            ext.read_block(block.into(), own as usize * 4, &mut bytes)?;
            block = u32::from_le_bytes(bytes);
            continue;
        }
        let mut bytes = vec![0; ext.superblock.block_bytes];
        ext.read_block(block.into(), 0, &mut bytes)?;
        let at = |index: u64| le32(&bytes, index as usize * 4);
        let found = Run {
            first: (at(own) != 0).then_some(at(own).into()),
            blocks: 1,
        };
        return Ok(with_neighbours(found, own, numbers, at));
    }
    // There is one level at least.
    Err(Error::damaged("a tree of blocks at block", root.into()))
}

/// The run with what follows it in the same list.
fn with_neighbours(mut run: Run, index: u64, end: u64, at: impl Fn(u64) -> u32) -> Run {
    while index + run.blocks < end {
        let expected = run.first.map_or(0, |first| first + run.blocks);
        if u64::from(at(index + run.blocks)) != expected {
            break;
        }
        run.blocks += 1;
    }
    run
}
