//! The refcounts on disk, read once into memory.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use vellum_format::refcount::{self, RefcountTableEntry};

use super::chunk::{Chunk, parts};
use super::counts::{Counts, SharedCounts};
use super::source::Image;
use super::tables::{self, Batch};
use crate::qcow2::header::load;
use crate::{Buffer, Result};

/// No file is longer for QEMU, which fails to read a table that ends beyond.
const MAX_FILE_BYTES: u64 = i64::MAX as u64 & !((1 << 30) - 1);

/// Four counts of 16 bits that are 1.
const FOUR_ONES: u64 = 0x0001_0001_0001_0001;

/// Sets the counts of a run of a chunk to those that a block holds from index `from` on.
fn set_run(chunk: &mut Chunk, run: Range<usize>, block: &[u8], from: usize, order: u32) {
    let mut next = run.start;
    if order == 4 && next.is_multiple_of(4) {
        let words = block[from * 2..].chunks_exact(8).take(run.len() / 4);
        for word in words {
            match u64::from_be_bytes(word.try_into().unwrap_or_default()) {
                0 => {}
                FOUR_ONES => chunk.set_four_ones(next),
                _ => (0..4).for_each(|at| chunk.set(next + at, refcount::get(word, 4, at))),
            }
            next += 4;
        }
    }
    for index in next..run.end {
        match refcount::get(block, order, from + index - run.start) {
            0 => {}
            count => chunk.set(index, count),
        }
    }
}

/// The refcount table and the refcounts of the file's clusters.
pub(in crate::qcow2) struct Stored {
    table: Buffer,
    counts: Arc<Counts>,
    /// `counts` is about the clusters below this one: those of the file, and the
    /// one behind it, of which a part may be in use.
    limit: u64,
    /// The counts of single clusters further on that damaged tables lead to.
    beyond: HashMap<u64, u64>,
    /// Numbers of the refcount blocks that are nowhere, in ascending order.
    unreadable: Vec<u64>,
    /// `cluster >> block_shift` is the number of its refcount block.
    block_shift: u32,
}

impl Stored {
    pub(in crate::qcow2) async fn load(image: &Image) -> Result<Stored> {
        let geometry = &image.geometry;
        let header = &image.header;
        let table_size = u64::from(header.refcount_table_clusters) << geometry.cluster_bits;
        let table_offset = header.refcount_table_offset.0;
        let table = load::read_bytes(&image.storage, table_offset, table_size).await?;
        let mut stored = Stored {
            table,
            counts: Arc::default(),
            limit: image.file_clusters() + 1,
            beyond: HashMap::new(),
            unreadable: Vec::new(),
            block_shift: geometry.refcount_block_entries().trailing_zeros(),
        };
        let most = MAX_FILE_BYTES - geometry.cluster_size_bytes();
        let is_nowhere = |entry: RefcountTableEntry| {
            let offset = entry.raw_offset();
            !geometry.is_cluster_aligned(offset) || offset > most
        };
        stored.unreadable = stored
            .entries()
            .filter_map(|(number, entry)| is_nowhere(entry).then_some(number))
            .collect();
        stored.load_counts(image).await?;
        Ok(stored)
    }

    async fn load_counts(&mut self, image: &Image) -> Result<()> {
        let (order, shift, limit) = (image.geometry.refcount_order, self.block_shift, self.limit);
        let (numbers, offsets) = self.blocks(image, |number| number << shift < limit);
        let block_size = image.geometry.cluster_size_bytes();
        let shared = Arc::new((SharedCounts::new(Counts::default(), limit), numbers));
        let counts = shared.clone();
        let set = move |batch: &Batch| {
            for (number, block) in batch.tables() {
                let first = counts.1[number] << shift;
                let end = limit.min(first + (1 << shift));
                let mut from = 0;
                for (number, run) in parts(first..end) {
                    let len = run.len();
                    if let Some(mut chunk) = counts.0.lock(number) {
                        set_run(&mut chunk, run, block, from, order);
                    }
                    from += len;
                }
            }
        };
        tables::for_each_batch(image, &offsets, block_size, set, |_, ()| {}).await?;
        self.counts = Arc::new(shared.0.take());
        Ok(())
    }

    /// Loads the counts of `clusters`, which lie beyond the others.
    pub(super) async fn load_beyond(
        &mut self,
        image: &Image,
        clusters: &BTreeSet<u64>,
    ) -> Result<()> {
        let (order, shift) = (image.geometry.refcount_order, self.block_shift);
        let wanted = |number: u64| clusters.range(number << shift..(number + 1) << shift);
        let (numbers, offsets) = self.blocks(image, |number| wanted(number).next().is_some());
        let beyond = &mut self.beyond;
        let block_size = image.geometry.cluster_size_bytes();
        image.spend(offsets.len() as u64 * block_size)?;
        tables::for_each_table(image, &offsets, block_size, |index, block| {
            for &cluster in wanted(numbers[index]) {
                let index = image.geometry.refcount_block_index(cluster);
                beyond.insert(cluster, refcount::get(block, order, index));
            }
            Ok(())
        })
        .await
    }

    /// Numbers and places of the refcount blocks that are `wanted` and in the file;
    /// beyond its end there are only zeroes.
    pub(super) fn blocks(
        &self,
        image: &Image,
        wanted: impl Fn(u64) -> bool,
    ) -> (Vec<u64>, Vec<u64>) {
        self.entries()
            .map(|(number, entry)| (number, entry.raw_offset()))
            .filter(|&(number, offset)| {
                image.geometry.is_cluster_aligned(offset)
                    && offset != 0
                    && offset < image.len_bytes()
                    && wanted(number)
            })
            .unzip()
    }

    /// The entries of the refcount table that are not 0, with their numbers.
    pub(in crate::qcow2) fn entries(&self) -> impl Iterator<Item = (u64, RefcountTableEntry)> {
        let entries = self.table.len() / 8;
        (0..entries)
            .filter_map(|index| Some((index as u64, RefcountTableEntry::read(&self.table, index)?)))
            .filter(|(_, entry)| *entry != RefcountTableEntry::UNALLOCATED)
    }

    /// The refcount of a cluster; `None` if it cannot be read.
    pub(in crate::qcow2) fn get(&self, cluster: u64) -> Option<u64> {
        if !self.is_readable(cluster) {
            return None;
        }
        Some(match self.is_loaded(cluster) {
            true => self.counts.get(cluster),
            false => self.beyond.get(&cluster).copied().unwrap_or(0),
        })
    }

    /// Whether the count of a cluster is among those that are loaded at once.
    pub(super) fn is_loaded(&self, cluster: u64) -> bool {
        cluster < self.limit
    }

    pub(super) fn is_readable(&self, cluster: u64) -> bool {
        self.unreadable.is_empty()
            || self
                .unreadable
                .binary_search(&(cluster >> self.block_shift))
                .is_err()
    }

    /// Number and offset of the first block for clusters below `end_cluster` whose offset is
    /// not aligned.
    pub(super) fn first_unaligned(&self, image: &Image, end_cluster: u64) -> Option<(u64, u64)> {
        let offset = |number: u64| {
            let entry = RefcountTableEntry::read(&self.table, number as usize)?;
            Some((number, entry.raw_offset()))
        };
        self.unreadable
            .iter()
            .take_while(|number| **number << self.block_shift < end_cluster)
            .filter_map(|number| offset(*number))
            .find(|(_, offset)| !image.geometry.is_cluster_aligned(*offset))
    }

    /// Whether the count of a cluster has a place on disk.
    pub(super) fn has_block(&self, cluster: u64) -> bool {
        let number = (cluster >> self.block_shift) as usize;
        let entry = RefcountTableEntry::read(&self.table, number);
        entry.is_some_and(|entry| entry != RefcountTableEntry::UNALLOCATED)
    }

    /// The clusters of the refcount table and of all blocks.
    pub(super) fn clusters(&self, image: &Image) -> Vec<u64> {
        let table = image.cluster_of(image.header.refcount_table_offset.0);
        let count = u64::from(image.header.refcount_table_clusters);
        let blocks = self.entries();
        let blocks = blocks.map(|(_, entry)| image.cluster_of(entry.raw_offset()));
        (table..table + count).chain(blocks).collect()
    }

    /// Notes that the count of a loaded cluster has been changed on disk.
    pub(super) fn set(&mut self, cluster: u64, count: u64) {
        if self.is_loaded(cluster) {
            Arc::make_mut(&mut self.counts).set(cluster, count);
        }
    }

    pub(super) fn all_readable(&self) -> bool {
        self.unreadable.is_empty()
    }

    pub(in crate::qcow2) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// The counts of the file's clusters, for several threads.
    pub(super) fn shared_counts(&self) -> Arc<Counts> {
        self.counts.clone()
    }
}
