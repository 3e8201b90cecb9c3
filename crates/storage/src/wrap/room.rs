//! [`SmallStorage`]: a storage whose file system has so much room, and no more.
//!
//! As on ext4 or XFS, only what is written to a hole takes room: what has its blocks is
//! overwritten in place however full the file system is. Punching gives blocks back.

use std::collections::BTreeSet;
use std::ops::Range;

use parking_lot::Mutex;
use vellum_io::{Error, Io};

use super::{Call, Operation, Policy, Wrapped};

const BLOCK_BYTES: u64 = 4096;
const ENOSPC: i32 = 28;

/// A storage that takes no more room than there is.
pub type SmallStorage = Wrapped<Room>;

#[derive(Debug, Default)]
struct Blocks {
    taken: BTreeSet<u64>,
    /// How many more there are; `None`: as many as are wanted.
    left: Option<u64>,
}

/// The blocks that a [`SmallStorage`] has, and those that are left.
#[derive(Debug, Default)]
pub struct Room(Mutex<Blocks>);

impl SmallStorage {
    /// Lets the storage take so many bytes more; `None`: as many as are wanted, as at first.
    pub fn set_left_bytes(&self, left_bytes: Option<u64>) {
        self.policy.0.lock().left = left_bytes.map(|bytes| bytes / BLOCK_BYTES);
    }

    /// How many bytes there are left, if there is a bound.
    pub fn left_bytes(&self) -> Option<u64> {
        let left = self.policy.0.lock().left;
        left.map(|blocks| blocks * BLOCK_BYTES)
    }

    /// Counts blocks as taken that the storage below has already.
    pub fn note_taken(&self, range: Range<u64>) {
        self.policy.0.lock().taken.extend(touched(&range));
    }
}

/// The blocks that a range touches.
fn touched(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES)
}

/// The blocks that lie wholly inside of a range.
fn inside(range: &Range<u64>) -> Range<u64> {
    let first = range.start.div_ceil(BLOCK_BYTES);
    first..(range.end / BLOCK_BYTES).max(first)
}

impl Blocks {
    /// Takes what is not taken of some blocks; all of it, or nothing.
    fn take(&mut self, blocks: Range<u64>) -> bool {
        let new: Vec<u64> = blocks.filter(|block| !self.taken.contains(block)).collect();
        let left = match self.left {
            None => None,
            Some(left) => match left.checked_sub(new.len() as u64) {
                None => return false,
                left => left,
            },
        };
        self.left = left;
        self.taken.extend(new);
        true
    }

    fn give_back(&mut self, blocks: Range<u64>) {
        let gone: Vec<u64> = self.taken.range(blocks).copied().collect();
        for block in &gone {
            self.taken.remove(block);
        }
        self.left = self.left.map(|left| left + gone.len() as u64);
    }
}

impl Policy for Room {
    fn free_bytes(&self) -> Option<u64> {
        let left = self.0.lock().left;
        Some(left.map_or(u64::MAX, |blocks| blocks * BLOCK_BYTES))
    }

    fn handle<T: 'static>(&self, call: Call, start: impl FnOnce() -> Io<T> + 'static) -> Io<T> {
        let range = call.offset_bytes..call.offset_bytes.saturating_add(call.len_bytes);
        let mut blocks = self.0.lock();
        let has_room = match call.operation {
            Operation::Write | Operation::WriteZeroes | Operation::Allocate => {
                range.is_empty() || blocks.take(touched(&range))
            }
            Operation::Discard => {
                blocks.give_back(inside(&range));
                true
            }
            Operation::Truncate => {
                blocks.give_back(inside(&(range.start..u64::MAX)));
                true
            }
            Operation::Read | Operation::Flush | Operation::BlockStatus => true,
        };
        drop(blocks);
        match has_room {
            true => start(),
            false => {
                let error = Error::from_errno("write", ENOSPC);
                Io::ready(Err(error.target("full").at(range.start)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vellum_io::lane::block_on;
    use vellum_io::{Buffer, Buffers, Result};

    use super::*;
    use crate::{MemStorage, Storage, WriteFlags};

    fn write(storage: &SmallStorage, offset_bytes: u64, len: usize) -> Result<Buffers> {
        let buffers = Buffers::from_buf([Buffer::zeroed(len)]);
        block_on(storage.write(offset_bytes, buffers, WriteFlags::default()))
    }

    #[test]
    fn what_has_its_blocks_is_overwritten_when_nothing_is_left() {
        let storage = SmallStorage::new(Arc::new(MemStorage::new()));
        assert!(write(&storage, 0, 8192).is_ok());
        storage.set_left_bytes(Some(4096));
        assert!(write(&storage, 4096, 4096).is_ok());
        assert_eq!(write(&storage, 8192, 8192).unwrap_err().errno(), ENOSPC);
        assert!(write(&storage, 8192, 512).is_ok());
        assert_eq!(storage.left_bytes(), Some(0));
        assert!(block_on(storage.allocate(16384, 1)).is_err());
        // Of two blocks one is punched as a whole.
        assert!(block_on(storage.discard(0, 8191)).is_ok());
        assert_eq!(storage.left_bytes(), Some(4096));
        assert!(block_on(storage.allocate(16384, 1)).is_ok());
        assert!(block_on(storage.truncate(4096)).is_ok());
        assert_eq!(storage.left_bytes(), Some(3 * 4096));
    }
}
