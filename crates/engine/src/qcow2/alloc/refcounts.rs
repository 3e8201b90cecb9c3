//! Refcounts: the refcount table in memory, refcount blocks through the cache.
//!
//! Invariants:
//! - A count in memory is always safe to be on disk: it is raised before anything
//!   points at the cluster, and lowered only when the mapping that dropped the
//!   cluster is durable. Blocks may therefore be written at any time.
//! - Two writes of one block never overlap: write-backs take turns.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::stream::{self, StreamExt};
use parking_lot::{Mutex, MutexGuard};
use vellum_format::geometry::Geometry;
use vellum_format::refcount::{self, RefcountTableEntry};
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::{Event, Storage, WriteFlags};

use super::changed_slices::ChangedSlices;
use super::host_room::HostRoom;
use crate::debug_events::emit;
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::integrity::errors::bad_entry;
use crate::qcow2::integrity::overlap::{Metadata, OverlapMap};
use crate::qcow2::mapping::lookup::Lookup;
use crate::qcow2::table_cache::cache::{TableCache, WriteBack};

/// The refcount table.
#[derive(Debug)]
pub(crate) struct RefcountTable {
    pub(crate) offset: HostOffset,
    pub(crate) clusters: u64,
    pub(crate) entries: TableEntries,
}

/// The entries of a refcount table. Most of a table leads nowhere: one cluster of it has room for
/// terabytes, so what is behind the last entry in use takes no memory.
#[derive(Debug, Clone)]
pub(crate) struct TableEntries {
    /// Up to the last that leads somewhere, at least when the table was read.
    used: Vec<RefcountTableEntry>,
    len: usize,
}

impl From<Vec<RefcountTableEntry>> for TableEntries {
    fn from(mut entries: Vec<RefcountTableEntry>) -> TableEntries {
        let len = entries.len();
        let last = entries
            .iter()
            .rposition(|entry| *entry != RefcountTableEntry::UNALLOCATED);
        entries.truncate(last.map_or(0, |last| last + 1));
        entries.shrink_to_fit();
        TableEntries { used: entries, len }
    }
}

impl TableEntries {
    /// How many the table has room for.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Those up to the last one in use.
    pub(crate) fn used(&self) -> &[RefcountTableEntry] {
        &self.used
    }

    /// An entry; `None` behind the end of the table.
    pub(crate) fn get(&self, index: usize) -> Option<RefcountTableEntry> {
        let unused = (index < self.len).then_some(RefcountTableEntry::UNALLOCATED);
        self.used.get(index).copied().or(unused)
    }

    /// Changes an entry, which the table must have room for; returns the old one.
    fn replace(&mut self, index: usize, entry: RefcountTableEntry) -> RefcountTableEntry {
        assert!(index < self.len, "the table ends before entry {index}");
        if self.used.len() <= index {
            self.used.resize(index + 1, RefcountTableEntry::UNALLOCATED);
        }
        std::mem::replace(&mut self.used[index], entry)
    }

    /// All of them.
    pub(crate) fn to_vec(&self) -> Vec<RefcountTableEntry> {
        let mut entries = self.used.clone();
        entries.resize(self.len, RefcountTableEntry::UNALLOCATED);
        entries
    }
}

impl RefcountTable {
    /// A table of `clusters` clusters at `offset`.
    pub(crate) fn new(offset: HostOffset, clusters: u64, entries: Vec<RefcountTableEntry>) -> Self {
        RefcountTable {
            offset,
            clusters,
            entries: entries.into(),
        }
    }
}

/// Where a cluster's count lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CountPlace {
    /// Host offset of the slice of the refcount block: its key in the cache.
    pub(crate) key: u64,
    /// Index in the slice.
    pub(crate) index: usize,
}

/// All refcounts of an image.
#[derive(Debug)]
pub(crate) struct Refcounts {
    pub(crate) geometry: Geometry,
    pub(crate) file: Arc<dyn Storage>,
    pub(crate) cache: TableCache,
    table: Mutex<RefcountTable>,
    /// Knows all refcount blocks, and the table.
    pub(crate) overlap: Arc<OverlapMap>,
    writeback: async_lock::Mutex<()>,
    /// See [`Refcounts::lowered_clusters`].
    pub(super) lowered: AtomicU64,
    pub(super) changed_slices: ChangedSlices,
    /// Which pieces of blocks have their room.
    room: HostRoom,
}

const MAX_SLICE_BYTES: u64 = 4096;

/// Tables that are written at the same time at most.
const MAX_TABLE_WRITES: usize = 128;

/// Writes copies of tables, many at a time.
pub(crate) async fn write_tables(file: &Arc<dyn Storage>, tables: Vec<WriteBack>) -> Result<()> {
    let writes = tables.into_iter().map(|table| {
        let buffers = Buffers::from_iter([table.bytes]);
        file.write(table.key, buffers, WriteFlags::default())
    });
    let mut running = stream::iter(writes).buffer_unordered(MAX_TABLE_WRITES);
    let mut result = Ok(());
    while let Some(written) = running.next().await {
        result = result.and(written.map(drop));
    }
    result
}

impl Refcounts {
    /// Refcounts of an image whose table is `table`.
    pub(crate) fn new(
        geometry: Geometry,
        file: Arc<dyn Storage>,
        budget_bytes: u64,
        table: RefcountTable,
        overlap: Arc<OverlapMap>,
    ) -> Self {
        for block in table.entries.used() {
            overlap.add_block(HostOffset(block.raw_offset()));
        }
        let slice_bytes = geometry.cluster_size_bytes().min(MAX_SLICE_BYTES);
        Refcounts {
            geometry,
            file,
            cache: TableCache::new(slice_bytes as usize, budget_bytes),
            table: Mutex::new(table),
            overlap,
            writeback: async_lock::Mutex::new(()),
            lowered: AtomicU64::new(0),
            changed_slices: ChangedSlices::default(),
            room: HostRoom::new(&geometry),
        }
    }

    /// The refcount table, locked; never across an I/O.
    pub(crate) fn table(&self) -> MutexGuard<'_, RefcountTable> {
        self.table.lock()
    }

    /// Enters a new refcount block into the table in memory.
    pub(crate) fn enter_block(&self, index: usize, block: HostOffset) {
        self.overlap.add_block(block);
        let end = block.bytes() + self.geometry.cluster_size_bytes();
        for slice in (block.bytes()..end).step_by(self.cache.table_bytes()) {
            self.changed_slices.note(slice);
        }
        self.table()
            .entries
            .replace(index, RefcountTableEntry::new(block));
    }

    /// Takes a refcount block out of the table in memory.
    pub(crate) fn remove_block(&self, index: usize) {
        let unused = RefcountTableEntry::UNALLOCATED;
        let block = self.table().entries.replace(index, unused);
        let cluster = HostOffset(block.raw_offset()).cluster(&self.geometry);
        self.overlap.forget(cluster.index());
    }

    /// Takes another table into use, which has all blocks of the old one.
    pub(crate) fn replace_table(&self, new: RefcountTable) -> RefcountTable {
        let first = new.offset.cluster(&self.geometry).index();
        self.overlap
            .move_area(Metadata::RefcountTable, first..first + new.clusters);
        for entry in new.entries.used() {
            self.overlap.add_block(HostOffset(entry.raw_offset()));
        }
        std::mem::replace(&mut *self.table(), new)
    }

    /// Counts in one slice of a block.
    pub(crate) fn entries_per_slice(&self) -> u64 {
        (self.cache.table_bytes() as u64 * 8) >> self.geometry.refcount_order
    }

    /// Whether the refcount table, as it is, may lead to the count of `cluster`.
    pub(crate) fn has_entry_for(&self, cluster: HostCluster) -> bool {
        let index = self.geometry.refcount_table_index(cluster.index());
        index < self.table().entries.len() as u64
    }

    /// The first cluster that the last refcount block counts.
    pub(crate) fn first_of_last_block(&self) -> u64 {
        let last = {
            let table = self.table();
            let mut entries = table.entries.used().iter();
            entries.rposition(|entry| entry.raw_offset() != 0)
        };
        last.unwrap_or(0) as u64 * self.geometry.refcount_block_entries()
    }

    /// Where the count of `cluster` lies; `None` if it has no refcount block.
    pub(crate) fn place(&self, cluster: HostCluster) -> Result<Option<CountPlace>> {
        let index = self.geometry.refcount_table_index(cluster.index());
        let entry = {
            let table = self.table();
            usize::try_from(index)
                .ok()
                .and_then(|index| table.entries.get(index))
        };
        let block = entry
            .unwrap_or_default()
            .decode(&self.geometry)
            .map_err(|e| bad_entry("refcount", &e, "reftable index", index))?;
        let in_block = self.geometry.refcount_block_index(cluster.index()) as u64;
        let per_slice = self.entries_per_slice();
        Ok(block.map(|block| CountPlace {
            key: block.bytes() + in_block / per_slice * self.cache.table_bytes() as u64,
            index: (in_block % per_slice) as usize,
        }))
    }

    /// The count of `cluster`, if its block is in memory.
    pub(crate) fn get(&self, cluster: HostCluster) -> Result<Lookup<u64>> {
        let Some(place) = self.place(cluster)? else {
            return Ok(Lookup::Hit(0));
        };
        let order = self.geometry.refcount_order;
        let count = self
            .cache
            .with(place.key, |block| refcount::get(block, order, place.index));
        Ok(match count {
            Some(count) => Lookup::Hit(count),
            None => Lookup::Miss(crate::qcow2::mapping::lookup::Slice { key: place.key }),
        })
    }

    /// Brings a slice of a refcount block into memory, for one who may change it.
    pub(crate) async fn load(&self, key: u64) -> Result<()> {
        if self.cache.wants_writeback() {
            self.write_back().await?;
        }
        self.cache.load(key, self.read_slice(key)).await
    }

    async fn read_slice(&self, key: u64) -> Result<Buffer> {
        let bytes = read_bytes(&self.file, key, self.cache.table_bytes() as u64).await?;
        if bytes.is_zero() && !self.room.is_there(key) {
            self.room.set_aside(&self.file, key).await?;
        }
        Ok(bytes)
    }

    /// Changes a slice of a refcount block; `None`: it is not in memory.
    pub(super) fn change<T>(&self, key: u64, change: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
        self.cache.update(key, |block| {
            self.changed_slices.note(key);
            change(block)
        })
    }

    /// How many clusters' counts have gone down since counts were last written.
    pub(crate) fn lowered_clusters(&self) -> u64 {
        self.lowered.load(Ordering::Relaxed)
    }

    /// Writes all dirty blocks; no barrier.
    pub(crate) async fn write_back(&self) -> Result<()> {
        let _turn = self.writeback.lock().await;
        self.lowered.store(0, Ordering::Relaxed);
        // Rule 2: counts in memory may be on disk at any time, so nothing is waited for here.
        let copies = self.cache.begin_writeback();
        if !copies.is_empty() {
            emit(&self.file, Event::RefblockUpdatePart).await;
        }
        let keys: Vec<u64> = copies.iter().map(|copy| copy.key).collect();
        let result = match self.overlap.check_tables(&copies, Metadata::RefcountBlock) {
            Ok(()) => write_tables(&self.file, copies).await,
            Err(error) => Err(error),
        };
        self.cache.end_writeback(keys, result.is_ok());
        result
    }

    /// The first run of up to `want` clusters nobody uses in `slice`, as indexes,
    /// from index `from` on. `None`: the slice is not in memory.
    pub(crate) fn find_unused(&self, key: u64, from: usize, want: u64) -> Option<Range<usize>> {
        let order = self.geometry.refcount_order;
        let entries = self.entries_per_slice() as usize;
        self.cache.with(key, |block| {
            let used = |index: &usize| refcount::get(block, order, *index) != 0;
            let start = (from..entries)
                .find(|index| !used(index))
                .unwrap_or(entries);
            let most = entries.min(start.saturating_add(usize::try_from(want).unwrap_or(entries)));
            let end = (start..most).find(used).unwrap_or(most);
            start..end
        })
    }

    /// The last of some indexes in a slice whose cluster is in use. The outer `None`:
    /// the slice is not in memory.
    pub(crate) fn last_used(&self, key: u64, indexes: Range<usize>) -> Option<Option<usize>> {
        let order = self.geometry.refcount_order;
        self.cache.with(key, |block| {
            indexes
                .rev()
                .find(|&index| refcount::get(block, order, index) != 0)
        })
    }

    /// Sets the counts of `run` in a slice to one; `false` if the slice is not in
    /// memory.
    pub(crate) fn take(&self, key: u64, run: Range<usize>) -> bool {
        let order = self.geometry.refcount_order;
        let taken = self.change(key, |block| {
            run.into_iter()
                .all(|index| refcount::set(block, order, index, 1))
        });
        taken.is_some()
    }
}
