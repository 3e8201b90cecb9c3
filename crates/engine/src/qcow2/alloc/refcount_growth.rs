//! Growth of the refcount structures.
//!
//! A new refcount block lies in the first cluster of the range that it counts, so
//! it counts itself. A larger refcount table comes with the blocks that count it, at
//! the beginning of the next such range: where QEMU puts them, and as many.
//! In both cases content is made durable before anything points at it.

use vellum_format::geometry::Geometry;
use vellum_format::header::{encode_refcount_table, field};
use vellum_format::limits::MAX_REFCOUNT_TABLE_SIZE_BYTES;
use vellum_format::refcount::{self, RefcountTableEntry};
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};
use vellum_storage::{Event, WriteFlags};

use super::allocator::Allocator;
use super::refcounts::RefcountTable;
use crate::debug_events::emit;
use crate::qcow2::integrity::errors::corrupt;

/// Where a larger refcount table and the blocks that count it will lie: side by side,
/// blocks first, from the range on that the first of them counts.
#[derive(Debug, PartialEq, Eq)]
struct Layout {
    first_block: u64,
    blocks: u64,
    table_clusters: u64,
}

impl Allocator {
    /// Gives `cluster` a refcount block if it has none.
    pub(crate) async fn add_refcount_block(&self, cluster: HostCluster) -> Result<()> {
        let _one = self.growing.lock().await;
        if self.refcounts.place(cluster)?.is_some() {
            return Ok(());
        }
        let file = &self.refcounts.file;
        emit(file, Event::RefblockAlloc).await;
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
        self.refuse_beyond(&(place..place + 1))?;
        emit(file, Event::RefblockAllocWrite).await;
        self.state().made_blocks.push(index);
        self.write_block(block, 1).await?;
        file.flush().await?;
        emit(file, Event::RefblockAllocHookup).await;
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
    pub(crate) async fn take_back_blocks(&self) -> Result<()> {
        let mut made = std::mem::take(&mut self.state().made_blocks);
        made.sort_unstable();
        let geometry = &self.refcounts.geometry;
        while let Some(index) = made.pop() {
            let block = index * geometry.bytes_per_refcount_block();
            let is_last = self.state().length.end_bytes() <= block;
            // It may have moved since, with all the others.
            let is_there = {
                let table = self.refcounts.table();
                let entry = table.entries.get(index as usize);
                entry.is_some_and(|entry| entry.raw_offset() == block)
            };
            if !is_there {
                continue;
            }
            if !is_last || !self.counts_nothing(index, true).await? {
                self.note_end(block + geometry.cluster_size_bytes());
                continue;
            }
            self.remove_blocks(&[(index, block)]).await?;
            // The file reaches to the end of the block.
            self.state().length.note_extended();
        }
        Ok(())
    }

    /// Drops the refcount blocks that count nothing, or nothing but themselves. Nobody may allocate meanwhile.
    pub(crate) async fn drop_idle_blocks(&self) -> Result<()> {
        let geometry = self.refcounts.geometry;
        let count = self.refcounts.table().entries.len() as u64;
        let (mut idle, mut elsewhere) = (Vec::new(), Vec::new());
        // The first one counts the header.
        for index in (1..count).rev() {
            let entry = self.refcounts.table().entries.get(index as usize);
            let block = entry.unwrap_or_default().raw_offset();
            let start = index * geometry.bytes_per_refcount_block();
            let range = start..start + geometry.bytes_per_refcount_block();
            let lies_elsewhere = !range.contains(&block);
            if block == 0 || !(lies_elsewhere || block == start) {
                continue;
            }
            if !self.counts_nothing(index, block == start).await? {
                continue;
            }
            idle.push((index, block));
            if lies_elsewhere {
                elsewhere.push(HostOffset(block).cluster(&geometry));
            }
        }
        self.remove_blocks(&idle).await?;
        for block in elsewhere {
            self.release(block, 1).await?;
        }
        Ok(())
    }

    /// Takes refcount blocks that count nothing any more out of the table, durably.
    async fn remove_blocks(&self, idle: &[(u64, u64)]) -> Result<()> {
        if idle.is_empty() {
            return Ok(());
        }
        let cluster_bytes = self.refcounts.geometry.cluster_size_bytes();
        for &(index, block) in idle {
            self.refcounts.remove_block(index as usize);
            for slice in (block..block + cluster_bytes).step_by(self.refcounts.cache.table_bytes())
            {
                self.refcounts.cache.forget(slice);
            }
            let at = self.refcounts.table().offset.bytes() + 8 * index;
            self.write(at, Buffer::copy_of(&[0; 8])).await?;
        }
        self.refcounts.file.flush().await
    }

    /// Whether a refcount block counts no cluster, but for the first one of its range if it lies there itself.
    async fn counts_nothing(&self, index: u64, lies_first: bool) -> Result<bool> {
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
                Some(Some(used)) if at > first || used > 0 || !lies_first => return Ok(false),
                Some(_) => at += in_slice as u64,
            }
        }
        Ok(true)
    }

    /// Moves the refcount table to a larger place that has an entry for `index`.
    async fn grow_table(&self, index: u64) -> Result<()> {
        let geometry = self.refcounts.geometry;
        let cluster_bytes = geometry.cluster_size_bytes();
        let per_block = geometry.refcount_block_entries();
        let file = &self.refcounts.file;
        let place_clusters = match file.capabilities().growable {
            true => None,
            false => Some(geometry.clusters_for(file.len_bytes()?)),
        };
        let layout = plan_table(&geometry, index, place_clusters);
        check_table_size(layout.table_clusters * cluster_bytes)?;
        emit(file, Event::ReftableGrow).await;
        let used = layout.blocks + layout.table_clusters;
        let start = layout.first_block * per_block;
        self.refuse_metadata(&(start..start + used))?;
        self.refuse_beyond(&(start..start + used))?;
        self.refuse_beyond(&(index * per_block..index * per_block + 1))?;
        let mut entries = self.refcounts.table().entries.to_vec();
        let count = layout.table_clusters * geometry.table_entries_per_cluster();
        entries.resize(count as usize, RefcountTableEntry::UNALLOCATED);
        emit(file, Event::RefblockAllocWriteBlocks).await;
        let wanted = HostOffset(index * geometry.bytes_per_refcount_block());
        self.write_block(wanted, 1).await?;
        entries[index as usize] = RefcountTableEntry::new(wanted);
        for block in 0..layout.blocks {
            let offset = HostOffset((start + block) * cluster_bytes);
            let counted = used.saturating_sub(block * per_block);
            self.write_block(offset, counted).await?;
            entries[(layout.first_block + block) as usize] = RefcountTableEntry::new(offset);
        }
        let offset = HostOffset((start + layout.blocks) * cluster_bytes);
        let mut bytes = Buffer::zeroed(8 * entries.len());
        for (raw, entry) in bytes.chunks_exact_mut(8).zip(&entries) {
            raw.copy_from_slice(&entry.0.to_be_bytes());
        }
        self.note_end(offset.bytes() + bytes.len() as u64);
        emit(file, Event::RefblockAllocWriteTable).await;
        self.write(offset.bytes(), bytes).await?;
        file.flush().await?;
        let fields = encode_refcount_table(offset, layout.table_clusters as u32);
        emit(file, Event::RefblockAllocSwitchTable).await;
        self.write(
            field::REFCOUNT_TABLE_OFFSET as u64,
            Buffer::copy_of(&fields),
        )
        .await?;
        file.flush().await?;
        let new = RefcountTable::new(offset, layout.table_clusters, entries);
        let old = self.refcounts.replace_table(new);
        self.release(old.offset.cluster(&geometry), old.clusters)
            .await
    }
}

/// Plans a table with an entry for block `index`: half as long again as is needed, with
/// blocks for all that the file will hold then. In a place of fixed length, of `place_clusters`, it has an entry for
/// each block that this can need: `measure` counts one table of that length, and no growth.
fn plan_table(geometry: &Geometry, index: u64, place_clusters: Option<u64>) -> Layout {
    let per_block = geometry.refcount_block_entries();
    let per_cluster = geometry.table_entries_per_cluster();
    let first_block = index + 1;
    let mut clusters = first_block * per_block;
    let total = all_blocks(geometry, clusters);
    // Room for what the longer table takes.
    clusters += total.div_ceil(per_cluster).div_ceil(2);
    let total = all_blocks(geometry, clusters);
    let entries = match place_clusters {
        None => total + total.div_ceil(2),
        Some(clusters) => {
            let all = clusters.div_ceil(per_block);
            all.min(MAX_REFCOUNT_TABLE_SIZE_BYTES / 8).max(total)
        }
    };
    let mut table_clusters = entries.div_ceil(per_cluster);
    let mut blocks = total - first_block;
    loop {
        if blocks * per_block < blocks + table_clusters {
            blocks += 1;
        } else if first_block + blocks > table_clusters * per_cluster {
            table_clusters += 1;
        } else {
            break;
        }
    }
    Layout {
        first_block,
        blocks,
        table_clusters,
    }
}

/// The blocks that count so many clusters, themselves and a table for them.
fn all_blocks(geometry: &Geometry, clusters: u64) -> u64 {
    let (mut blocks, mut table_clusters) = (0, 0);
    loop {
        let needed: u64 =
            (clusters + table_clusters + blocks).div_ceil(geometry.refcount_block_entries());
        let table = needed.div_ceil(geometry.table_entries_per_cluster());
        if (needed, table) == (blocks, table_clusters) {
            return blocks;
        }
        (blocks, table_clusters) = (needed, table);
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
pub(crate) fn check_table_size(len_bytes: u64) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_larger_table_is_as_long_as_qemus() {
        // 512 clusters of table, all used: iotest 044 has the end of the file.
        let geometry = Geometry::new(3, 9, false, 4, false).expect("valid");
        let layout = plan_table(&geometry, 512 * 64, None);
        assert_eq!(layout.first_block, 32769);
        assert_eq!((layout.blocks, layout.table_clusters), (132, 772));
    }

    #[test]
    fn in_a_place_of_fixed_length_a_table_is_as_long_as_the_place_needs() {
        let geometry = Geometry::new(3, 9, false, 5, false).expect("valid");
        // 130 blocks of 128 counts for 16,563 clusters.
        let layout = plan_table(&geometry, 64, Some(16_563));
        assert_eq!(layout.table_clusters, 3);
    }

    #[test]
    fn the_blocks_count_the_table_at_every_size() {
        for (bits, order) in [(9, 0), (9, 6), (12, 6), (16, 4), (16, 6), (21, 6)] {
            let geometry = Geometry::new(3, bits, false, order, false).expect("valid");
            let sizes = [1, 8, 64, 4096, 1 << 15]
                .map(|index| [(index, None), (index, Some(1)), (index, Some(1 << 20))]);
            for (index, place_clusters) in sizes.into_iter().flatten() {
                let layout = plan_table(&geometry, index, place_clusters);
                let used = layout.blocks + layout.table_clusters;
                assert!(used <= layout.blocks * geometry.refcount_block_entries());
                let named = layout.table_clusters * geometry.table_entries_per_cluster();
                assert!(layout.first_block + layout.blocks <= named);
            }
        }
    }
}
