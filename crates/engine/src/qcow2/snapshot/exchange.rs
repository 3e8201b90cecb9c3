//! Exchanging metadata: everything that a change of the snapshots touches is written
//! to new places, and one write of the header puts all of it into force.
//!
//! Invariants:
//! - Until that write the image on disk is what it was: a crash wastes the new
//!   places at most. After it counts, flags and snapshot table are those of the
//!   change, without an intermediate state.
//! - Nobody changes the mapping or the counts meanwhile: see [`Image::exclusively`].
//! - What the exchange sets free is used again only after every read that began
//!   before it has ended.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use vellum_format::header::field;
use vellum_format::l1::L1Entry;
use vellum_format::refcount::RefcountTableEntry;
use vellum_format::snapshot::{SnapshotEntry, encode_table};
use vellum_format::types::{HostCluster, HostOffset};
use vellum_storage::buffer::total_len;
use vellum_storage::{Buffer, Buffers, Result, WriteFlags};

use super::super::alloc::Allocator;
use super::super::create::write::region;
use super::super::fault::bad_format;
use super::super::image::Image;
use super::super::load::{SnapshotTable, read_bytes};
use super::super::order::Reason;
use super::super::refcounts::RefcountTable;
use super::places::Places;
use super::references::{Deltas, References, frees};

/// Memory for tables that are read or written at the same time.
const MAX_TABLE_BYTES: u64 = 4 << 20;
/// Memory for changes of counts; larger images are gone through several times.
const MAX_DELTA_BYTES: u64 = 64 << 20;
/// The fields of the header from the size to the snapshot table.
const HEADER_FIELDS: Range<usize> = field::SIZE..field::INCOMPATIBLE_FEATURES;

/// What is to become of the image.
#[derive(Debug)]
pub(super) struct Change {
    /// The active L1 table afterwards.
    pub(super) active: Vec<L1Entry>,
    /// L2 tables whose content is referred to once more.
    pub(super) more: Vec<HostOffset>,
    /// L2 tables whose content is referred to once less.
    pub(super) fewer: Vec<HostOffset>,
    /// What `more` and `fewer` come to, once that is known for all clusters that are
    /// counted now.
    pub(super) references: Option<Deltas>,
    /// Changes of the counts of metadata clusters, L2 tables among them.
    pub(super) metadata: Vec<(Range<u64>, i32)>,
    /// The snapshots afterwards.
    pub(super) entries: Vec<SnapshotEntry>,
    /// The L1 table of the last snapshot, which has no place yet.
    pub(super) taken: Option<Vec<L1Entry>>,
    /// The virtual size afterwards.
    pub(super) size_bytes: u64,
    /// L2 tables that the active table does not lead to any more.
    pub(super) left: Vec<HostOffset>,
    /// Why clusters become free.
    pub(super) reason: Reason,
}

/// Metadata in its new places, before the header leads to it.
struct Exchanged {
    l1: HostOffset,
    snapshots: HostOffset,
    snapshots_bytes: u64,
    counts: Counts,
}

/// The refcount structures in their new places.
struct Counts {
    table: HostOffset,
    clusters: u64,
    entries: Vec<RefcountTableEntry>,
    /// Old and new place of every block, by what it counts.
    blocks: Vec<Block>,
    /// Indexes of those that count something no more that they counted before.
    freeing: BTreeSet<u64>,
}

/// A refcount block that moves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub(super) index: u64,
    pub(super) old: HostOffset,
    pub(super) new: HostOffset,
}

impl Image {
    /// How many tables may be read or written at the same time.
    pub(super) fn tables_at_once(&self) -> usize {
        (MAX_TABLE_BYTES / self.geometry.cluster_size_bytes()).clamp(1, 64) as usize
    }

    /// Writes tables of one cluster each, such as lie side by side with one write.
    pub(super) async fn write_tables(&self, mut tables: Vec<(HostOffset, Buffer)>) -> Result<()> {
        tables.sort_unstable_by_key(|(place, _)| *place);
        let mut writes: Vec<(u64, Buffers)> = Vec::new();
        for (place, table) in tables {
            match writes.last_mut() {
                Some((start, run)) if *start + total_len(run) == place.bytes() => run.push(table),
                _ => writes.push((place.bytes(), Buffers::from_iter([table]))),
            }
        }
        let writes = writes
            .into_iter()
            .map(|(at, tables)| self.file.write(at, tables, WriteFlags::default()));
        stream::iter(writes)
            .buffer_unordered(self.tables_at_once())
            .try_for_each(|_| async { Ok(()) })
            .await
    }

    /// The clusters that `len_bytes` at `start` fill.
    pub(super) fn clusters_at(&self, start: HostOffset, len_bytes: u64) -> Range<u64> {
        let first = start.cluster(&self.geometry).index();
        first..first + self.geometry.clusters_for(len_bytes)
    }

    /// Makes a change come about. In the commits' turn, with everything held.
    pub(super) async fn exchange(
        self: &Arc<Self>,
        mut change: Change,
        mut places: Places,
    ) -> Result<()> {
        let allocator = self.allocator.clone();
        let (_held, exchanged) = match self.write_new(&allocator, &mut change, &mut places).await {
            Ok(written) => written,
            Err(error) => {
                places.give_back(self).await;
                return Err(error);
            }
        };
        self.put_into_force(&change, &exchanged).await?;
        self.adopt(&change, &exchanged)?;
        self.readers.all_gone().await;
        self.free_unused(&exchanged.counts, change.reason).await;
        Ok(())
    }

    /// Writes everything to new places and makes it durable.
    async fn write_new<'a>(
        self: &Arc<Self>,
        allocator: &'a Allocator,
        change: &mut Change,
        places: &mut Places,
    ) -> Result<(super::super::alloc::HeldEnd<'a>, Exchanged)> {
        let l1 = self.place_l1(change, places).await?;
        if let (Some(taken), Some(new)) = (&change.taken, change.entries.last_mut()) {
            let clusters = self.geometry.clusters_for(taken.len() as u64 * 8);
            new.l1_table_offset = places.run(self, clusters).await?;
            new.l1_entries = taken.len() as u32;
            self.write_l1(new.l1_table_offset, taken, false).await?;
        }
        let (snapshots, snapshots_bytes) = self.place_snapshots(change, places).await?;
        let (held, mut counts) = self.place_counts(allocator, change, places).await?;
        self.write_counts(change, &mut counts).await?;
        let table = &counts.entries;
        let start = counts.table.bytes();
        let end = start + counts.clusters * self.geometry.cluster_size_bytes();
        region(&self.file, start..end, |at, bytes| {
            fill_words(bytes, at, |index| {
                table.get(index as usize).map_or(0, |e| e.0)
            });
        })
        .await?;
        self.file.flush().await?;
        let exchanged = Exchanged {
            l1,
            snapshots,
            snapshots_bytes,
            counts,
        };
        Ok((held, exchanged))
    }

    /// Writes the active L1 table to a new place, unless it stays as it is.
    async fn place_l1(&self, change: &mut Change, places: &mut Places) -> Result<HostOffset> {
        let old_len = self.l1.len();
        let same = change.active.len() as u64 == old_len
            && (0..old_len).all(|index| self.l1.get(index) == change.active[index as usize]);
        if same {
            return Ok(self.l1.offset());
        }
        let len_bytes = change.active.len() as u64 * 8;
        let clusters = self.geometry.clusters_for(len_bytes);
        let place = places.run(self, clusters).await?;
        self.write_l1(place, &change.active, true).await?;
        let old = self.clusters_at(self.l1.offset(), old_len * 8);
        change.metadata.push((old, -1));
        Ok(place)
    }

    async fn write_l1(&self, place: HostOffset, entries: &[L1Entry], flags: bool) -> Result<()> {
        let clusters = self.geometry.clusters_for(entries.len() as u64 * 8);
        let start = place.bytes();
        let end = start + clusters * self.geometry.cluster_size_bytes();
        let word = |index: u64| {
            let entry = entries.get(index as usize).copied().unwrap_or_default();
            entry.with_copied(flags && entry.copied()).0
        };
        region(&self.file, start..end, |at, bytes| {
            fill_words(bytes, at, word)
        })
        .await
    }

    async fn place_snapshots(
        &self,
        change: &mut Change,
        places: &mut Places,
    ) -> Result<(HostOffset, u64)> {
        let old = self.snapshot_table();
        let offset = self.header().snapshots_offset;
        if old.entries == change.entries {
            return Ok((offset, old.size_bytes));
        }
        let table =
            encode_table(&change.entries).map_err(|e| bad_format("snapshot", &e).with_errno(27))?;
        let len_bytes = table.len() as u64;
        let clusters = self.geometry.clusters_for(len_bytes);
        let place = places.run(self, clusters).await?;
        let start = place.bytes();
        let end = start + clusters * self.geometry.cluster_size_bytes();
        region(&self.file, start..end, |at, bytes| {
            let rest = table.get(at as usize..).unwrap_or(&[]);
            let taken = rest.len().min(bytes.len());
            bytes[..taken].copy_from_slice(&rest[..taken]);
            bytes[taken..].fill(0);
        })
        .await?;
        if !old.entries.is_empty() {
            let clusters = self.clusters_at(offset, old.size_bytes);
            change.metadata.push((clusters, -1));
        }
        Ok((place, len_bytes))
    }

    /// Finds places for all refcount blocks and their table. From then on, while the
    /// end is held, no count changes any more.
    async fn place_counts<'a>(
        &self,
        allocator: &'a Allocator,
        change: &mut Change,
        places: &mut Places,
    ) -> Result<(super::super::alloc::HeldEnd<'a>, Counts)> {
        let mut found: Vec<HostOffset> = Vec::new();
        let mut table = (HostOffset::ZERO, 0);
        loop {
            let held = allocator.hold_end().await;
            // Free clusters and such as come from the reserve are counted in memory.
            allocator.refcounts.write_back().await?;
            let (clusters, entries, offset) = {
                let table = allocator.refcounts.table();
                (table.clusters, table.entries.clone(), table.offset)
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
    async fn write_counts(&self, change: &mut Change, counts: &mut Counts) -> Result<()> {
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
    pub(super) fn counting_blocks(&self) -> Result<Vec<Option<HostOffset>>> {
        let table = self.allocator.refcounts.table();
        let last = table.entries.iter().rposition(|e| e.raw_offset() != 0);
        let entries = &table.entries[..last.map_or(0, |last| last + 1)];
        let blocks = entries.iter().map(|entry| entry.decode(&self.geometry));
        blocks
            .collect::<Result<_, _>>()
            .map_err(|e| bad_format("snapshot", &e))
    }

    /// Reads an L2 table or a refcount block.
    pub(super) async fn read_table(&self, table: HostOffset) -> Result<Buffer> {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        read_bytes(&self.file, table.bytes(), cluster_bytes).await
    }

    /// Has the header lead to the new metadata. If that fails nobody knows to which
    /// it leads, and nothing more is written.
    async fn put_into_force(&self, change: &Change, new: &Exchanged) -> Result<()> {
        let header = self.header();
        let mut fields = Vec::with_capacity(HEADER_FIELDS.len());
        fields.extend(change.size_bytes.to_be_bytes());
        fields.extend(header.crypt_method.number().to_be_bytes());
        fields.extend((change.active.len() as u32).to_be_bytes());
        fields.extend(new.l1.bytes().to_be_bytes());
        fields.extend(new.counts.table.bytes().to_be_bytes());
        fields.extend((new.counts.clusters as u32).to_be_bytes());
        fields.extend((change.entries.len() as u32).to_be_bytes());
        fields.extend(new.snapshots.bytes().to_be_bytes());
        debug_assert_eq!(fields.len(), HEADER_FIELDS.len());
        self.write_header_field(HEADER_FIELDS.start, &fields)
            .await
            .inspect_err(|error| self.latch(error.clone()))
    }

    /// Takes the new metadata into use.
    fn adopt(&self, change: &Change, new: &Exchanged) -> Result<()> {
        self.l1.replace(new.l1, &change.active);
        for &table in &change.left {
            self.forget_slices(table);
        }
        let refcounts = &self.allocator.refcounts;
        let counts = &new.counts;
        *refcounts.table() =
            RefcountTable::new(counts.table, counts.clusters, counts.entries.clone());
        let cluster_bytes = self.geometry.cluster_size_bytes();
        for block in &counts.blocks {
            for inside in (0..cluster_bytes).step_by(refcounts.cache.table_bytes()) {
                refcounts.cache.forget(block.old.bytes() + inside);
                refcounts.cache.forget(block.new.bytes() + inside);
            }
        }
        self.change_header(|header| {
            header.size_bytes = change.size_bytes;
            header.l1_entries = change.active.len() as u32;
            header.l1_table_offset = new.l1;
            header.refcount_table_offset = counts.table;
            header.refcount_table_clusters = counts.clusters as u32;
            header.snapshot_count = change.entries.len() as u32;
            header.snapshots_offset = new.snapshots;
        });
        self.set_snapshot_table(SnapshotTable {
            entries: change.entries.clone(),
            size_bytes: new.snapshots_bytes,
        });
        self.remap_metadata();
        self.blanks.forget(0..u64::MAX);
        if change.size_bytes != self.size.visible_bytes() {
            self.set_size(change.size_bytes);
        }
        Ok(())
    }

    /// Gives the clusters that have become unused to the allocator, and their space to
    /// the storage where that is wanted. What cannot be read is found when the image is
    /// opened again.
    async fn free_unused(&self, counts: &Counts, reason: Reason) {
        let blocks = counts.blocks.iter();
        let freeing = blocks.filter(|block| counts.freeing.contains(&block.index));
        let mut reads = stream::iter(freeing.map(|block| self.freed_in(*block)))
            .buffered(self.tables_at_once().div_ceil(2));
        let mut run = 0..0;
        while let Some(freed) = reads.next().await {
            for clusters in freed.unwrap_or_default() {
                if clusters.start == run.end {
                    run.end = clusters.end;
                } else {
                    self.free_run(run, reason).await;
                    run = clusters;
                }
            }
        }
        self.free_run(run, reason).await;
    }

    async fn free_run(&self, run: Range<u64>, reason: Reason) {
        if run.is_empty() {
            return;
        }
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let bytes = run.start * cluster_bytes..run.end * cluster_bytes;
        self.compressed.kept.forget(bytes);
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

/// Fills a part of a table of words that begins `at` bytes into it.
fn fill_words(bytes: &mut [u8], at: u64, word: impl Fn(u64) -> u64) {
    for (index, place) in (at / 8..).zip(bytes.chunks_exact_mut(8)) {
        place.copy_from_slice(&word(index).to_be_bytes());
    }
}
