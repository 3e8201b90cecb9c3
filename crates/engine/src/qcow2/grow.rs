//! Growth of the refcount structures.
//!
//! A new refcount block lies in the first cluster of the range that it counts, so
//! it counts itself. A larger refcount table comes with the blocks that count it.
//! In both cases content is made durable before anything points at it.

use vellum_format::limits::MAX_REFCOUNT_TABLE_SIZE_BYTES;
use vellum_format::refcount::{self, RefcountTableEntry};
use vellum_format::types::{HostCluster, HostOffset};
use vellum_storage::{Buffer, Buffers, Error, ErrorKind, Event, Result, WriteFlags};

use super::alloc::Allocator;
use super::events::reached;
use super::fault::corrupt;
use super::refcounts::RefcountTable;

/// Offset of the header's fields refcount_table_offset and _clusters, which lie
/// side by side (spec: header, bytes 48 to 59).
pub(super) const HEADER_TABLE_FIELDS: u64 = 48;

/// Where a larger refcount table and the blocks that count it will lie.
struct Layout {
    first_block: u64,
    blocks: u64,
    table_clusters: u64,
    start: u64,
}

impl Allocator {
    /// Gives `cluster` a refcount block if it has none.
    pub(super) async fn add_refcount_block(&self, cluster: HostCluster) -> Result<()> {
        let _one = self.growing.lock().await;
        if self.refcounts.place(cluster)?.is_some() {
            return Ok(());
        }
        let file = &self.refcounts.file;
        reached(file, Event::RefblockAlloc).await;
        let geometry = self.refcounts.geometry;
        let index = geometry.refcount_table_index(cluster.index());
        if index == 0 {
            return Err(first_block_is_missing());
        }
        let (table_offset, entries) = {
            let table = self.refcounts.table();
            (table.offset, table.entries.len() as u64)
        };
        if index >= entries {
            return self.grow_table(index).await;
        }
        let block = HostOffset(index * geometry.bytes_per_refcount_block());
        let place = block.cluster(&geometry).index();
        self.refuse_metadata(&(place..place + 1))?;
        reached(file, Event::RefblockAllocWrite).await;
        self.state().made_blocks.push(index);
        self.write_block(block, 1).await?;
        file.flush().await?;
        reached(file, Event::RefblockAllocHookup).await;
        let entry = RefcountTableEntry::new(block);
        let bytes = Buffer::copy_of(&entry.0.to_be_bytes());
        self.write(table_offset.bytes() + 8 * index, bytes).await?;
        self.refcounts.enter_block(index as usize, block);
        Ok(())
    }

    async fn write(&self, offset_bytes: u64, bytes: Buffer) -> Result<()> {
        let buffers = Buffers::from_iter([bytes]);
        self.refcounts
            .file
            .write(offset_bytes, buffers, WriteFlags::default())
            .await
            .map(drop)
    }

    /// Writes a block at `offset` whose first `used` clusters have a count of one.
    async fn write_block(&self, offset: HostOffset, used: u64) -> Result<()> {
        let geometry = &self.refcounts.geometry;
        let mut bytes = Buffer::zeroed(geometry.cluster_size_bytes() as usize);
        for index in 0..used.min(geometry.refcount_block_entries()) {
            let fits = refcount::set(&mut bytes, geometry.refcount_order, index as usize, 1);
            debug_assert!(fits);
        }
        self.write(offset.bytes(), bytes).await
    }

    /// Takes back the refcount blocks at the end of the file that count nothing but
    /// themselves. Nobody may allocate any more.
    pub(super) async fn take_back_blocks(&self) -> Result<()> {
        let mut made = std::mem::take(&mut self.state().made_blocks);
        made.sort_unstable();
        let geometry = &self.refcounts.geometry;
        while let Some(index) = made.pop() {
            let block = index * geometry.bytes_per_refcount_block();
            let is_last = self.state().length.end_bytes() <= block;
            if !is_last || !self.counts_only_itself(index).await? {
                self.note_end(block + geometry.cluster_size_bytes());
                continue;
            }
            let slices = block..block + geometry.cluster_size_bytes();
            self.refcounts.remove_block(index as usize);
            for slice in slices.step_by(self.refcounts.cache.table_bytes()) {
                self.refcounts.cache.forget(slice);
            }
            let at = self.refcounts.table().offset.bytes() + 8 * index;
            self.write(at, Buffer::copy_of(&[0; 8])).await?;
            self.refcounts.file.flush().await?;
        }
        Ok(())
    }

    /// Whether a refcount block that lies in the first cluster that it counts counts
    /// no other.
    async fn counts_only_itself(&self, index: u64) -> Result<bool> {
        let per_block = self.refcounts.geometry.refcount_block_entries();
        let first = index * per_block;
        let mut at = first;
        while at < first + per_block {
            let Some(place) = self.refcounts.place(HostCluster(at))? else {
                return Ok(false);
            };
            let in_slice = self.refcounts.entries_per_slice() as usize;
            match self.refcounts.last_used(place.key, 0..in_slice) {
                None => self.refcounts.load(place.key).await?,
                Some(Some(used)) if at > first || used > 0 => return Ok(false),
                Some(_) => at += in_slice as u64,
            }
        }
        Ok(true)
    }

    fn plan_table(&self, index: u64) -> Result<Layout> {
        let geometry = &self.refcounts.geometry;
        let per_cluster = geometry.table_entries_per_cluster();
        let entries = self.refcounts.table().entries.len() as u64;
        let mut table_clusters = (index + 1).max(entries + entries / 2).div_ceil(per_cluster);
        let mut blocks = 1;
        loop {
            let needed = (blocks + table_clusters).div_ceil(geometry.refcount_block_entries());
            let tables_needed = (index + needed).div_ceil(per_cluster);
            if needed <= blocks && tables_needed <= table_clusters {
                break;
            }
            blocks = blocks.max(needed);
            table_clusters = table_clusters.max(tables_needed);
        }
        check_table_size(table_clusters * geometry.cluster_size_bytes())?;
        let start = index * geometry.refcount_block_entries();
        Ok(Layout {
            first_block: index,
            blocks,
            table_clusters,
            start,
        })
    }

    /// Moves the refcount table to a larger place that has an entry for `index`.
    async fn grow_table(&self, index: u64) -> Result<()> {
        let geometry = self.refcounts.geometry;
        let cluster_bytes = geometry.cluster_size_bytes();
        let layout = self.plan_table(index)?;
        let file = &self.refcounts.file;
        reached(file, Event::ReftableGrow).await;
        let used = layout.blocks + layout.table_clusters;
        self.refuse_metadata(&(layout.start..layout.start + used))?;
        let mut entries = self.refcounts.table().entries.clone();
        let count = layout.table_clusters * geometry.table_entries_per_cluster();
        entries.resize(count as usize, RefcountTableEntry::UNALLOCATED);
        reached(file, Event::RefblockAllocWriteBlocks).await;
        for block in 0..layout.blocks {
            let offset = HostOffset((layout.start + block) * cluster_bytes);
            let counted_before = block * geometry.refcount_block_entries();
            self.write_block(offset, used - counted_before).await?;
            self.note_end(offset.bytes() + cluster_bytes);
            entries[(layout.first_block + block) as usize] = RefcountTableEntry::new(offset);
        }
        let offset = HostOffset((layout.start + layout.blocks) * cluster_bytes);
        let mut bytes = Buffer::zeroed(8 * entries.len());
        for (raw, entry) in bytes.chunks_exact_mut(8).zip(&entries) {
            raw.copy_from_slice(&entry.0.to_be_bytes());
        }
        self.note_end(offset.bytes() + bytes.len() as u64);
        reached(file, Event::RefblockAllocWriteTable).await;
        self.write(offset.bytes(), bytes).await?;
        file.flush().await?;
        let mut fields = [0; 12];
        fields[..8].copy_from_slice(&offset.bytes().to_be_bytes());
        fields[8..].copy_from_slice(&(layout.table_clusters as u32).to_be_bytes());
        reached(file, Event::RefblockAllocSwitchTable).await;
        self.write(HEADER_TABLE_FIELDS, Buffer::copy_of(&fields))
            .await?;
        file.flush().await?;
        let new = RefcountTable::new(offset, layout.table_clusters, entries);
        let old = self.refcounts.replace_table(new);
        self.release(old.offset.cluster(&geometry), old.clusters)
            .await
    }
}

/// Nothing counts the first clusters, so that even the header's would be handed out.
fn first_block_is_missing() -> Error {
    corrupt(
        "allocate",
        "Preventing invalid allocation of refcount block at offset 0",
    )
}

/// Refuses a refcount table beyond the format's limit.
pub(super) fn check_table_size(len_bytes: u64) -> Result<()> {
    if len_bytes <= MAX_REFCOUNT_TABLE_SIZE_BYTES {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::NoSpace,
        "allocate",
        "the image has reached the largest size that its refcount table can count",
    )
    .with_errno(27))
}
