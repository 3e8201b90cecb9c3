//! [`TableCache`]: L2 slices and refcount blocks in memory, by byte budget.
//!
//! The cache knows tables only as bytes at a host offset. A hit is a plain call
//! under a short lock of one shard. Misses load in parallel; requests that miss
//! the same table join one load.
//!
//! What may be on disk after a crash, by state of a table:
//! - *clean*: exactly what is in memory (perhaps not durable yet);
//! - *dirty*: some older state;
//! - *writing*: some older state, or the state when the write-back began.
//!
//! Invariant: only clean tables are evicted, so a load never finds stale bytes.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event_listener::Event;
use vellum_storage::{Buffer, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TableState {
    Clean,
    Dirty,
    /// A copy is on its way to disk.
    Writing,
    /// A copy is on its way to disk, and the table has changed since.
    WritingDirty,
}

struct Table {
    key: u64,
    bytes: Box<[u8]>,
    state: TableState,
    /// Used since the clock's hand passed.
    referenced: bool,
}

impl Table {
    fn clean(key: u64, bytes: &[u8]) -> Self {
        Table {
            key,
            bytes: bytes.into(),
            state: TableState::Clean,
            referenced: true,
        }
    }
}

enum Slot {
    Loading(Arc<Event>),
    Loaded(usize),
}

#[derive(Default)]
struct Shard {
    by_key: HashMap<u64, Slot>,
    tables: Vec<Option<Table>>,
    free: Vec<usize>,
    hand: usize,
    loaded: usize,
}

impl Shard {
    fn table(&mut self, key: u64) -> Option<&mut Table> {
        match self.by_key.get(&key) {
            Some(Slot::Loaded(index)) => self.tables[*index].as_mut(),
            _ => None,
        }
    }

    /// Evicts clean tables by CLOCK until fewer than `capacity` are left, or
    /// nothing clean is found.
    fn make_room(&mut self, capacity: usize) {
        let mut steps = 2 * self.tables.len();
        while self.loaded >= capacity.max(1) && steps > 0 {
            steps -= 1;
            self.hand = (self.hand + 1) % self.tables.len();
            let Some(table) = &mut self.tables[self.hand] else {
                continue;
            };
            if table.state != TableState::Clean {
                continue;
            }
            if std::mem::take(&mut table.referenced) {
                continue;
            }
            let key = table.key;
            self.remove(key);
        }
    }

    fn insert(&mut self, table: Table) {
        self.remove(table.key);
        let key = table.key;
        let index = match self.free.pop() {
            Some(index) => {
                self.tables[index] = Some(table);
                index
            }
            None => {
                self.tables.push(Some(table));
                self.tables.len() - 1
            }
        };
        self.by_key.insert(key, Slot::Loaded(index));
        self.loaded += 1;
    }

    fn remove(&mut self, key: u64) -> Option<Table> {
        match self.by_key.remove(&key)? {
            Slot::Loaded(index) => {
                self.free.push(index);
                self.loaded -= 1;
                self.tables[index].take()
            }
            Slot::Loading(event) => {
                event.notify(usize::MAX);
                None
            }
        }
    }
}

/// A copy of a dirty table on its way to disk.
#[derive(Debug)]
pub(crate) struct WriteBack {
    /// The table's host offset in bytes.
    pub(crate) key: u64,
    /// Its content when the write-back began.
    pub(crate) bytes: Buffer,
}

/// Tables of one length in memory; see the module's head.
pub(crate) struct TableCache {
    table_bytes: usize,
    capacity: AtomicUsize,
    dirty: AtomicUsize,
    shards: Vec<Mutex<Shard>>,
}

const MAX_SHARDS: usize = 16;
const MIN_TABLES_PER_SHARD: usize = 8;

impl TableCache {
    /// A cache for tables of `table_bytes` bytes within `budget_bytes`; at least
    /// two tables are kept.
    pub(crate) fn new(table_bytes: usize, budget_bytes: u64) -> Self {
        let capacity = usize::try_from(budget_bytes / table_bytes as u64).unwrap_or(usize::MAX);
        let capacity = capacity.max(2);
        let shards = (capacity / MIN_TABLES_PER_SHARD).clamp(1, MAX_SHARDS);
        TableCache {
            table_bytes,
            capacity: AtomicUsize::new(capacity),
            dirty: AtomicUsize::new(0),
            shards: (0..shards).map(|_| Mutex::default()).collect(),
        }
    }

    /// Length of a table in bytes.
    pub(crate) fn table_bytes(&self) -> usize {
        self.table_bytes
    }

    /// Whether so many tables are dirty that evicting clean ones soon will not
    /// make room any more.
    pub(crate) fn wants_writeback(&self) -> bool {
        2 * self.dirty.load(Ordering::Relaxed) > self.capacity.load(Ordering::Relaxed)
    }

    /// Whether hardly any table could be evicted.
    pub(crate) fn is_mostly_dirty(&self) -> bool {
        8 * self.dirty.load(Ordering::Relaxed) > 7 * self.capacity.load(Ordering::Relaxed)
    }

    /// Whether every table is on disk as it is in memory.
    pub(crate) fn is_clean(&self) -> bool {
        self.dirty.load(Ordering::Acquire) == 0
    }

    fn shard(&self, key: u64) -> MutexGuard<'_, Shard> {
        let table = key / self.table_bytes as u64;
        let hash = table.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let index = (hash as usize) % self.shards.len();
        self.shards[index]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks into the table at host offset `key`, if it is in memory.
    pub(crate) fn with<R>(&self, key: u64, look: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let mut shard = self.shard(key);
        let table = shard.table(key)?;
        table.referenced = true;
        Some(look(&table.bytes))
    }

    /// Changes the table at host offset `key`, if it is in memory; it is dirty
    /// from then on.
    pub(crate) fn update<R>(&self, key: u64, change: impl FnOnce(&mut [u8]) -> R) -> Option<R> {
        let mut shard = self.shard(key);
        let table = shard.table(key)?;
        table.referenced = true;
        table.state = match table.state {
            TableState::Clean => {
                self.dirty.fetch_add(1, Ordering::Relaxed);
                TableState::Dirty
            }
            TableState::Dirty => TableState::Dirty,
            TableState::Writing | TableState::WritingDirty => TableState::WritingDirty,
        };
        Some(change(&mut table.bytes))
    }

    /// Puts a table into memory whose bytes are on disk already.
    #[cfg(test)]
    pub(crate) fn insert_clean(&self, key: u64, bytes: &[u8]) {
        let capacity = self.capacity.load(Ordering::Relaxed) / self.shards.len();
        let mut shard = self.shard(key);
        if shard.table(key).is_some() {
            return;
        }
        shard.make_room(capacity);
        shard.insert(Table::clean(key, bytes));
    }

    /// Forgets a table, changed or not: its cluster has another use now.
    pub(crate) fn forget(&self, key: u64) {
        let table = self.shard(key).remove(key);
        if table.is_some_and(|table| table.state != TableState::Clean) {
            self.dirty.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Brings the table at host offset `key` into memory: by `read`, unless it is
    /// there or another request is reading it, which is then waited for.
    ///
    /// The table may be evicted again before the caller looks: look, and load
    /// again.
    pub(crate) async fn load(
        &self,
        key: u64,
        read: impl Future<Output = Result<Buffer>>,
    ) -> Result<()> {
        loop {
            let listener = {
                let mut shard = self.shard(key);
                match shard.by_key.get(&key) {
                    Some(Slot::Loaded(_)) => return Ok(()),
                    Some(Slot::Loading(event)) => event.listen(),
                    None => {
                        shard
                            .by_key
                            .insert(key, Slot::Loading(Arc::new(Event::new())));
                        break;
                    }
                }
            };
            listener.await;
        }
        // If this future is dropped or the read fails, the guard wakes the
        // others, and one of them reads in our place.
        let loading = Loading { cache: self, key };
        let bytes = read.await?;
        debug_assert_eq!(bytes.len(), self.table_bytes);
        let mut shard = self.shard(key);
        // `forget` while we were reading: the bytes are of no use to anybody.
        if let Some(Slot::Loading(event)) = shard.by_key.get(&key) {
            let event = event.clone();
            shard.make_room(self.capacity.load(Ordering::Relaxed) / self.shards.len());
            shard.by_key.remove(&key);
            shard.insert(Table::clean(key, &bytes));
            event.notify(usize::MAX);
        }
        drop(shard);
        std::mem::forget(loading);
        Ok(())
    }

    /// Copies every dirty table for writing. Only one write-back may run at a
    /// time; it must be ended with [`TableCache::end_writeback`].
    pub(crate) fn begin_writeback(&self) -> Vec<WriteBack> {
        let mut copies = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            for table in shard.tables.iter_mut().flatten() {
                if table.state == TableState::Dirty {
                    table.state = TableState::Writing;
                    copies.push(WriteBack {
                        key: table.key,
                        bytes: Buffer::copy_of(&table.bytes),
                    });
                }
            }
        }
        copies.sort_by_key(|copy| copy.key);
        copies
    }

    /// Ends a write-back: the tables are clean if they were `written` and have
    /// not changed since, else dirty.
    pub(crate) fn end_writeback(&self, keys: impl IntoIterator<Item = u64>, written: bool) {
        for key in keys {
            let mut shard = self.shard(key);
            let Some(table) = shard.table(key) else {
                continue;
            };
            table.state = match table.state {
                TableState::Writing if written => {
                    self.dirty.fetch_sub(1, Ordering::Relaxed);
                    TableState::Clean
                }
                TableState::Clean => TableState::Clean,
                _ => TableState::Dirty,
            };
        }
    }

    /// Drops every clean table that was not used since the last call.
    pub(crate) fn drop_unused(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let unused: Vec<u64> = shard
                .tables
                .iter_mut()
                .flatten()
                .filter_map(|table| {
                    let used = std::mem::take(&mut table.referenced);
                    (table.state == TableState::Clean && !used).then_some(table.key)
                })
                .collect();
            for key in unused {
                shard.remove(key);
            }
        }
    }

    /// Bytes of tables in memory now.
    #[cfg(test)]
    pub(crate) fn loaded_bytes(&self) -> usize {
        let shards = self.shards.iter();
        shards
            .map(|s| s.lock().unwrap_or_else(PoisonError::into_inner).loaded)
            .sum::<usize>()
            * self.table_bytes
    }
}

/// Withdraws an unfinished load when dropped.
struct Loading<'a> {
    cache: &'a TableCache,
    key: u64,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        let mut shard = self.cache.shard(self.key);
        if matches!(shard.by_key.get(&self.key), Some(Slot::Loading(_))) {
            shard.remove(self.key);
        }
    }
}

impl std::fmt::Debug for TableCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TableCache({} bytes a table)", self.table_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::cell::Cell;

    const TABLE: usize = 512;

    fn filled(byte: u8) -> Buffer {
        let mut bytes = Buffer::zeroed(TABLE);
        bytes.fill(byte);
        bytes
    }

    fn load_now(cache: &TableCache, key: u64, byte: u8) {
        cache
            .load(key, async { Ok(filled(byte)) })
            .now_or_never()
            .unwrap()
            .unwrap();
    }

    #[test]
    fn stays_within_its_budget_and_keeps_dirty_tables() {
        let cache = TableCache::new(TABLE, 4 * TABLE as u64);
        load_now(&cache, 0, 7);
        cache.update(0, |bytes| bytes[0] = 8).unwrap();
        for table in 1..100 {
            load_now(&cache, table * TABLE as u64, 1);
            assert!(cache.loaded_bytes() <= 4 * TABLE);
        }
        assert_eq!(cache.with(0, |bytes| bytes[0]), Some(8));
    }

    #[test]
    fn a_table_changed_during_writeback_stays_dirty() {
        let cache = TableCache::new(TABLE, 4 * TABLE as u64);
        load_now(&cache, 0, 0);
        cache.update(0, |bytes| bytes[0] = 1).unwrap();
        let first = cache.begin_writeback();
        cache.update(0, |bytes| bytes[0] = 2).unwrap();
        assert!(
            cache.begin_writeback().is_empty(),
            "one write of a table at a time"
        );
        cache.end_writeback(first.iter().map(|w| w.key), true);
        let second = cache.begin_writeback();
        assert_eq!((first[0].bytes[0], second[0].bytes[0]), (1, 2));
        cache.end_writeback([0], true);
        assert!(cache.begin_writeback().is_empty());
        assert_eq!(cache.dirty.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn loads_are_joined_and_survive_an_abandoned_leader() {
        let cache = TableCache::new(TABLE, 4 * TABLE as u64);
        let reads = Cell::new(0);
        let mut leader = Box::pin(cache.load(0, std::future::pending()));
        assert!(leader.as_mut().now_or_never().is_none());
        let mut follower = Box::pin(cache.load(0, async {
            reads.set(reads.get() + 1);
            Ok(filled(3))
        }));
        assert!(follower.as_mut().now_or_never().is_none());
        drop(leader);
        follower
            .as_mut()
            .now_or_never()
            .expect("reads in the leader's place")
            .unwrap();
        assert_eq!((reads.get(), cache.with(0, |bytes| bytes[0])), (1, Some(3)));
    }

    #[test]
    fn unused_tables_are_dropped_at_the_second_call() {
        let cache = TableCache::new(TABLE, 4 * TABLE as u64);
        load_now(&cache, 0, 1);
        cache.drop_unused();
        assert_eq!(cache.loaded_bytes(), TABLE);
        cache.drop_unused();
        assert_eq!(cache.loaded_bytes(), 0);
    }
}
