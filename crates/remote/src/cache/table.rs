//! Which blocks may be read without looking twice, and how processes tell each other that a group was
//! thrown out.
//!
//! Each group has a *generation* in memory that all processes share, odd while the group is being
//! thrown out, and the time at which somebody used it last. A process notes beside the generation
//! that it knows which blocks it has found whole. Whoever reads such a block straight from the file
//! looks at the generation before and after: if it is another one, the bytes are not to be used.
//!
//! Invariants:
//! - A generation changes only under a claim on all of the group's entries.
//! - A block is noted as whole only for the generation that was there before its bytes were read.
//! - After a power cut the generations mean nothing, and need not: no process knows any of them.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use smallvec::SmallVec;
use vellum_io::Result;
use vellum_io::shared_memory::{SharedBuffer, SharedMemory};

use super::layout::{GROUP_BLOCKS, GROUP_BYTES};

/// A group that is used all the time has a time of use as old as this at most.
const USE_MILLISECONDS: u64 = 8000;

/// The table that processes share.
#[derive(Debug)]
pub(super) struct SharedTable {
    memory: SharedBuffer,
}

/// Milliseconds since 1970: what is filled within one second goes in the order in which it came.
fn now_milliseconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(1, |since| (since.as_millis() as u64).max(1))
}

impl SharedTable {
    /// Maps the table, which is there in the file.
    pub(super) fn map(file: &File, table: &Range<u64>) -> Result<Self> {
        let len_bytes = table.end - table.start;
        let mapped = SharedMemory::map(file.as_fd(), table.start, len_bytes)?;
        let memory = std::sync::Arc::new(mapped);
        let memory = memory.range(0, len_bytes);
        Ok(SharedTable {
            memory: memory.expect("all of what was mapped"),
        })
    }

    pub(super) fn generation(&self, group: u64) -> u64 {
        let at = (group * GROUP_BYTES) as usize;
        self.memory.load_u64(at, Ordering::Acquire)
    }

    pub(super) fn set_generation(&self, group: u64, generation: u64) {
        let at = (group * GROUP_BYTES) as usize;
        self.memory.store_u64(at, generation, Ordering::SeqCst);
    }

    /// When the group was used last; 0: there is nothing of it.
    pub(super) fn used_milliseconds(&self, group: u64) -> u64 {
        let at = (group * GROUP_BYTES + 8) as usize;
        self.memory.load_u64(at, Ordering::Relaxed)
    }

    pub(super) fn set_used(&self, group: u64, milliseconds: u64) {
        let at = (group * GROUP_BYTES + 8) as usize;
        self.memory.store_u64(at, milliseconds, Ordering::Relaxed);
    }
}

/// What this process knows of a group.
#[derive(Debug, Default)]
struct Known {
    generation: AtomicU64,
    /// A bit for each block that was found whole in this generation.
    whole: AtomicU64,
    /// A bit for each of these that a sync which began afterwards has made durable.
    durable: AtomicU64,
}

/// The generations that blocks had before they were read.
#[derive(Debug, Default)]
pub(super) struct Seen(SmallVec<[(u64, u64); 2]>);

/// The shared table and what this process knows.
#[derive(Debug)]
pub(super) struct Table {
    shared: SharedTable,
    known: Box<[Known]>,
    changes: Mutex<()>,
    /// Now, as far as users of blocks are concerned.
    clock: AtomicU64,
}

/// The blocks of a range, by group: the group, and the bits of its blocks.
fn bits_of(blocks: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
    let groups = match blocks.is_empty() {
        true => 0..0,
        false => blocks.start / GROUP_BLOCKS..blocks.end.div_ceil(GROUP_BLOCKS),
    };
    groups.map(move |group| {
        let first = blocks.start.saturating_sub(group * GROUP_BLOCKS);
        let end = (blocks.end - group * GROUP_BLOCKS).min(GROUP_BLOCKS);
        let bits = u64::MAX >> (GROUP_BLOCKS - (end - first)) << first;
        (group, bits)
    })
}

impl Table {
    pub(super) fn new(shared: SharedTable, groups: u64) -> Self {
        Table {
            shared,
            known: (0..groups).map(|_| Known::default()).collect(),
            changes: Mutex::new(()),
            clock: AtomicU64::new(now_milliseconds()),
        }
    }

    pub(super) fn shared(&self) -> &SharedTable {
        &self.shared
    }

    /// Looks at the time, before blocks are used.
    pub(super) fn tick(&self) {
        self.clock.store(now_milliseconds(), Ordering::Relaxed);
    }

    /// If all of the blocks are known to be whole: what to ask [`Table::is_unchanged`] with when they
    /// have been read. The disk may have lost some of them since, unless they are [durable](Table::durable).
    pub(super) fn whole(&self, blocks: Range<u64>) -> Option<Seen> {
        self.known_as(blocks, |known| &known.whole)
    }

    /// As [`Table::whole`], if all of the blocks are durable, too: their bytes need not be compared again.
    pub(super) fn durable(&self, blocks: Range<u64>) -> Option<Seen> {
        self.known_as(blocks, |known| &known.durable)
    }

    fn known_as(&self, blocks: Range<u64>, which: fn(&Known) -> &AtomicU64) -> Option<Seen> {
        let mut seen = Seen::default();
        for (group, bits) in bits_of(blocks) {
            let known = &self.known[group as usize];
            let generation = self.shared.generation(group);
            let is_known = generation.is_multiple_of(2)
                && known.generation.load(Ordering::Acquire) == generation
                && which(known).load(Ordering::Acquire) & bits == bits;
            if !is_known {
                return None;
            }
            self.touch(group);
            seen.0.push((group, generation));
        }
        Some(seen)
    }

    /// Whether nothing was thrown out since.
    pub(super) fn is_unchanged(&self, seen: &Seen) -> bool {
        // Nothing that was read is moved behind this.
        fence(Ordering::SeqCst);
        let mut groups = seen.0.iter();
        groups.all(|&(group, generation)| self.shared.generation(group) == generation)
    }

    /// Notes that a block was found whole, or made so, while its group had this generation.
    pub(super) fn set_whole(&self, block: u64, generation: u64) {
        let group = block / GROUP_BLOCKS;
        let known = &self.known[group as usize];
        let _changing = self.changes.lock();
        if known.generation.load(Ordering::Relaxed) != generation {
            // What is known of another generation is forgotten first: nobody takes it for this one's.
            known.durable.store(0, Ordering::Release);
            known.whole.store(0, Ordering::Release);
            known.generation.store(generation, Ordering::Release);
        }
        known
            .whole
            .fetch_or(1 << (block % GROUP_BLOCKS), Ordering::Release);
        self.touch(group);
    }

    /// Notes that a block is durable which was found whole, or made so, while its group had this generation.
    pub(super) fn set_durable(&self, block: u64, generation: u64) {
        let known = &self.known[(block / GROUP_BLOCKS) as usize];
        let bit = 1 << (block % GROUP_BLOCKS);
        let _changing = self.changes.lock();
        let is_whole = known.whole.load(Ordering::Relaxed) & bit != 0;
        if known.generation.load(Ordering::Relaxed) == generation && is_whole {
            known.durable.fetch_or(bit, Ordering::Release);
        }
    }

    /// Notes that blocks have to be looked at again.
    pub(super) fn forget(&self, blocks: Range<u64>) {
        let _changing = self.changes.lock();
        for (group, bits) in bits_of(blocks) {
            let known = &self.known[group as usize];
            known.durable.fetch_and(!bits, Ordering::Release);
            known.whole.fetch_and(!bits, Ordering::Release);
        }
    }

    /// Notes that a group is used now.
    fn touch(&self, group: u64) {
        let now = self.clock.load(Ordering::Relaxed);
        if self.shared.used_milliseconds(group) + USE_MILLISECONDS <= now {
            self.shared.set_used(group, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(groups: u64) -> (Table, SharedTable) {
        let file = tempfile::tempfile().unwrap();
        let place = 4096..4096 + groups * GROUP_BYTES;
        file.set_len(place.end).unwrap();
        let map = || SharedTable::map(&file, &place).unwrap();
        (Table::new(map(), groups), map())
    }

    #[test]
    fn ranges_are_cut_into_groups() {
        let bits = |range| bits_of(range).collect::<Vec<_>>();
        assert_eq!(bits(0..1), [(0, 1)]);
        assert_eq!(bits(0..64), [(0, u64::MAX)]);
        assert_eq!(bits(7..7), []);
        assert_eq!(bits(63..66), [(0, 1 << 63), (1, 3)]);
        assert_eq!(bits(130..131), [(2, 4)]);
        assert_eq!(bits(10..200)[1], (1, u64::MAX));
    }

    #[test]
    fn blocks_are_known_until_somebody_else_throws_them_out() {
        let (table, other) = table(3);
        let whole = |blocks| table.whole(blocks).is_some();
        assert!(!whole(60..70));
        for block in 60..70 {
            table.set_whole(block, 0);
        }
        let seen = table.whole(60..70).unwrap();
        assert!(table.is_unchanged(&seen) && !whole(59..70) && !whole(60..71));
        assert!(other.used_milliseconds(0) > 0 && other.used_milliseconds(2) == 0);
        // Another process throws out the second group while it is read.
        other.set_generation(1, 1);
        assert!(!table.is_unchanged(&seen) && !whole(64..65));
        other.set_generation(1, 2);
        assert!(!table.is_unchanged(&seen) && !whole(64..65) && whole(60..64));
        // What is filled anew is known again, and nothing of before.
        table.set_durable(64, 0);
        table.set_whole(64, 2);
        assert!(table.durable(64..65).is_none());
        table.set_durable(64, 2);
        table.set_durable(65, 2);
        assert!(table.durable(64..65).is_some() && table.durable(65..66).is_none());
        table.forget(60..64);
        assert!(!whole(60..61) && whole(64..65));
        assert!(whole(64..65) && !whole(65..66) && !table.is_unchanged(&seen));
    }
}
