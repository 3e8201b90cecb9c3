//! Long runs of new clusters at the end of the file: for a table that must be in one
//! piece, and for space made ahead of its use.
//!
//! A run may need refcount blocks that do not exist yet, and a larger refcount table
//! for them. They lie before the clusters that are asked for, so that all of it is
//! one area:
//!
//! ```text
//! new refcount blocks | new refcount table | clusters asked for
//! ```
//!
//! Everything that counts the area is durable before anything points at the blocks.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::header::{encode_refcount_table, field};
use vellum_format::refcount::{self, RefcountTableEntry};
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::range_lock::overlap;
use vellum_io::{Buffer, Buffers, ErrorKind, Result};
use vellum_storage::WriteFlags;

use super::allocator::{Allocator, check_limit};
use super::refcount_growth::check_table_size;
use super::refcounts::RefcountTable;
use crate::qcow2::create::write::region;

/// Where an area and what counts it lie, in clusters.
struct Area {
    clusters: Range<u64>,
    /// Indexes of the refcount blocks that are new.
    new_blocks: Vec<u64>,
    /// Length of the new refcount table; 0 if the old one has room.
    table_clusters: u64,
}

impl Allocator {
    /// Allocates `count` clusters that lie side by side beyond everything that was
    /// ever used, each with a refcount of one. Where the file reads as zeroes beyond
    /// its end, they do.
    ///
    /// # Errors
    /// When the refcounts cannot be read or written, or the format's limits are
    /// reached.
    pub(crate) async fn allocate_at_end(&self, count: u64) -> Result<HostOffset> {
        let _held = self.hold_end().await;
        let cluster_bytes = self.refcounts.geometry.cluster_size_bytes();
        let mut start = self.state().tail;
        loop {
            let area = self.plan_area(start, count)?;
            check_limit(HostCluster(area.clusters.end), cluster_bytes)?;
            self.check_inside(area.clusters.end)?;
            if let Some(next) = self.take_counted(&area.clusters).await? {
                start = next;
                continue;
            }
            self.move_tail(&area.clusters);
            if !area.new_blocks.is_empty() {
                self.count_rest(&area).await?;
            }
            self.emit_refcounts_raised().await;
            let first = area.clusters.end - count;
            return Ok(HostOffset(first * cluster_bytes));
        }
    }

    /// Allocates `count` clusters that lie side by side, each with a refcount of one: known free ones,
    /// or else as [`Allocator::allocate_at_end`] does.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn allocate_run(self: &Arc<Self>, count: u64) -> Result<HostOffset> {
        if let Some(known) = self.allocate_known_run(count).await? {
            return Ok(known.start);
        }
        let error = match self.allocate_at_end(count).await {
            Err(error) if error.kind() == ErrorKind::NoSpace => error,
            allocated => return allocated,
        };
        self.empty_reserve().await?;
        self.scan_rest().await?;
        let known = self.allocate_known_run(count).await?;
        known.map(|known| known.start).ok_or(error)
    }

    /// Moves the tail behind an area; what lies between them can be had later.
    fn move_tail(&self, area: &Range<u64>) {
        let mut state = self.state();
        let passed = state.tail..area.start;
        state.tail = area.end;
        state.length.note_end(area.end * self.cluster_bytes());
        state.insert_free(passed);
    }

    /// An area of `count` clusters from `start` on, with what must count it.
    fn plan_area(&self, start: u64, count: u64) -> Result<Area> {
        let geometry = &self.refcounts.geometry;
        let per_block = geometry.refcount_block_entries();
        let per_cluster = geometry.table_entries_per_cluster();
        let table = self.refcounts.table();
        let entries = table.entries.len() as u64;
        let is_missing = |index: &u64| {
            let entry = table.entries.get(*index as usize);
            entry.is_none_or(|entry| entry.raw_offset() == 0)
        };
        let (mut new_blocks, mut table_clusters) = (Vec::new(), 0);
        loop {
            let end = start + new_blocks.len() as u64 + table_clusters + count;
            let blocks = start / per_block..end.div_ceil(per_block);
            let larger = if blocks.end > entries {
                blocks.end.max(entries + entries / 2).div_ceil(per_cluster)
            } else {
                0
            };
            check_table_size(larger * geometry.cluster_size_bytes())?;
            let missing: Vec<u64> = blocks.filter(is_missing).collect();
            if missing.len() == new_blocks.len() && larger == table_clusters {
                return Ok(Area {
                    clusters: start..end,
                    new_blocks,
                    table_clusters,
                });
            }
            (new_blocks, table_clusters) = (missing, larger);
        }
    }

    /// Raises the counts of those clusters that have refcount blocks already. If one
    /// of them is in use or was written before, or this fails, nothing is raised.
    /// Returns where to look next in that case.
    async fn take_counted(&self, clusters: &Range<u64>) -> Result<Option<u64>> {
        let mut taken = Vec::new();
        let result = self.take_slices(clusters, &mut taken).await;
        if !matches!(result, Ok(None)) {
            for mut clusters in taken {
                while !clusters.is_empty() {
                    clusters.start += self
                        .refcounts
                        .lower_in_slice(clusters.clone())
                        .await?
                        .clusters;
                }
            }
        }
        result
    }

    async fn take_slices(
        &self,
        clusters: &Range<u64>,
        taken: &mut Vec<Range<u64>>,
    ) -> Result<Option<u64>> {
        let per_slice = self.refcounts.entries_per_slice();
        let mut at = clusters.start;
        while at < clusters.end {
            let stop = (at / per_slice + 1)
                .saturating_mul(per_slice)
                .min(clusters.end);
            match self.take_all(at..stop)? {
                Taken::Uncounted => {}
                Taken::Load(key) => {
                    self.refcounts.load(key).await?;
                    continue;
                }
                Taken::Yes => taken.push(at..stop),
                Taken::NotFresh { next } => return Ok(Some(next)),
            }
            at = stop;
        }
        Ok(None)
    }

    /// Takes clusters of one slice, all or none, at one moment.
    fn take_all(&self, clusters: Range<u64>) -> Result<Taken> {
        // Nobody else takes anything meanwhile.
        let state = self.state();
        let written = state.written_beyond.iter();
        let written = written.filter(|written| overlap(written, &clusters));
        if let Some(next) = written.map(|written| written.end).max() {
            return Ok(Taken::NotFresh { next });
        }
        if let Some(mapped) = state.first_mapped_in(&clusters)? {
            return Ok(Taken::NotFresh { next: mapped.end });
        }
        let Some(place) = self.refcounts.place(HostCluster(clusters.start))? else {
            return Ok(Taken::Uncounted);
        };
        let wanted = place.index..place.index + (clusters.end - clusters.start) as usize;
        match self.refcounts.last_used(place.key, wanted.clone()) {
            None => return Ok(Taken::Load(place.key)),
            Some(Some(used)) => {
                let next = clusters.start + (used - place.index) as u64 + 1;
                return Ok(Taken::NotFresh { next });
            }
            Some(None) => self.refuse_metadata(&clusters)?,
        }
        Ok(match self.refcounts.take(place.key, wanted) {
            true => Taken::Yes,
            false => Taken::Load(place.key),
        })
    }

    /// Writes the new refcount blocks, and then what points at them. If that fails, and nothing points
    /// at them, the area is free again.
    async fn count_rest(&self, area: &Area) -> Result<()> {
        let entries = match self.write_blocks(area).await {
            Ok(entries) => entries,
            Err(error) => {
                self.uncount(&area.clusters).await;
                return Err(error);
            }
        };
        match area.table_clusters {
            0 => self.enter_blocks(area, &entries).await,
            _ => self.move_table(area, entries).await,
        }
    }

    /// Lowers those counts of an area again that lie in blocks which were there before.
    async fn uncount(&self, clusters: &Range<u64>) {
        let per_block = self.refcounts.geometry.refcount_block_entries();
        let mut counted = Vec::new();
        let mut at = clusters.start;
        while at < clusters.end {
            let end = ((at / per_block + 1) * per_block).min(clusters.end);
            if matches!(self.refcounts.place(HostCluster(at)), Ok(Some(_))) {
                counted.push(at..end);
            }
            at = end;
        }
        drop(self.decrement(counted).await);
    }

    /// Writes the new refcount blocks, and a larger table if they need one, durably; nothing points at
    /// them yet. Returns the entries of the table that does.
    async fn write_blocks(&self, area: &Area) -> Result<Vec<RefcountTableEntry>> {
        let geometry = self.refcounts.geometry;
        let cluster_bytes = geometry.cluster_size_bytes();
        let start = area.clusters.start * cluster_bytes;
        let len_bytes = area.new_blocks.len() as u64 * cluster_bytes;
        region(
            &self.refcounts.file,
            start..start + len_bytes,
            |at, bytes| {
                let first = (at / cluster_bytes) as usize;
                let blocks = bytes.chunks_exact_mut(cluster_bytes as usize);
                for (block, &index) in blocks.zip(&area.new_blocks[first..]) {
                    self.fill_block(block, index, &area.clusters);
                }
            },
        )
        .await?;
        self.refcounts.write_back().await?;
        self.refcounts.file.flush().await?;
        let mut entries = self.refcounts.table().entries.to_vec();
        if area.table_clusters > 0 {
            let count = area.table_clusters * geometry.table_entries_per_cluster();
            entries.resize(count as usize, RefcountTableEntry::UNALLOCATED);
        }
        for (number, &index) in area.new_blocks.iter().enumerate() {
            let offset = HostOffset(start + number as u64 * cluster_bytes);
            entries[index as usize] = RefcountTableEntry::new(offset);
        }
        if area.table_clusters > 0 {
            let file = &self.refcounts.file;
            let bytes = Buffers::from_iter([table_bytes(&entries)]);
            file.write(start + len_bytes, bytes, WriteFlags::default())
                .await?;
            file.flush().await?;
        }
        Ok(entries)
    }

    /// Writes what leads to the area. If that fails, what was there is written once more, durably, and
    /// nothing leads to the area.
    async fn lead_to(&self, area: &Area, at_bytes: u64, old: Buffer, new: Buffer) -> Result<()> {
        let file = &self.refcounts.file;
        let write = |bytes| {
            let (buffers, flags) = (Buffers::from_iter([bytes]), WriteFlags::default());
            file.write(at_bytes, buffers, flags)
        };
        let Err(error) = write(new).await else {
            return Ok(());
        };
        // Else nobody knows what is there, and the area stays counted.
        if write(old).await.is_ok() && file.flush().await.is_ok() {
            self.uncount(&area.clusters).await;
        }
        Err(error)
    }

    /// The counts of block number `index`, which is new and counts only the area.
    fn fill_block(&self, block: &mut [u8], index: u64, area: &Range<u64>) {
        let geometry = &self.refcounts.geometry;
        let per_block = geometry.refcount_block_entries();
        let first = index * per_block;
        block.fill(0);
        for cluster in area.start.max(first)..area.end.min(first + per_block) {
            let at = (cluster - first) as usize;
            let fits = refcount::set(block, geometry.refcount_order, at, 1);
            debug_assert!(fits, "1 fits every width");
        }
    }

    /// Enters the new blocks into the refcount table where it is.
    async fn enter_blocks(&self, area: &Area, entries: &[RefcountTableEntry]) -> Result<()> {
        let blocks = &area.new_blocks;
        let (Some(&first), Some(&last)) = (blocks.first(), blocks.last()) else {
            return Ok(());
        };
        let places = first as usize..last as usize + 1;
        let (at, old) = {
            let table = self.refcounts.table();
            let old = places.clone().map(|index| table.entries.get(index));
            let old: Vec<RefcountTableEntry> = old.map(Option::unwrap_or_default).collect();
            (table.offset.bytes() + 8 * first, table_bytes(&old))
        };
        let new = table_bytes(&entries[places]);
        self.lead_to(area, at, old, new).await?;
        for &index in blocks {
            let block = HostOffset(entries[index as usize].raw_offset());
            self.refcounts.enter_block(index as usize, block);
        }
        Ok(())
    }

    /// Has the header point at the larger refcount table that the area holds.
    async fn move_table(&self, area: &Area, entries: Vec<RefcountTableEntry>) -> Result<()> {
        let first = area.clusters.start + area.new_blocks.len() as u64;
        let offset = HostOffset(first * self.cluster_bytes());
        let fields = |offset, clusters| {
            let bytes = encode_refcount_table(offset, clusters as u32);
            Buffer::copy_of(&bytes)
        };
        let old = {
            let table = self.refcounts.table();
            fields(table.offset, table.clusters)
        };
        let at = field::REFCOUNT_TABLE_OFFSET as u64;
        let new = fields(offset, area.table_clusters);
        self.lead_to(area, at, old, new).await?;
        self.refcounts.file.flush().await?;
        let new = RefcountTable::new(offset, area.table_clusters, entries);
        let old = self.refcounts.replace_table(new);
        let start = old.offset.cluster(&self.refcounts.geometry);
        self.release(start, old.clusters).await
    }
}

/// What became of an attempt to take clusters.
enum Taken {
    Yes,
    /// One of them is in use, or was written before; `next` may be free again.
    NotFresh {
        next: u64,
    },
    /// This slice of a block has to be loaded first.
    Load(u64),
    /// There is no refcount block for them.
    Uncounted,
}

fn table_bytes(entries: &[RefcountTableEntry]) -> Buffer {
    let mut bytes = Buffer::zeroed(entries.len() * 8);
    for (place, entry) in bytes.chunks_exact_mut(8).zip(entries) {
        place.copy_from_slice(&entry.0.to_be_bytes());
    }
    bytes
}
