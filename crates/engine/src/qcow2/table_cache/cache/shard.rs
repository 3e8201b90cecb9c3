//! One shard of a [`TableCache`](super::TableCache): tables, and the order in
//! which they leave.
//!
//! Eviction is of the S3-FIFO kind. A new table goes through a small queue; only
//! if it is used again on the way it moves to the main queue, which is a clock.
//! What left lately leaves a ghost, and goes straight to the main queue when it
//! comes back. A table that a scan has loaded is not "used again" by the many
//! requests of the same pass, so a scan passes through the small queue.
//!
//! Invariants:
//! - Each clean table is in the small or the main queue, each other in the dirty
//!   one, where eviction does not look.
//! - Tables that are not clean are raw.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use event_listener::Event;

use super::Codec;
use super::Content;
use super::ghosts::Ghosts;

/// What may be on disk; see the head of [`cache`](super).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TableState {
    Clean,
    Dirty,
    /// A copy is on its way to disk.
    Writing,
    /// A copy is on its way to disk, and the table has changed since.
    WritingDirty,
}

/// The bytes of a table in memory.
#[derive(Debug)]
pub(super) enum Stored<P> {
    Raw(Box<[u8]>),
    Packed(P),
}

impl<P> Stored<P> {
    pub(super) fn content(&self) -> Content<'_, P> {
        match self {
            Stored::Raw(bytes) => Content::Raw(bytes),
            Stored::Packed(packed) => Content::Packed(packed),
        }
    }

    /// Bytes of heap, with what the allocator takes for itself.
    pub(super) fn heap_bytes<C: Codec<Packed = P>>(&self) -> usize {
        allocated(match self {
            Stored::Raw(bytes) => bytes.len(),
            Stored::Packed(packed) => C::heap_bytes(packed),
        })
    }
}

/// What the usual allocators take for a block of `len_bytes`.
fn allocated(len_bytes: usize) -> usize {
    match len_bytes {
        0 => 0,
        len_bytes => (len_bytes + 8).next_multiple_of(16).max(32),
    }
}

/// What a packed table of `heap_bytes` costs a cache, with all bookkeeping, about: how
/// full the table of tables and the map are is left to chance.
pub(crate) fn packed_cost_bytes<P>(heap_bytes: usize) -> usize {
    let place_in_map = size_of::<(u64, u32)>() + 1;
    allocated(heap_bytes) + (size_of::<Table<P>>() + place_in_map) * 4 / 3
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueName {
    Small,
    Main,
    Dirty,
}

const QUEUES: usize = 3;
const NONE: u32 = u32::MAX;
const MAX_FREQUENCY: u8 = 3;
/// The request that loads a table looks at it; one more makes it used again.
const USED_AGAIN: u8 = 2;
/// The small queue holds one part in so many of the bytes.
const SMALL_PART: usize = 10;
/// So many tables later a scan has passed: who still comes is somebody else.
const SCAN_PASSED: u32 = 8;

#[derive(Debug)]
pub(super) struct Table<P> {
    pub(super) key: u64,
    pub(super) stored: Stored<P>,
    previous: u32,
    next: u32,
    loaded_at: u32,
    pub(super) state: TableState,
    queue: QueueName,
    frequency: u8,
    /// Loaded by a scan.
    scanned: bool,
    /// Used since the last [`Shard::drop_unused`].
    used: bool,
    /// Packing does not make it smaller.
    incompressible: bool,
}

#[derive(Debug, Clone, Copy)]
struct Queue {
    head: u32,
    tail: u32,
    len_bytes: usize,
}

/// Spreads keys, which are multiples of the table's length.
#[derive(Default)]
pub(super) struct KeyHasher(u64);

/// Mixes a key so that all bits of the result depend on it.
pub(super) fn hash(key: u64) -> u64 {
    let mixed = u128::from(key) * 0x9e37_79b9_7f4a_7c15;
    (mixed >> 64) as u64 ^ mixed as u64
}

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(self.0 ^ u64::from(*byte));
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = hash(key);
    }
}

type KeyMap<T> = HashMap<u64, T, BuildHasherDefault<KeyHasher>>;

/// See the module's head.
pub(super) struct Shard<C: Codec> {
    by_key: KeyMap<u32>,
    pub(super) loading: KeyMap<Arc<Event>>,
    tables: Vec<Table<C::Packed>>,
    queues: [Queue; QUEUES],
    /// `None` until a table is evicted.
    ghosts: Option<Ghosts>,
    /// Tables loaded so far: the clock that tells scans from users.
    loads: u32,
    /// Bytes that the cache counts for this shard.
    pub(super) counted_bytes: usize,
}

impl<C: Codec> Default for Shard<C> {
    fn default() -> Self {
        let queue = Queue {
            head: NONE,
            tail: NONE,
            len_bytes: 0,
        };
        Shard {
            by_key: KeyMap::default(),
            loading: KeyMap::default(),
            tables: Vec::new(),
            queues: [queue; QUEUES],
            ghosts: None,
            loads: 0,
            counted_bytes: 0,
        }
    }
}

impl<C: Codec> Shard<C> {
    /// Tables in memory.
    pub(super) fn len(&self) -> usize {
        self.tables.len()
    }

    pub(super) fn contains(&self, key: u64) -> bool {
        self.by_key.contains_key(&key)
    }

    /// Ends a load; `false` if it is not the one that is going on.
    pub(super) fn withdraw(&mut self, key: u64, claim: &Arc<Event>) -> bool {
        let current = self.loading.get(&key);
        if !current.is_some_and(|current| Arc::ptr_eq(current, claim)) {
            return false;
        }
        self.loading.remove(&key);
        claim.notify(usize::MAX);
        true
    }

    pub(super) fn get(&mut self, key: u64) -> Option<&mut Table<C::Packed>> {
        let index = *self.by_key.get(&key)?;
        self.tables.get_mut(index as usize)
    }

    /// The table, as used by a request.
    #[inline]
    pub(super) fn used(&mut self, key: u64) -> Option<&mut Table<C::Packed>> {
        let index = *self.by_key.get(&key)?;
        let loads = self.loads;
        let table = self.tables.get_mut(index as usize)?;
        table.used = true;
        if !table.scanned || loads.wrapping_sub(table.loaded_at) >= SCAN_PASSED {
            table.frequency = (table.frequency + 1).min(MAX_FREQUENCY);
        }
        Some(table)
    }

    /// Bytes of memory that this shard takes.
    pub(super) fn real_bytes(&self) -> usize {
        let payload: usize = self.queues.iter().map(|queue| queue.len_bytes).sum();
        // The map keeps an eighth of its places free; each has a byte beside it.
        let places = match self.by_key.capacity() {
            0 => 0,
            capacity => (capacity * 8 / 7).next_power_of_two(),
        };
        payload
            + allocated(self.tables.capacity() * size_of::<Table<C::Packed>>())
            + allocated(places * (size_of::<(u64, u32)>() + 1))
            + allocated(self.ghosts.as_ref().map_or(0, Ghosts::heap_bytes))
    }

    fn link(&mut self, index: u32, name: QueueName) {
        let bytes = self.tables[index as usize].stored.heap_bytes::<C>();
        let queue = &mut self.queues[name as usize];
        queue.len_bytes += bytes;
        let last = std::mem::replace(&mut queue.tail, index);
        match last {
            NONE => queue.head = index,
            last => self.tables[last as usize].next = index,
        }
        let table = &mut self.tables[index as usize];
        (table.previous, table.next, table.queue) = (last, NONE, name);
    }

    fn unlink(&mut self, index: u32) {
        let table = &self.tables[index as usize];
        let (previous, next) = (table.previous, table.next);
        let bytes = table.stored.heap_bytes::<C>();
        let queue = &mut self.queues[table.queue as usize];
        queue.len_bytes -= bytes;
        match previous {
            NONE => queue.head = next,
            previous => self.tables[previous as usize].next = next,
        }
        match next {
            NONE => queue.tail = previous,
            next => self.tables[next as usize].previous = previous,
        }
    }

    /// Puts a clean table into memory.
    pub(super) fn insert(
        &mut self,
        key: u64,
        stored: Stored<C::Packed>,
        origin: Origin,
        incompressible: bool,
    ) {
        self.remove(key);
        let index = self.tables.len() as u32;
        if self.tables.len() == self.tables.capacity() {
            self.tables.reserve_exact((self.tables.len() / 4).max(4));
        }
        self.loads = self.loads.wrapping_add(1);
        self.tables.push(Table {
            key,
            stored,
            previous: NONE,
            next: NONE,
            loaded_at: self.loads,
            state: TableState::Clean,
            queue: QueueName::Small,
            frequency: 0,
            scanned: origin == Origin::Scan,
            used: true,
            incompressible,
        });
        self.by_key.insert(key, index);
        let queue = match origin {
            Origin::Ghost => QueueName::Main,
            Origin::Request | Origin::Scan => QueueName::Small,
        };
        self.link(index, queue);
    }

    /// Takes a table out of memory.
    pub(super) fn remove(&mut self, key: u64) -> Option<Table<C::Packed>> {
        let index = self.by_key.remove(&key)?;
        self.unlink(index);
        let removed = self.tables.swap_remove(index as usize);
        // The last table has taken the place.
        if let Some(moved) = self.tables.get(index as usize) {
            let (previous, next, queue) = (moved.previous, moved.next, moved.queue);
            self.by_key.insert(moved.key, index);
            match previous {
                NONE => self.queues[queue as usize].head = index,
                previous => self.tables[previous as usize].next = index,
            }
            match next {
                NONE => self.queues[queue as usize].tail = index,
                next => self.tables[next as usize].previous = index,
            }
        }
        Some(removed)
    }

    /// The bytes of a table, to be changed: raw, and out of eviction's reach.
    pub(super) fn change(
        &mut self,
        key: u64,
        codec: &C,
        table_bytes: usize,
    ) -> Option<(&mut [u8], TableState)> {
        let index = *self.by_key.get(&key)?;
        let before = self.used(key)?.state;
        if before == TableState::Clean {
            self.unlink(index);
            let table = &mut self.tables[index as usize];
            if let Stored::Packed(packed) = &table.stored {
                let mut bytes = vec![0; table_bytes].into_boxed_slice();
                codec.unpack(packed, &mut bytes);
                table.stored = Stored::Raw(bytes);
            }
            table.incompressible = false;
            self.link(index, QueueName::Dirty);
        }
        let table = &mut self.tables[index as usize];
        table.state = match before {
            TableState::Clean | TableState::Dirty => TableState::Dirty,
            TableState::Writing | TableState::WritingDirty => TableState::WritingDirty,
        };
        match &mut table.stored {
            Stored::Raw(bytes) => Some((bytes, before)),
            Stored::Packed(_) => None,
        }
    }

    /// A table that is on disk as it is in memory again.
    pub(super) fn mark_clean(&mut self, key: u64) {
        let Some(&index) = self.by_key.get(&key) else {
            return;
        };
        self.unlink(index);
        let table = &mut self.tables[index as usize];
        table.state = TableState::Clean;
        let queue = match table.frequency >= USED_AGAIN {
            true => QueueName::Main,
            false => QueueName::Small,
        };
        self.link(index, queue);
    }

    /// Calls `visit` with every table that is not clean.
    pub(super) fn for_each_dirty(&mut self, mut visit: impl FnMut(&mut Table<C::Packed>)) {
        let mut at = self.queues[QueueName::Dirty as usize].head;
        while let Some(table) = self.tables.get_mut(at as usize) {
            at = table.next;
            visit(table);
        }
    }

    /// Remembers whether a table that comes in now went out not long ago.
    pub(super) fn take_ghost(&mut self, key: u64) -> bool {
        self.ghosts
            .as_mut()
            .is_some_and(|ghosts| ghosts.take(hash(key)))
    }

    /// Makes room: packs a table, or evicts one. `false` if there is nothing left
    /// to evict.
    pub(super) fn make_room(&mut self, codec: &C, ghosts_per_table: usize) -> bool {
        // A table has to be passed so often at most before it goes.
        let mut steps = self.tables.len() * (usize::from(MAX_FREQUENCY) + 2);
        while steps > 0 {
            steps -= 1;
            let Some(index) = self.candidate() else {
                return false;
            };
            if self.pack(index, codec) {
                return true;
            }
            let ghosts = self.tables.len() * ghosts_per_table;
            let table = &mut self.tables[index as usize];
            if table.queue == QueueName::Small && table.frequency < USED_AGAIN {
                let key = table.key;
                self.ghosts.get_or_insert_default().add(hash(key), ghosts);
                self.remove(key);
                return true;
            }
            if table.queue == QueueName::Small {
                // What brought it here counts for the main queue no more.
                table.frequency = 0;
            } else if table.frequency == 0 {
                let key = table.key;
                self.ghosts.get_or_insert_default().add(hash(key), ghosts);
                self.remove(key);
                return true;
            } else {
                table.frequency -= 1;
            }
            self.unlink(index);
            self.link(index, QueueName::Main);
        }
        false
    }

    fn candidate(&self) -> Option<u32> {
        // Rule 7: the third queue holds what is not clean.
        let [small, main, _] = self.queues;
        let from_small = small.len_bytes * SMALL_PART >= small.len_bytes + main.len_bytes;
        let order = match from_small {
            true => [small.head, main.head],
            false => [main.head, small.head],
        };
        order.into_iter().find(|&head| head != NONE)
    }

    /// Packs a raw table, if that makes it smaller.
    fn pack(&mut self, index: u32, codec: &C) -> bool {
        let table = &mut self.tables[index as usize];
        let Stored::Raw(bytes) = &table.stored else {
            return false;
        };
        if table.incompressible {
            return false;
        }
        let Some(packed) = codec.pack(bytes) else {
            table.incompressible = true;
            return false;
        };
        let queue = table.queue;
        self.unlink(index);
        self.tables[index as usize].stored = Stored::Packed(packed);
        self.link(index, queue);
        true
    }

    /// Gives memory back that far more tables needed to be found, and to be missed.
    pub(super) fn give_spare_back(&mut self) {
        let tables = self.tables.len();
        if self.tables.capacity() > 2 * tables + MIN_SPARE_TABLES {
            self.tables.shrink_to(tables + tables / 2);
            self.by_key.shrink_to(tables + tables / 2);
            self.ghosts = None;
        }
    }

    /// Drops every clean table that was not used since the last call, packs the
    /// others, and gives back what memory this frees.
    pub(super) fn drop_unused(&mut self, codec: &C) {
        let mut index = 0;
        while let Some(table) = self.tables.get_mut(index) {
            let used = std::mem::take(&mut table.used);
            if table.state == TableState::Clean && !used {
                let key = table.key;
                // Another table takes this place.
                self.remove(key);
                continue;
            }
            if table.state == TableState::Clean {
                self.pack(index as u32, codec);
            }
            index += 1;
        }
        self.tables.shrink_to_fit();
        self.by_key.shrink_to_fit();
        self.loading.shrink_to_fit();
        self.ghosts = None;
    }
}

/// So many places for tables are never too many.
const MIN_SPARE_TABLES: usize = 8;

/// Why a table comes into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// A request needs it.
    Request,
    /// A scan passes.
    Scan,
    /// A request needs it that was evicted not long ago.
    Ghost,
}
