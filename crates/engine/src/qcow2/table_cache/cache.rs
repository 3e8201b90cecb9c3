//! [`TableCache`]: L2 slices and refcount blocks in memory, by byte budget.
//!
//! The cache knows tables only as bytes at a host offset, and a [`Codec`] that can
//! make clean ones smaller. A hit is a plain call under a short lock of one shard.
//! Misses load in parallel; requests that miss the same table join one load, which the shard's lock names:
//! a load may take neighbours with it, and `forget` takes it back.
//!
//! The budget counts what memory is really used: the bytes of the tables as they
//! are kept, and all bookkeeping. An adaptive budget starts small and grows while
//! tables are missed that were evicted not long ago.
//!
//! What may be on disk after a crash, by state of a table:
//! - *clean*: exactly what is in memory (perhaps not durable yet);
//! - *dirty*: some older state;
//! - *writing*: some older state, or the state when the write-back began.
//!
//! Invariants:
//! - Only clean tables are evicted, so a load never finds stale bytes.
//! - Only dirty tables, and the last clean one, take memory beyond the budget.
//! - A load ends only its own claim, so bytes read before a table was forgotten never become one.
//! - A commit is requested when dirty tables take half the budget, or 4 MiB in a cache that holds all tables.

mod codec;
mod ghosts;
mod shard;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};

pub(crate) use codec::{Codec, Content, RawTables};
use event_listener::{Event, EventListener};
pub(crate) use shard::packed_cost_bytes;
use shard::{Origin, Shard, Stored, TableState, hash};
use smallvec::SmallVec;
use vellum_io::{Buffer, Result};

use crate::qcow2::cache_budget::CacheShare;

/// How much memory a cache may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Budget {
    /// At most so many bytes.
    pub(crate) max_bytes: u64,
    /// Take only what turns out to be needed.
    pub(crate) adaptive: bool,
    /// All tables fit into that, so none is ever evicted for another.
    pub(crate) holds_all: bool,
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
pub(crate) struct TableCache<C: Codec = RawTables> {
    codec: C,
    table_bytes: usize,
    max_bytes: AtomicUsize,
    adaptive: AtomicBool,
    holds_all: AtomicBool,
    /// The budget now: `max_bytes`, or less where it adapts.
    limit_bytes: AtomicUsize,
    used_bytes: AtomicUsize,
    tables: AtomicUsize,
    dirty: AtomicUsize,
    share: Arc<CacheShare>,
    /// Where others that need room begin to take it.
    next_shard: AtomicUsize,
    shards: Box<[CountedShard<C>]>,
}

/// A shard, and what was looked for in it. Whoever holds its lock counts, so that counting is no more
/// than a store beside the lock; whoever wants to know takes none.
struct CountedShard<C: Codec> {
    shard: Mutex<Shard<C>>,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl<C: Codec> Default for CountedShard<C> {
    fn default() -> Self {
        CountedShard {
            shard: Mutex::default(),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }
}

/// Adds one; nobody else writes there meanwhile.
#[inline]
fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

const MAX_SHARDS: usize = 16;
/// Less than this is not worth a shard of its own.
const MIN_SHARD_BYTES: usize = 64 << 10;
/// What an adaptive cache starts with.
const START_BYTES: usize = 256 << 10;
/// The smallest budget that counts for requesting a commit, in a cache that holds all tables. No table is evicted
/// there, so a commit, with its one or two syncs, only bounds what a later flush has to write.
const HOLDS_ALL_BYTES: usize = 8 << 20;
/// A table that comes back too early makes an adaptive cache grow by so many.
const GROWTH_TABLES: usize = 4;
/// Where growing is possible it pays to remember more than what fits now.
const ADAPTIVE_GHOSTS_PER_TABLE: usize = 4;

impl TableCache<RawTables> {
    /// A cache for tables of `table_bytes` bytes within `budget_bytes`, kept as
    /// they are on disk.
    pub(crate) fn new(table_bytes: usize, budget_bytes: u64) -> Self {
        let budget = Budget {
            max_bytes: budget_bytes,
            adaptive: false,
            holds_all: false,
        };
        TableCache::with_codec(RawTables, table_bytes, budget)
    }

    /// Looks into the table at host offset `key`, if it is in memory.
    pub(crate) fn with<R>(&self, key: u64, look: impl FnOnce(&[u8]) -> R) -> Option<R> {
        self.with_content(key, |content| match content {
            Content::Raw(bytes) => look(bytes),
            Content::Packed(never) => match *never {},
        })
    }
}

impl<C: Codec> TableCache<C> {
    /// A cache for tables of `table_bytes` bytes; at least two are kept.
    pub(crate) fn with_codec(codec: C, table_bytes: usize, budget: Budget) -> Self {
        let max_bytes = usize::try_from(budget.max_bytes).unwrap_or(usize::MAX);
        let shards = (max_bytes / MIN_SHARD_BYTES).clamp(1, MAX_SHARDS);
        let cache = TableCache {
            codec,
            table_bytes,
            max_bytes: AtomicUsize::new(0),
            adaptive: AtomicBool::new(false),
            holds_all: AtomicBool::new(false),
            limit_bytes: AtomicUsize::new(0),
            used_bytes: AtomicUsize::new(0),
            tables: AtomicUsize::new(0),
            dirty: AtomicUsize::new(0),
            share: Arc::default(),
            next_shard: AtomicUsize::new(0),
            shards: (0..shards).map(|_| CountedShard::default()).collect(),
        };
        cache.set_budget(budget);
        cache
    }

    /// Has what the cache takes count as a part of what many take together.
    pub(crate) fn share_with(&mut self, share: &Arc<CacheShare>) {
        self.share = share.clone();
    }

    /// Changes the budget; what is too much now is evicted.
    pub(crate) fn set_budget(&self, budget: Budget) {
        let max_bytes = usize::try_from(budget.max_bytes).unwrap_or(usize::MAX);
        let limit = match budget.adaptive {
            true => self.used_bytes.load(Ordering::Relaxed).max(START_BYTES),
            false => max_bytes,
        };
        self.max_bytes.store(max_bytes, Ordering::Relaxed);
        self.adaptive.store(budget.adaptive, Ordering::Relaxed);
        self.holds_all.store(budget.holds_all, Ordering::Relaxed);
        self.limit_bytes
            .store(limit.min(max_bytes), Ordering::Relaxed);
        self.make_room(0, 0);
    }

    /// Length of a table in bytes.
    pub(crate) fn table_bytes(&self) -> usize {
        self.table_bytes
    }

    /// Whether dirty tables take more than so many percent of the budget, which counts as [`HOLDS_ALL_BYTES`] at
    /// least where all tables fit.
    fn is_dirty_beyond(&self, percent: usize) -> bool {
        let dirty_bytes = self.dirty.load(Ordering::Relaxed) * self.table_bytes;
        let max_bytes = self.max_bytes.load(Ordering::Relaxed);
        let part = self.share.part_of(max_bytes);
        let most_bytes = match part == max_bytes && self.holds_all.load(Ordering::Relaxed) {
            true => max_bytes.max(HOLDS_ALL_BYTES),
            false => part,
        };
        dirty_bytes > most_bytes.max(2 * self.table_bytes) / 100 * percent
    }

    /// Whether so many tables are dirty that evicting clean ones soon will not
    /// make room any more.
    pub(crate) fn wants_writeback(&self) -> bool {
        self.is_dirty_beyond(50)
    }

    /// Whether hardly any table could be evicted.
    pub(crate) fn is_mostly_dirty(&self) -> bool {
        self.is_dirty_beyond(90)
    }

    /// Whether every table is on disk as it is in memory.
    pub(crate) fn is_clean(&self) -> bool {
        self.dirty.load(Ordering::Acquire) == 0
    }

    /// The codec.
    pub(crate) fn codec(&self) -> &C {
        &self.codec
    }

    fn shard_index(&self, key: u64) -> usize {
        (hash(key) >> 48) as usize % self.shards.len()
    }

    fn lock(&self, index: usize) -> MutexGuard<'_, Shard<C>> {
        self.shards[index].shard.lock()
    }

    fn shard(&self, key: u64) -> MutexGuard<'_, Shard<C>> {
        self.lock(self.shard_index(key))
    }

    /// Counts what a shard takes now; call it before letting a changed one go.
    fn account(&self, shard: &mut Shard<C>, tables_before: usize) {
        let real = shard.real_bytes();
        let counted = std::mem::replace(&mut shard.counted_bytes, real);
        // Wrapping: the difference may be negative.
        self.used_bytes
            .fetch_add(real.wrapping_sub(counted), Ordering::Relaxed);
        self.share.account(counted, real);
        self.tables
            .fetch_add(shard.len().wrapping_sub(tables_before), Ordering::Relaxed);
    }

    /// Looks into the table at host offset `key`, if it is in memory.
    #[inline]
    pub(crate) fn with_content<R>(
        &self,
        key: u64,
        look: impl FnOnce(Content<'_, C::Packed>) -> R,
    ) -> Option<R> {
        let place = &self.shards[self.shard_index(key)];
        let mut shard = place.shard.lock();
        let Some(table) = shard.used(key) else {
            count(&place.misses);
            return None;
        };
        count(&place.hits);
        Some(look(table.stored.content()))
    }

    /// Whether a table is in memory, on disk as it is there, and `look` says so of it. No use of it.
    pub(crate) fn is_clean_and(
        &self,
        key: u64,
        look: impl FnOnce(Content<'_, C::Packed>) -> bool,
    ) -> bool {
        let mut shard = self.shard(key);
        let table = shard.get(key);
        table.is_some_and(|table| table.state == TableState::Clean && look(table.stored.content()))
    }

    /// How often a table was looked for and there, and how often not. Whoever has missed one looks
    /// again when it is loaded: that is no hit.
    pub(crate) fn looks(&self) -> (u64, u64) {
        let sum = |counter: fn(&CountedShard<C>) -> &AtomicU64| -> u64 {
            let all = self.shards.iter();
            all.map(|place| counter(place).load(Ordering::Relaxed))
                .sum()
        };
        let misses = sum(|place| &place.misses);
        (sum(|place| &place.hits).saturating_sub(misses), misses)
    }

    /// Changes the table at host offset `key`, if it is in memory; it is dirty
    /// from then on.
    pub(crate) fn update<R>(&self, key: u64, change: impl FnOnce(&mut [u8]) -> R) -> Option<R> {
        let index = self.shard_index(key);
        let mut shard = self.lock(index);
        let (bytes, before) = shard.change(key, &self.codec, self.table_bytes)?;
        let result = change(bytes);
        if before == TableState::Clean {
            self.dirty.fetch_add(1, Ordering::Relaxed);
            let tables = shard.len();
            self.account(&mut shard, tables);
            drop(shard);
            self.hold_dirty();
            self.make_room(index, 0);
            self.share.make_room(0);
        }
        Some(result)
    }

    /// Lets an adaptive cache grow with its dirty tables, which cannot be evicted.
    fn hold_dirty(&self) {
        if self.adaptive.load(Ordering::Relaxed) {
            let dirty_bytes = self.dirty.load(Ordering::Relaxed) * self.table_bytes;
            let wanted = (2 * dirty_bytes).min(self.max_bytes.load(Ordering::Relaxed));
            self.limit_bytes.fetch_max(wanted, Ordering::Relaxed);
        }
    }

    /// Makes an adaptive cache grow: a table came back soon after its eviction.
    fn grow(&self, table_bytes: usize) {
        if self.adaptive.load(Ordering::Relaxed) {
            let limit = self.limit_bytes.load(Ordering::Relaxed);
            let wanted = limit.saturating_add(GROWTH_TABLES * table_bytes);
            let wanted = wanted.min(self.max_bytes.load(Ordering::Relaxed));
            self.limit_bytes.fetch_max(wanted, Ordering::Relaxed);
        }
    }

    /// Evicts clean tables until `need_bytes` more are within the budget, or one
    /// clean table is left; those of shard `first` go first.
    fn make_room(&self, first: usize, need_bytes: usize) {
        self.evict_while(first, || {
            let used = self.used_bytes.load(Ordering::Relaxed);
            used.saturating_add(need_bytes) > self.limit_bytes.load(Ordering::Relaxed)
        });
    }

    /// Evicts clean tables until so many bytes are free, or one clean table is left.
    pub(crate) fn evict(&self, wanted_bytes: usize) {
        let goal = self.used_bytes().saturating_sub(wanted_bytes);
        // Not always the same shard.
        let first = self.next_shard.fetch_add(1, Ordering::Relaxed) % self.shards.len();
        self.evict_while(first, || self.used_bytes() > goal);
        for index in 0..self.shards.len() {
            let mut shard = self.lock(index);
            shard.give_spare_back();
            let tables = shard.len();
            self.account(&mut shard, tables);
        }
    }

    /// Evicts clean tables, those of shard `first` first, while that is wanted and more than one
    /// is left.
    fn evict_while(&self, first: usize, is_wanted: impl Fn() -> bool) {
        let per_table = match self.adaptive.load(Ordering::Relaxed) {
            true => ADAPTIVE_GHOSTS_PER_TABLE,
            false => 1,
        };
        let too_much = || is_wanted() && self.tables.load(Ordering::Relaxed) > 1;
        for offset in 0..self.shards.len() {
            if !too_much() {
                return;
            }
            let mut shard = self.lock((first + offset) % self.shards.len());
            while too_much() {
                let tables = shard.len();
                let progress = shard.make_room(&self.codec, per_table);
                self.account(&mut shard, tables);
                if !progress {
                    break;
                }
            }
        }
    }

    /// Puts a table into memory whose bytes are on disk already.
    pub(crate) fn insert_clean(&self, key: u64, bytes: &[u8]) {
        if let Claim::Mine(claim) = self.claim(key) {
            self.insert_loaded(key, bytes, &claim, Origin::Request);
        }
    }

    /// Ends the load of a table that this caller has claimed.
    fn insert_loaded(&self, key: u64, bytes: &[u8], claim: &Arc<Event>, origin: Origin) {
        let (stored, incompressible) = match self.codec.pack(bytes) {
            Some(packed) => (Stored::Packed(packed), false),
            None => (Stored::Raw(bytes.into()), true),
        };
        let stored_bytes = stored.heap_bytes::<C>();
        let index = self.shard_index(key);
        let came_back = self.lock(index).take_ghost(key);
        let origin = if came_back { Origin::Ghost } else { origin };
        if came_back {
            self.grow(stored_bytes);
        }
        self.make_room(index, stored_bytes);
        self.share.make_room(stored_bytes);
        let mut shard = self.lock(index);
        // `forget` while we were reading: the bytes are of no use to anybody, not
        // even to those who are loading the table anew.
        if shard.withdraw(key, claim) {
            let tables = shard.len();
            shard.insert(key, stored, origin, incompressible);
            self.account(&mut shard, tables);
        }
    }

    /// Forgets a table, changed or not: its cluster has another use now.
    pub(crate) fn forget(&self, key: u64) {
        let mut shard = self.shard(key);
        if let Some(claim) = shard.loading.remove(&key) {
            claim.notify(usize::MAX);
        }
        let tables = shard.len();
        let Some(table) = shard.remove(key) else {
            return;
        };
        self.account(&mut shard, tables);
        if table.state != TableState::Clean {
            self.dirty.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn claim(&self, key: u64) -> Claim {
        let mut shard = self.shard(key);
        if shard.contains(key) {
            return Claim::Loaded;
        }
        if let Some(event) = shard.loading.get(&key) {
            return Claim::Joined(event.listen());
        }
        let claim = Arc::new(Event::new());
        shard.loading.insert(key, claim.clone());
        Claim::Mine(claim)
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
        self.load_run(key, 1, false, |_| read).await
    }

    /// Like [`TableCache::load`], and with it up to `most` tables in all that lie
    /// behind it: those that nobody has loaded or loads. `read` is given how many
    /// tables to read. What a `scan` loads leaves early.
    pub(crate) async fn load_run<F>(
        &self,
        key: u64,
        most: usize,
        scan: bool,
        read: impl FnOnce(usize) -> F,
    ) -> Result<()>
    where
        F: Future<Output = Result<Buffer>>,
    {
        // If this future is dropped or the read fails, the claims wake the
        // others, and one of them reads in our place.
        let mut loading = Loading {
            cache: self,
            key,
            claims: SmallVec::new(),
        };
        loop {
            match self.claim(key) {
                Claim::Loaded => return Ok(()),
                Claim::Joined(listener) => listener.await,
                Claim::Mine(claim) => break loading.claims.push(claim),
            }
        }
        while loading.claims.len() < most
            && let Claim::Mine(claim) = self.claim(loading.key_of(loading.claims.len()))
        {
            loading.claims.push(claim);
        }
        let bytes = read(loading.claims.len()).await?;
        debug_assert_eq!(bytes.len(), loading.claims.len() * self.table_bytes);
        let origin = match scan {
            true => Origin::Scan,
            false => Origin::Request,
        };
        // The one that is needed comes last, so that the others do not evict it.
        let pieces = bytes.chunks_exact(self.table_bytes).enumerate();
        for (table, piece) in pieces.rev() {
            let claim = &loading.claims[table];
            self.insert_loaded(loading.key_of(table), piece, claim, origin);
        }
        loading.claims.clear();
        Ok(())
    }

    /// How many tables a scan may bring in at once: an eighth of the budget.
    pub(crate) fn scan_tables(&self) -> usize {
        self.limit_bytes.load(Ordering::Relaxed) / 8 / self.table_bytes
    }

    /// Copies every dirty table for writing. Only one write-back may run at a
    /// time; it must be ended with [`TableCache::end_writeback`].
    pub(crate) fn begin_writeback(&self) -> Vec<WriteBack> {
        let mut copies = Vec::new();
        for index in 0..self.shards.len() {
            self.lock(index).for_each_dirty(|table| {
                if table.state == TableState::Dirty
                    && let Stored::Raw(bytes) = &table.stored
                {
                    table.state = TableState::Writing;
                    copies.push(WriteBack {
                        key: table.key,
                        bytes: Buffer::copy_of(bytes),
                    });
                }
            });
        }
        copies.sort_by_key(|copy| copy.key);
        copies
    }

    /// Ends a write-back: the tables are clean if they were `written` and have
    /// not changed since, else dirty.
    pub(crate) fn end_writeback(&self, keys: impl IntoIterator<Item = u64>, written: bool) {
        for key in keys {
            let mut shard = self.shard(key);
            let Some(table) = shard.get(key) else {
                continue;
            };
            match table.state {
                TableState::Writing if written => {
                    shard.mark_clean(key);
                    self.dirty.fetch_sub(1, Ordering::Relaxed);
                }
                TableState::Clean => {}
                _ => table.state = TableState::Dirty,
            }
        }
        self.make_room(0, 0);
        self.share.make_room(0);
    }

    /// Drops every clean table that was not used since the last call, and packs
    /// the others. An adaptive cache shrinks to what is left.
    pub(crate) fn drop_unused(&self) {
        for index in 0..self.shards.len() {
            let mut shard = self.lock(index);
            let tables = shard.len();
            shard.drop_unused(&self.codec);
            self.account(&mut shard, tables);
        }
        if self.adaptive.load(Ordering::Relaxed) {
            let used = self.used_bytes.load(Ordering::Relaxed);
            let wanted = used.saturating_add(used / 4).max(START_BYTES);
            self.limit_bytes.fetch_min(wanted, Ordering::Relaxed);
        }
    }

    /// Bytes of memory that tables and bookkeeping take now.
    pub(crate) fn used_bytes(&self) -> usize {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of memory that the cache may take now.
    pub(crate) fn limit_bytes(&self) -> usize {
        self.limit_bytes.load(Ordering::Relaxed)
    }
}

enum Claim {
    Loaded,
    /// Somebody is loading the table.
    Joined(EventListener),
    /// The caller loads it; the event tells its end.
    Mine(Arc<Event>),
}

/// Withdraws an unfinished load when dropped.
struct Loading<'a, C: Codec> {
    cache: &'a TableCache<C>,
    key: u64,
    claims: SmallVec<[Arc<Event>; 1]>,
}

impl<C: Codec> Loading<'_, C> {
    fn key_of(&self, table: usize) -> u64 {
        self.key + (table * self.cache.table_bytes) as u64
    }
}

impl<C: Codec> Drop for Loading<'_, C> {
    fn drop(&mut self) {
        for (table, claim) in self.claims.iter().enumerate() {
            let key = self.key_of(table);
            self.cache.shard(key).withdraw(key, claim);
        }
    }
}

impl<C: Codec> std::fmt::Debug for TableCache<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TableCache({} bytes a table)", self.table_bytes)
    }
}

#[cfg(test)]
mod tests;
