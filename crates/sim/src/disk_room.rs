//! `Room`: the blocks that a simulated file has in its file system, and its quota.
//!
//! As on ext4 or XFS a write to a hole allocates blocks, a write to allocated blocks needs none, and
//! punching returns whole blocks. A change is checked as a whole when it completes: it gets all
//! the blocks that it needs, or fails with ENOSPC and changes nothing.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::sparse_bytes::SparseBytes;

/// The size of a block of the file system.
pub const BLOCK_BYTES: u64 = 4096;

/// What a change of a file does to the file's blocks. Ranges are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum BlockUse {
    /// Nothing.
    #[default]
    None,
    /// Allocates every block that the range touches.
    Allocates(Range<u64>),
    /// Frees every block that lies inside of the range.
    Frees(Range<u64>),
}

/// See the module's head. A file without a quota is not tracked.
#[derive(Debug, Default)]
pub(crate) struct Room {
    allocated: BTreeSet<u64>,
    quota_blocks: Option<u64>,
}

impl Room {
    /// Sets the quota of a file that holds `pages`; `None` removes it. Blocks beyond a smaller
    /// quota stay allocated.
    pub(crate) fn set_quota(&mut self, quota_blocks: Option<u64>, pages: &SparseBytes) {
        match (self.quota_blocks, quota_blocks) {
            (_, None) => self.allocated.clear(),
            (None, Some(_)) => self.allocated = pages.allocated_pages().collect(),
            (Some(_), Some(_)) => {}
        }
        self.quota_blocks = quota_blocks;
    }

    /// Applies a change to the blocks; `false`, and nothing is changed, if it exceeds the quota.
    pub(crate) fn apply(&mut self, change: &BlockUse) -> bool {
        let Some(quota_blocks) = self.quota_blocks else {
            return true;
        };
        match change {
            BlockUse::None => {}
            BlockUse::Allocates(range) if range.is_empty() => {}
            BlockUse::Frees(range) => {
                let first = range.start.div_ceil(BLOCK_BYTES);
                let inside = first..(range.end / BLOCK_BYTES).max(first);
                let freed: Vec<u64> = self.allocated.range(inside).copied().collect();
                for block in freed {
                    self.allocated.remove(&block);
                }
            }
            BlockUse::Allocates(range) => {
                let touched = range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
                let is_new = |block: &u64| !self.allocated.contains(block);
                let new: Vec<u64> = touched.filter(is_new).collect();
                let after = (self.allocated.len() + new.len()) as u64;
                if !new.is_empty() && after > quota_blocks {
                    return false;
                }
                self.allocated.extend(new);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_holes_need_blocks_and_punching_returns_whole_ones() {
        let mut pages = SparseBytes::new();
        pages.write(0, &[1; 4097]);
        let mut room = Room::default();
        assert!(room.apply(&BlockUse::Allocates(0..1 << 30)), "no quota");
        room.set_quota(Some(3), &pages);
        assert!(room.apply(&BlockUse::Allocates(8192..8193)));
        assert!(!room.apply(&BlockUse::Allocates(8192..12_289)));
        assert!(room.apply(&BlockUse::Allocates(0..12_288)));
        assert!(room.apply(&BlockUse::Frees(1..8192)));
        assert!(room.apply(&BlockUse::Allocates(12_288..12_289)));
        room.set_quota(Some(1), &pages);
        assert!(room.apply(&BlockUse::Allocates(8192..12_288)), "in place");
        assert!(!room.apply(&BlockUse::Allocates(4096..4097)));
        room.set_quota(Some(4), &pages);
        assert!(room.apply(&BlockUse::Allocates(4096..4097)));
    }
}
