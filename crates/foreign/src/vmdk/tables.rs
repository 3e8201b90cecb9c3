//! [`Tables`]: the grain tables that are in memory, within a budget.
//!
//! A table comes when a request needs it and goes when others need its room. It stays while
//! - it has entries that are not on disk: changed ones, and ones that are being written,
//! - a block was allocated whose entry is to be set in it,
//! - somebody reads it from disk: what he reads may be older than what is here.
//!
//! So what is read from disk again is never older than what was here.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use parking_lot::Mutex;

/// What is written at once at least: a sector.
const SECTOR_BYTES: usize = 512;

/// What a table takes beside its bytes, about.
const OVERHEAD_BYTES: usize = 128;

/// Which table of which extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    pub extent: u32,
    pub table: u32,
}

struct Slot {
    bytes: Box<[u8]>,
    /// Used since the hand of the clock came by.
    recent: bool,
    /// Entries that are going to be set.
    pins: u32,
    /// Sectors that differ from those on disk: those are small tables, of a few sectors.
    changed: u64,
    /// Writes of this table that are under way.
    writing: u32,
}

#[derive(Default)]
struct Inner {
    slots: HashMap<Key, Slot>,
    clock: VecDeque<Key>,
    bytes: usize,
    /// Tables with changed sectors.
    changed: Vec<Key>,
    changed_bytes: usize,
    /// How many read a table from disk.
    loading: HashMap<Key, u32>,
}

/// See the module's head.
pub(super) struct Tables {
    inner: Mutex<Inner>,
    budget_bytes: usize,
}

impl fmt::Debug for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tables({} bytes)", self.inner.lock().bytes)
    }
}

/// Sectors of a table as they were when they were taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ChangedTable {
    pub key: Key,
    /// Offset in the table, and the bytes.
    pub pieces: Vec<(usize, Vec<u8>)>,
}

/// Somebody reads a table from disk.
pub(super) struct Loading<'a> {
    tables: &'a Tables,
    key: Key,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        let mut inner = self.tables.inner.lock();
        if let Some(count) = inner.loading.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                inner.loading.remove(&self.key);
            }
        }
    }
}

impl Loading<'_> {
    /// Has the table in memory, unless another one who read it was faster.
    pub(super) fn done(self, bytes: Box<[u8]>) {
        self.tables.insert(self.key, bytes);
    }
}

impl Tables {
    pub(super) fn new(budget_bytes: usize) -> Tables {
        Tables {
            inner: Mutex::default(),
            budget_bytes,
        }
    }

    /// Looks at a table; `None` if it has to be read first.
    pub(super) fn read<T>(&self, key: Key, look: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let mut inner = self.inner.lock();
        let slot = inner.slots.get_mut(&key)?;
        slot.recent = true;
        Some(look(&slot.bytes))
    }

    /// Says that a table is going to be read from disk.
    pub(super) fn loading(&self, key: Key) -> Loading<'_> {
        *self.inner.lock().loading.entry(key).or_insert(0) += 1;
        Loading { tables: self, key }
    }

    fn insert(&self, key: Key, bytes: Box<[u8]>) {
        let mut inner = self.inner.lock();
        if inner.slots.contains_key(&key) {
            return;
        }
        inner.bytes += bytes.len() + OVERHEAD_BYTES;
        let slot = Slot {
            bytes,
            recent: true,
            pins: 0,
            changed: 0,
            writing: 0,
        };
        inner.slots.insert(key, slot);
        inner.clock.push_back(key);
        inner.evict(self.budget_bytes, key);
    }

    /// Keeps a table in memory until an entry is set with `unpin`; `false` if it is not there.
    pub(super) fn pin(&self, key: Key) -> bool {
        match self.inner.lock().slots.get_mut(&key) {
            Some(slot) => {
                slot.pins += 1;
                true
            }
            None => false,
        }
    }

    /// Takes back a [`Tables::pin`].
    pub(super) fn unpin(&self, key: Key) {
        if let Some(slot) = self.inner.lock().slots.get_mut(&key) {
            slot.pins = slot.pins.saturating_sub(1);
        }
    }

    /// Sets an entry of 4 bytes; `false` if the table is not in memory, or has no such entry.
    pub(super) fn set(&self, key: Key, index: usize, value: u32) -> bool {
        let mut inner = self.inner.lock();
        let Some(slot) = inner.slots.get_mut(&key) else {
            return false;
        };
        let at = index.saturating_mul(4);
        let Some(entry) = slot.bytes.get_mut(at..).and_then(|rest| rest.get_mut(..4)) else {
            return false;
        };
        entry.copy_from_slice(&value.to_le_bytes());
        let was_changed = slot.changed != 0;
        slot.changed |= 1 << (at / SECTOR_BYTES).min(63);
        let len = slot.bytes.len();
        if !was_changed {
            inner.changed.push(key);
            inner.changed_bytes += len + OVERHEAD_BYTES;
        }
        true
    }

    /// Takes what was changed since the last time; [`Tables::written`] has to follow.
    pub(super) fn take(&self) -> Vec<ChangedTable> {
        let mut inner = self.inner.lock();
        let mut keys = std::mem::take(&mut inner.changed);
        inner.changed_bytes = 0;
        keys.sort_unstable();
        let mut taken = Vec::with_capacity(keys.len());
        for key in keys {
            if let Some(slot) = inner.slots.get_mut(&key) {
                let changed = std::mem::take(&mut slot.changed);
                slot.writing += 1;
                let pieces = slot.bytes.chunks(SECTOR_BYTES).enumerate();
                let pieces = pieces
                    .filter(|(sector, _)| changed & 1 << (*sector).min(63) != 0)
                    .map(|(sector, bytes)| (sector * SECTOR_BYTES, bytes.to_vec()))
                    .collect();
                taken.push(ChangedTable { key, pieces });
            }
        }
        taken
    }

    /// What was taken of these tables is on disk.
    pub(super) fn written(&self, keys: &[Key]) {
        let mut inner = self.inner.lock();
        for key in keys {
            if let Some(slot) = inner.slots.get_mut(key) {
                slot.writing = slot.writing.saturating_sub(1);
            }
        }
    }

    /// Memory of tables that have changed.
    pub(super) fn changed_bytes(&self) -> usize {
        self.inner.lock().changed_bytes
    }
}

impl Inner {
    /// Makes room, but for `newest`: whoever read it is going to look at it.
    fn evict(&mut self, budget_bytes: usize, newest: Key) {
        // Twice round, as the first time may only find out what is not used.
        for _ in 0..self.clock.len() * 2 {
            if self.bytes <= budget_bytes {
                return;
            }
            let Some(key) = self.clock.pop_front() else {
                return;
            };
            let is_loading = key == newest || self.loading.contains_key(&key);
            let Some(slot) = self.slots.get_mut(&key) else {
                continue;
            };
            let is_bound = slot.pins > 0 || slot.changed != 0 || slot.writing > 0 || is_loading;
            if is_bound || std::mem::take(&mut slot.recent) {
                self.clock.push_back(key);
                continue;
            }
            self.bytes = self.bytes.saturating_sub(slot.bytes.len() + OVERHEAD_BYTES);
            self.slots.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(table: u32) -> Key {
        Key { extent: 0, table }
    }

    fn load(tables: &Tables, table: u32) {
        let loading = tables.loading(key(table));
        loading.done(vec![0; 2048].into());
    }

    fn is_there(tables: &Tables, table: u32) -> bool {
        tables.inner.lock().slots.contains_key(&key(table))
    }

    #[test]
    fn only_what_is_on_disk_goes() {
        let tables = Tables::new(4 * (2048 + OVERHEAD_BYTES));
        for table in 0..4 {
            load(&tables, table);
        }
        assert!(tables.set(key(0), 130, 7));
        assert!(tables.pin(key(1)));
        let reader = tables.loading(key(2));
        for table in 4..50 {
            load(&tables, table);
        }
        assert_eq!(
            [0, 1, 2, 3].map(|table| is_there(&tables, table)),
            [true, true, true, false]
        );
        let taken = tables.take();
        assert_eq!(taken.len(), 1);
        let (at, bytes) = &taken[0].pieces[0];
        assert_eq!((*at, bytes[8]), (512, 7));
        assert_eq!(tables.changed_bytes(), 0);
        for table in 50..100 {
            load(&tables, table);
        }
        assert!(is_there(&tables, 0), "it is being written");
        tables.written(&[key(0)]);
        tables.unpin(key(1));
        drop(reader);
        for table in 100..150 {
            load(&tables, table);
        }
        assert_eq!([0, 1, 2].map(|table| is_there(&tables, table)), [false; 3]);
        assert!(tables.inner.lock().bytes <= tables.budget_bytes);
    }

    #[test]
    fn who_reads_last_does_not_undo_a_change() {
        let tables = Tables::new(1 << 20);
        let slow = tables.loading(key(0));
        load(&tables, 0);
        assert!(tables.set(key(0), 0, 9));
        slow.done(vec![0; 2048].into());
        assert_eq!(tables.read(key(0), |bytes| bytes[0]), Some(9));
        assert!(!tables.set(key(0), 512, 1), "beyond the table");
    }
}
