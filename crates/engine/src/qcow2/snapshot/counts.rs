//! Counts in new places: every refcount block and their table, as a change makes them.
//!
//! Invariant: from the moment that they have places, and while the end of the file is
//! held, no count changes any more in the usual way.

use std::collections::BTreeSet;
use std::ops::Range;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use vellum_format::refcount::RefcountTableEntry;
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::{Buffer, Result};

use super::exchange::{Change, fill_words};
use super::places::Places;
use super::references::{Deltas, References, frees};
use crate::qcow2::alloc::allocator::{Allocator, HeldEnd};
use crate::qcow2::alloc::refcounts::RefcountTable;
use crate::qcow2::commit::write_order::DropReason;
use crate::qcow2::create::write::region;
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::bad_format;

/// Memory for changes of counts; larger images are gone through several times.
const MAX_DELTA_BYTES: u64 = 64 << 20;

/// The refcount structures in their new places.
pub(super) struct Counts {
    pub(super) table: HostOffset,
    pub(super) clusters: u64,
    entries: Vec<RefcountTableEntry>,
    /// Old and new place of every block, by what it counts.
    blocks: Vec<Block>,
    /// Indexes of those that count something no more that they counted before.
    freeing: BTreeSet<u64>,
}

/// A refcount block that moves.
#[derive(Debug, Clone, Copy)]
struct Block {
    index: u64,
    old: HostOffset,
    new: HostOffset,
}

impl Image {
    /// Writes the refcount table to its new place.
    pub(super) async fn write_refcount_table(&self, counts: &Counts) -> Result<()> {
        let table = &counts.entries;
        let start = counts.table.bytes();
        let end = start + counts.clusters * self.geometry.cluster_size_bytes();
        region(&self.file, start..end, |at, bytes| {
            fill_words(bytes, at, |index| {
                table.get(index as usize).map_or(0, |e| e.0)
            });
        })
        .await
    }

    /// Finds places for all refcount blocks and their table. From then on, while the
    /// end is held, no count changes any more.
    pub(super) async fn place_counts<'a>(
        &self,
        allocator: &'a Allocator,
        change: &mut Change,
        places: &mut Places,
    ) -> Result<(HeldEnd<'a>, Counts)> {
        let mut found: Vec<HostOffset> = Vec::new();
        let mut table = (HostOffset::ZERO, 0);
        loop {
            let held = allocator.hold_end().await;
            // Free clusters and such as come from the reserve are counted in memory.
            allocator.refcounts.write_back().await?;
            let (clusters, entries, offset) = {
                let table = allocator.refcounts.table();
                (table.clusters, table.entries.to_vec(), table.offset)
            };
            let blocks = (0..).zip(self.counting_blocks()?);
            let old_blocks: Vec<(u64, HostOffset)> = blocks
                .filter_map(|(index, block)| Some((index, block?)))
                .collect();
            if found.len() >= old_blocks.len() && table.1 == clusters {
                let old = self.clusters_at(offset, clusters * self.geometry.cluster_size_bytes());
                change.metadata.push((old, -1));
                let unused = found.split_off(old_blocks.len());
                let counts = counts_at(table.0, clusters, entries, &old_blocks, &found);
                let cluster = |at: &HostOffset| at.cluster(&self.geometry).index();
                let gone = old_blocks.iter().map(|(_, old)| old).chain(&unused);
                let gone = gone.map(|at| (cluster(at)..cluster(at) + 1, -1));
                change.metadata.extend(gone);
                return Ok((held, counts));
            }
            drop(held);
            // What these take may need another block; then there is one more round.
            let missing = (old_blocks.len() - found.len().min(old_blocks.len())) as u64;
            places.many(self, missing, &mut found).await?;
            if table.1 != clusters {
                if table.1 > 0 {
                    let first = table.0.cluster(&self.geometry).index();
                    change.metadata.push((first..first + table.1, -1));
                }
                table = (places.run(self, clusters).await?, clusters);
            }
        }
    }

    /// Writes the refcount blocks as the change makes them.
    pub(super) async fn write_counts(
        &self,
        change: &mut Change,
        counts: &mut Counts,
    ) -> Result<()> {
        let blocks = counts.blocks.last().map_or(0, |last| last.index + 1);
        for window in self.windows(blocks) {
            let known = change.references.take();
            let mut deltas = match known.filter(|known| *known.clusters() == window) {
                Some(known) => known,
                None => self.references(change, window.clone()).await?,
            };
            for (clusters, by) in &change.metadata {
                deltas.add(clusters, *by);
            }
            let per_block = self.geometry.refcount_block_entries();
            let (first, end) = (window.start / per_block, window.end / per_block);
            for index in first..end {
                if counts.entries[index as usize].raw_offset() == 0 {
                    deltas.refuse(index * per_block, &self.geometry)?;
                }
            }
            let inside = counts.blocks.iter();
            let inside = inside.filter(|block| (first..end).contains(&block.index));
            let inside: Vec<Block> = inside.copied().collect();
            for blocks in inside.chunks(self.tables_at_once()) {
                self.write_blocks(blocks, &deltas, &mut counts.freeing)
                    .await?;
            }
        }
        Ok(())
    }

    async fn write_blocks(
        &self,
        blocks: &[Block],
        deltas: &Deltas,
        freeing: &mut BTreeSet<u64>,
    ) -> Result<()> {
        let reads = blocks.iter().map(|block| self.read_table(block.old));
        let mut reads = stream::iter(reads).buffered(self.tables_at_once());
        let mut written = Vec::with_capacity(blocks.len());
        for block in blocks {
            let Some(old) = reads.try_next().await? else {
                break;
            };
            let mut bytes = Buffer::copy_of(&old);
            let first = block.index * self.geometry.refcount_block_entries();
            deltas.apply(&mut bytes, first, &self.geometry)?;
            if frees(&old, &bytes, &self.geometry) {
                freeing.insert(block.index);
            }
            written.push((block.new, bytes));
        }
        self.write_tables(written).await
    }

    /// The clusters that `blocks` refcount blocks count, in parts that memory has
    /// room for.
    pub(super) fn windows(&self, blocks: u64) -> impl Iterator<Item = Range<u64>> + use<> {
        let per_block = self.geometry.refcount_block_entries();
        let block_bytes = (4 * per_block).max(self.geometry.cluster_size_bytes());
        let at_once = (MAX_DELTA_BYTES / block_bytes).max(1);
        let starts = (0..blocks).step_by(at_once as usize);
        starts.map(move |first| first * per_block..(first + at_once).min(blocks) * per_block)
    }

    /// How often a window's clusters are referred to more or less than before.
    pub(super) async fn references(&self, change: &Change, window: Range<u64>) -> Result<Deltas> {
        let mut references = self.no_references(window)?;
        for (tables, by) in [(&change.more, 1), (&change.fewer, -1)] {
            let mut reads = stream::iter(tables.iter().map(|table| self.read_table(*table)))
                .buffered(self.tables_at_once());
            while let Some(table) = reads.next().await {
                references.add(&table?, by)?;
            }
        }
        references.finish()
    }

    /// No references yet, for clusters of a window.
    pub(super) fn no_references(&self, window: Range<u64>) -> Result<References> {
        let blocks = self.counting_blocks()?.len() as u64;
        let counted = blocks * self.geometry.refcount_block_entries();
        Ok(References::new(self.geometry, counted, window))
    }

    /// Where the refcount blocks lie, up to the last one.
    pub(crate) fn counting_blocks(&self) -> Result<Vec<Option<HostOffset>>> {
        let table = self.allocator.refcounts.table();
        let entries = table.entries.used();
        let last = entries.iter().rposition(|e| e.raw_offset() != 0);
        let entries = &entries[..last.map_or(0, |last| last + 1)];
        let blocks = entries.iter().map(|entry| entry.decode(&self.geometry));
        blocks
            .collect::<Result<_, _>>()
            .map_err(|e| bad_format("snapshot", &e))
    }

    /// Takes the counts in their new places into use.
    pub(super) fn adopt_counts(&self, counts: &Counts) {
        let refcounts = &self.allocator.refcounts;
        *refcounts.table() =
            RefcountTable::new(counts.table, counts.clusters, counts.entries.clone());
        let cluster_bytes = self.geometry.cluster_size_bytes();
        for block in &counts.blocks {
            for inside in (0..cluster_bytes).step_by(refcounts.cache.table_bytes()) {
                refcounts.cache.forget(block.old.bytes() + inside);
                refcounts.cache.forget(block.new.bytes() + inside);
            }
        }
    }

    /// Gives the clusters that have become unused to the allocator, and their space to
    /// the storage where that is wanted. What cannot be read is found when the image is
    /// opened again.
    pub(super) async fn free_unused(&self, counts: &Counts, reason: DropReason) {
        let blocks = counts.blocks.iter();
        let freeing = blocks.filter(|block| counts.freeing.contains(&block.index));
        // These are read below, so they must not be punched, or used again, before that.
        let still_read = |block: &Block| block.old.cluster(&self.geometry).index();
        let still_read: BTreeSet<u64> = freeing.clone().map(still_read).collect();
        let mut late = Vec::new();
        let mut reads = stream::iter(freeing.map(|block| self.freed_in(*block)))
            .buffered(self.tables_at_once().div_ceil(2));
        while let Some(freed) = reads.next().await {
            for run in freed.unwrap_or_default() {
                match still_read.range(run.clone()).next() {
                    Some(_) => late.push(run),
                    None => self.free_run(run, reason).await,
                }
            }
        }
        for run in late {
            self.free_run(run, reason).await;
        }
    }

    async fn free_run(&self, run: Range<u64>, reason: DropReason) {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let bytes = run.start * cluster_bytes..run.end * cluster_bytes;
        self.compressed_reads.cache.forget(bytes);
        if self.passes_discard(reason) {
            self.punch(run.clone()).await;
        }
        self.allocator.note_free(run);
    }

    /// The clusters that a block counts no more.
    async fn freed_in(&self, block: Block) -> Result<Vec<Range<u64>>> {
        let old = self.read_table(block.old).await?;
        let new = self.read_table(block.new).await?;
        let order = self.geometry.refcount_order;
        let first = block.index * self.geometry.refcount_block_entries();
        let mut freed: Vec<Range<u64>> = Vec::new();
        for index in 0..self.geometry.refcount_block_entries() {
            let count = |block: &[u8]| vellum_format::refcount::get(block, order, index as usize);
            if count(&new) > 0 || count(&old) == 0 {
                continue;
            }
            let cluster = first + index;
            match freed.last_mut() {
                Some(last) if last.end == cluster => last.end += 1,
                _ => freed.push(cluster..cluster + 1),
            }
        }
        Ok(freed)
    }

    /// The refcount of a cluster, in memory or on disk.
    pub(super) async fn count_of(&self, table: HostOffset) -> Result<u64> {
        let cluster = table.cluster(&self.geometry).index();
        self.refcount(HostCluster(cluster)).await
    }
}

fn counts_at(
    table: HostOffset,
    clusters: u64,
    mut entries: Vec<RefcountTableEntry>,
    old_blocks: &[(u64, HostOffset)],
    found: &[HostOffset],
) -> Counts {
    let pairs = old_blocks.iter().zip(found);
    let blocks: Vec<Block> = pairs
        .map(|(&(index, old), &new)| Block { index, old, new })
        .collect();
    for block in &blocks {
        entries[block.index as usize] = RefcountTableEntry::new(block.new);
    }
    Counts {
        table,
        clusters,
        entries,
        blocks,
        freeing: BTreeSet::new(),
    }
}
