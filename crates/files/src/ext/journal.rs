//! The journal of ext3 and ext4: blocks that were changed and may not be in their places yet.
//! They are not written there, but read from the journal.
//!
//! ```text
//! every block of it:   0 c0 3b 39 98   4 kind   8 transaction            (high byte first)
//! superblock:         0c bytes of a block   10 blocks   14 first   18 transaction   1c start
//!                     28 incompatible features   54 blocks for fast commits
//! descriptor:         0c tags, each for one of the blocks behind it
//! revocation:         0c bytes in use   10 numbers of blocks
//! ```
//!
//! A transaction counts if its commit block is there. A block that it revokes is not taken from
//! it, nor from what came before.
//!
//! Invariant: a journal is read once from its start to its end, however its blocks lead on.

use std::collections::{HashMap, HashSet};

use super::{Ext, blocks};
use crate::bytes::{be16, be32, part};
use crate::error::{Error, Result};

const MARK: u32 = 0xc03b_3998;
const HEAD_BYTES: usize = 12;
const UUID_BYTES: usize = 16;
/// Checksums stand at the end of a block, in bytes.
const TAIL_BYTES: usize = 4;

const DESCRIPTOR: u32 = 1;
const COMMIT: u32 = 2;
const SUPERBLOCK: u32 = 4;
const REVOCATION: u32 = 5;

const REVOCATIONS: u32 = 0x1;
const WIDE: u32 = 0x2;
const ASYNC_COMMIT: u32 = 0x4;
const CHECKSUMS_2: u32 = 0x8;
const CHECKSUMS_3: u32 = 0x10;
const FAST_COMMIT: u32 = 0x20;
const FAST_COMMIT_BLOCKS: u32 = 256;

/// The block's first bytes were those of a journal's block, and are zeroes in it.
const ESCAPED: u16 = 0x1;
const SAME_UUID: u16 = 0x2;
const LAST: u16 = 0x8;

/// Longest journal that is read: 1 GiB with the usual blocks, which is what mkfs makes at most.
const BLOCKS_MAX: u32 = 1 << 18;

/// Where newer blocks are.
#[derive(Debug, Default)]
pub(super) struct Overlay(HashMap<u64, Newer>);

/// A block in the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Newer {
    /// Its number in the file system.
    block: u64,
    is_escaped: bool,
}

impl Overlay {
    pub(super) fn get(&self, block: u64) -> Option<Newer> {
        self.0.get(&block).copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Reads inside a block that is newer in the journal.
pub(super) fn read_newer(ext: &Ext, newer: Newer, offset: usize, bytes: &mut [u8]) -> Result<()> {
    let block_bytes = ext.superblock.block_bytes as u64;
    let at = newer.block * block_bytes + offset as u64;
    ext.source.read(at, bytes)?;
    if newer.is_escaped {
        let mark = MARK.to_be_bytes();
        for (byte, original) in bytes.iter_mut().zip(mark.iter().skip(offset)) {
            *byte = *original;
        }
    }
    Ok(())
}

/// What the journal's superblock says.
struct Journal<'a> {
    ext: &'a Ext,
    inode: super::Inode,
    first: u32,
    /// Behind the last block.
    end: u32,
    features: u32,
}

/// One transaction's changes.
#[derive(Default)]
struct Transaction {
    newer: Vec<(u64, Newer)>,
    revoked: HashSet<u64>,
}

/// Reads the journal. The file system must be without an overlay yet.
pub(super) fn read(ext: &Ext) -> Result<(Overlay, Vec<String>)> {
    let inode = ext.inode(ext.superblock.journal)?;
    let mut head = vec![0; ext.superblock.block_bytes];
    let read = ext.read_content(&inode, 0, &mut head)?;
    let at = u64::from(inode.number);
    let (len, first, start) = (be32(&head, 0x10), be32(&head, 0x14), be32(&head, 0x1c));
    let features = match be32(&head, 4) {
        SUPERBLOCK => be32(&head, 0x28),
        _ => 0,
    };
    let is_sound = read == head.len()
        && be32(&head, 0) == MARK
        && be32(&head, 0x0c) as usize == head.len()
        && u64::from(len) <= inode.size_bytes.div_ceil(head.len() as u64)
        && len <= BLOCKS_MAX;
    if !is_sound {
        return Err(Error::damaged("the journal in inode", at));
    }
    let known = REVOCATIONS | WIDE | ASYNC_COMMIT | CHECKSUMS_2 | CHECKSUMS_3 | FAST_COMMIT;
    if features & !known != 0 {
        let text = format!("a journal with features {:#x}", features & !known);
        return Err(Error::Unsupported(text));
    }
    let mut remarks = Vec::new();
    let mut end = len;
    if features & FAST_COMMIT != 0 {
        let fast = match be32(&head, 0x54) {
            0 => FAST_COMMIT_BLOCKS,
            blocks => blocks,
        };
        end = end.saturating_sub(fast);
        let text = "it was not unmounted, and its fast commits are left out: what was changed \
                    last may be missing";
        remarks.push(text.to_owned());
    }
    if start == 0 {
        return Ok((Overlay::default(), remarks));
    }
    if first == 0 || first >= end || !(first..end).contains(&start) {
        return Err(Error::damaged("the start of the journal in inode", at));
    }
    let journal = Journal {
        ext,
        inode,
        first,
        end,
        features,
    };
    Ok((journal.replay(start, be32(&head, 0x18))?, remarks))
}

impl Journal<'_> {
    fn replay(&self, start: u32, first_number: u32) -> Result<Overlay> {
        let mut overlay = Overlay::default();
        let mut transaction = Transaction::default();
        let (mut at, mut number) = (start, first_number);
        let mut left = self.end - self.first;
        let mut bytes = vec![0; self.ext.superblock.block_bytes];
        while left > 0 {
            let block = self.place(at)?;
            self.ext.read_block(block, 0, &mut bytes)?;
            if be32(&bytes, 0) != MARK || be32(&bytes, 8) != number {
                break;
            }
            (at, left) = (self.next(at), left - 1);
            match be32(&bytes, 4) {
                DESCRIPTOR => {
                    for (target, is_escaped) in self.tags(&bytes) {
                        if left == 0 {
                            return Ok(overlay);
                        }
                        let block = self.place(at)?;
                        transaction
                            .newer
                            .push((target, Newer { block, is_escaped }));
                        (at, left) = (self.next(at), left - 1);
                    }
                }
                REVOCATION => transaction.revoked.extend(self.revocations(&bytes)),
                COMMIT => {
                    apply(&mut overlay, std::mem::take(&mut transaction));
                    number = number.wrapping_add(1);
                }
                _ => break,
            }
        }
        Ok(overlay)
    }

    fn next(&self, at: u32) -> u32 {
        if at + 1 < self.end {
            at + 1
        } else {
            self.first
        }
    }

    /// Where a block of the journal is in the file system.
    fn place(&self, at: u32) -> Result<u64> {
        let run = blocks::find(self.ext, &self.inode, at.into())?;
        let there = run
            .first
            .filter(|block| *block < self.ext.superblock.blocks);
        there.ok_or(Error::damaged("block of the journal", at.into()))
    }

    fn has_tails(&self) -> bool {
        self.features & (CHECKSUMS_2 | CHECKSUMS_3) != 0
    }

    /// The blocks that follow a descriptor: their places, and whether their starts are others.
    fn tags(&self, bytes: &[u8]) -> Vec<(u64, bool)> {
        let is_wide = self.features & WIDE != 0;
        let is_third = self.features & CHECKSUMS_3 != 0;
        let tag_bytes = match (is_third, self.features & CHECKSUMS_2 != 0, is_wide) {
            (true, _, _) => 16,
            (_, checksums, is_wide) => 8 + usize::from(checksums) * 2 + usize::from(is_wide) * 4,
        };
        let end = bytes.len() - if self.has_tails() { TAIL_BYTES } else { 0 };
        let mut tags = Vec::new();
        let mut at = HEAD_BYTES;
        while at + tag_bytes <= end {
            // Version 3 has flags of 32 bits in the place of checksum and flags.
            let flags = be16(bytes, at + 6);
            let mut block = u64::from(be32(bytes, at));
            if is_wide {
                block |= u64::from(be32(bytes, at + 8)) << 32;
            }
            tags.push((block, flags & ESCAPED != 0));
            at += tag_bytes;
            if flags & SAME_UUID == 0 {
                at += UUID_BYTES;
            }
            if flags & LAST != 0 {
                break;
            }
        }
        tags
    }

    fn revocations(&self, bytes: &[u8]) -> Vec<u64> {
        let used = be32(bytes, HEAD_BYTES) as usize;
        let numbers = part(bytes, HEAD_BYTES + 4..used);
        match self.features & WIDE != 0 {
            true => numbers
                .chunks_exact(8)
                .map(|number| u64::from(be32(number, 0)) << 32 | u64::from(be32(number, 4)))
                .collect(),
            false => numbers
                .chunks_exact(4)
                .map(|number| u64::from(be32(number, 0)))
                .collect(),
        }
    }
}

fn apply(overlay: &mut Overlay, transaction: Transaction) {
    for block in &transaction.revoked {
        overlay.0.remove(block);
    }
    let kept = transaction.newer.into_iter();
    let kept = kept.filter(|(block, _)| !transaction.revoked.contains(block));
    overlay.0.extend(kept);
}
