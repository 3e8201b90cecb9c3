//! Refcounts: the refcount table in memory, refcount blocks through the cache.
//!
//! Invariants:
//! - A count in memory is always safe to be on disk: it is raised before anything
//!   points at the cluster, and lowered only when the mapping that dropped the
//!   cluster is durable. Blocks may therefore be written at any time.
//! - Two writes of one block never overlap: write-backs take turns.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::stream::{self, StreamExt};
use vellum_format::geometry::Geometry;
use vellum_format::refcount::{self, RefcountTableEntry};
use vellum_format::types::{HostCluster, HostOffset};
use vellum_storage::{Buffers, Event, Result, Storage, WriteFlags};

use super::cache::{TableCache, WriteBack};
use super::events::reached;
use super::fault::{bad_format, corrupt};
use super::load::read_bytes;
use super::map::Lookup;

/// The refcount table.
#[derive(Debug)]
pub(crate) struct RefcountTable {
    pub(crate) offset: HostOffset,
    pub(crate) clusters: u64,
    pub(crate) entries: Vec<RefcountTableEntry>,
    /// Host offsets of the refcount blocks, in bytes and in order.
    blocks: Vec<u64>,
}

impl RefcountTable {
    /// A table of `clusters` clusters at `offset`.
    pub(crate) fn new(offset: HostOffset, clusters: u64, entries: Vec<RefcountTableEntry>) -> Self {
        let offsets = entries.iter().map(|entry| entry.raw_offset());
        let mut blocks: Vec<u64> = offsets.filter(|&offset| offset != 0).collect();
        blocks.sort_unstable();
        RefcountTable {
            offset,
            clusters,
            entries,
            blocks,
        }
    }

    /// Enters a new refcount block.
    pub(crate) fn set_block(&mut self, index: usize, block: HostOffset) {
        self.entries[index] = RefcountTableEntry::new(block);
        let at = self.blocks.partition_point(|&other| other < block.bytes());
        self.blocks.insert(at, block.bytes());
    }

    /// Whether the table itself or a refcount block lies in a range of host bytes.
    pub(crate) fn overlaps(&self, range: &Range<u64>, cluster_bytes: u64) -> bool {
        let start = self.offset.bytes();
        let end = start + self.clusters * cluster_bytes;
        let next = self.blocks.partition_point(|&block| block < range.start);
        (start < range.end && range.start < end)
            || self
                .blocks
                .get(next)
                .is_some_and(|&block| block < range.end)
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
    writeback: async_lock::Mutex<()>,
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
    ) -> Self {
        let slice_bytes = geometry.cluster_size_bytes().min(MAX_SLICE_BYTES);
        Refcounts {
            geometry,
            file,
            cache: TableCache::new(slice_bytes as usize, budget_bytes),
            table: Mutex::new(table),
            writeback: async_lock::Mutex::new(()),
        }
    }

    /// The refcount table, locked; never across an I/O.
    pub(crate) fn table(&self) -> MutexGuard<'_, RefcountTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts in one slice of a block.
    pub(crate) fn entries_per_slice(&self) -> u64 {
        (self.cache.table_bytes() as u64 * 8) >> self.geometry.refcount_order
    }

    /// The first cluster that the last refcount block counts.
    pub(crate) fn first_of_last_block(&self) -> u64 {
        let last = {
            let table = self.table();
            let mut entries = table.entries.iter();
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
                .and_then(|index| table.entries.get(index).copied())
        };
        let block = entry
            .unwrap_or_default()
            .decode(&self.geometry)
            .map_err(|e| bad_format("refcount", &e))?;
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
            None => Lookup::Miss(super::map::Slice { key: place.key }),
        })
    }

    /// Brings a slice of a refcount block into memory.
    pub(crate) async fn load(&self, key: u64) -> Result<()> {
        if self.cache.wants_writeback() {
            self.write_back().await?;
        }
        reached(&self.file, Event::RefblockLoad).await;
        let read = read_bytes(&self.file, key, self.cache.table_bytes() as u64);
        self.cache.load(key, read).await
    }

    /// Writes all dirty blocks; no barrier.
    pub(crate) async fn write_back(&self) -> Result<()> {
        let _turn = self.writeback.lock().await;
        let copies = self.cache.begin_writeback();
        if !copies.is_empty() {
            reached(&self.file, Event::RefblockUpdatePart).await;
        }
        let keys: Vec<u64> = copies.iter().map(|copy| copy.key).collect();
        let result = write_tables(&self.file, copies).await;
        self.cache.end_writeback(keys, result.is_ok());
        result
    }

    /// Raises the count of a cluster in use by one; `None`: it is as high as it can be.
    pub(crate) async fn raise(&self, cluster: HostCluster) -> Result<Option<u64>> {
        loop {
            let Some(place) = self.place(cluster)? else {
                return Err(underflow(cluster));
            };
            let order = self.geometry.refcount_order;
            let raised = self.cache.update(place.key, |block| {
                let new = refcount::get(block, order, place.index).checked_add(1)?;
                refcount::set(block, order, place.index, new).then_some(new)
            });
            match raised {
                None => self.load(place.key).await?,
                Some(raised) => return Ok(raised),
            }
        }
    }

    /// Lowers the count of a cluster by one; returns what is left.
    pub(crate) async fn lower(&self, cluster: HostCluster) -> Result<u64> {
        loop {
            let Some(place) = self.place(cluster)? else {
                return Err(underflow(cluster));
            };
            let order = self.geometry.refcount_order;
            let lowered = self.cache.update(place.key, |block| {
                let old = refcount::get(block, order, place.index);
                let new = old.checked_sub(1)?;
                refcount::set(block, order, place.index, new).then_some(new)
            });
            match lowered {
                None => self.load(place.key).await?,
                Some(None) => return Err(underflow(cluster)),
                Some(Some(new)) => return Ok(new),
            }
        }
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
        let taken = self.cache.update(key, |block| {
            run.into_iter()
                .all(|index| refcount::set(block, order, index, 1))
        });
        taken.is_some()
    }
}

fn underflow(cluster: HostCluster) -> vellum_storage::Error {
    corrupt(
        "refcount",
        format!(
            "the refcount of cluster {} is zero already",
            cluster.index()
        ),
    )
}
