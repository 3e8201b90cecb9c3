//! Keeping enabled bitmaps while the image changes.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use vellum_format::bitmap::{BitmapCluster, BitmapDirectoryEntry, BitmapFlags};
use vellum_io::{Buffer, ErrorKind, Result};

use super::crash_consistent::is_consistent;
use super::dirty::Dirty;
use super::state::{Table, Tracked};
use super::store::{NewClusters, put_entries, runs_of};
use crate::qcow2::commit::coalesce::Role;
use crate::qcow2::image::Image;

/// Bits are written in whole blocks of this size, or clusters if these are smaller.
const BLOCK_BYTES: u64 = 4096;

/// What is to be written of one bitmap.
#[derive(Default)]
struct Writes {
    /// Blocks of bits: (host offset, bytes).
    bits: Vec<(u64, Vec<u8>)>,
    /// Numbers of table entries that change.
    entries: BTreeSet<usize>,
    new: NewClusters,
}

impl Image {
    /// Loads the enabled bitmaps, and marks them as in use and crash-consistent, durably. Once,
    /// before the first change of an open image; if it fails the next change does it anew.
    pub(crate) async fn begin_tracking(&self) -> Result<()> {
        if self.header().bitmaps().is_none() {
            return self.drop_lost_bitmaps().await;
        }
        let mut layout = self.bitmaps.layout.lock().await;
        let mut entries = self.bitmap_entries().await?;
        let header = self.header();
        let enabled = |entry: &BitmapDirectoryEntry| entry.flags.contains(BitmapFlags::AUTO);
        let size_bytes = self.size_bytes();
        let (mut tracked, mut tables) = (Vec::new(), Vec::new());
        let mut shared = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            if !enabled(entry) || !is_consistent(&header, entry) {
                continue;
            }
            let (dirty, table) = self.load_bitmap(entry, size_bytes).await?;
            let fits = u64::from(table.entries) >= entries_for(self, &dirty);
            if !fits || !self.owns_table(&table).await? {
                shared.push((index, tables.len()));
            }
            tracked.push(Tracked::new(entry.name.clone(), dirty));
            tables.push(table);
        }
        if tracked.is_empty() {
            return Ok(());
        }
        self.set_crash_consistent(&entries).await?;
        let mut changed = false;
        for entry in entries.iter_mut().filter(|entry| enabled(entry)) {
            changed |= !entry.flags.contains(BitmapFlags::IN_USE);
            entry.flags = entry.flags.with(BitmapFlags::IN_USE);
        }
        if changed {
            self.rewrite_flags(&entries).await?;
        }
        if !shared.is_empty() {
            let mut new = NewClusters::default();
            for (index, number) in shared {
                let table = self.store_bits(&tracked[number].dirty, &mut new).await?;
                point_at(&mut entries[index], &table);
                tables[number] = table;
            }
            self.replace_directory(&entries, new).await?;
        }
        *layout = tables;
        self.bitmaps.live().bitmaps = tracked;
        drop(self.bitmaps.uncover(size_bytes));
        Ok(())
    }

    /// Must be called before bytes of the guest change, by one who holds their range:
    /// all enabled bitmaps call it dirty afterwards, in memory and durably on disk.
    #[inline]
    pub(crate) async fn mark_dirty(self: &Arc<Self>, range: Range<u64>) -> Result<()> {
        if !self.bitmaps.is_tracking() || range.is_empty() {
            return Ok(());
        }
        // Rule 4: what is not called dirty on disk yet is so first.
        while !self.bitmaps.mark(&range)? {
            self.cover().await?;
        }
        Ok(())
    }

    /// Sets the bits of everything that is wanted on disk.
    async fn cover(self: &Arc<Self>) -> Result<()> {
        match self.bitmaps.covers.join().await {
            Role::Follower(result) => result,
            Role::Leader(turn) => {
                let mut layout = self.bitmaps.layout.lock().await;
                let regions = self.bitmaps.live().take_wanted();
                let mut planned = Vec::with_capacity(layout.len());
                let mut bits_are_durable = false;
                let covered =
                    self.cover_regions(&mut layout, &regions, &mut planned, &mut bits_are_durable);
                let result = covered.await;
                if result.is_err() {
                    for (table, writes) in layout.iter_mut().zip(&planned) {
                        for &entry in &writes.entries {
                            table.clusters[entry] = BitmapCluster::Zeros;
                        }
                    }
                    // Afterwards new clusters may or may not be in the tables on disk: others will take their
                    // place, and these are leaked.
                    if !bits_are_durable {
                        for writes in planned {
                            self.give_back_new(writes.new).await;
                        }
                    }
                }
                drop(layout);
                turn.end(result)
            }
        }
    }

    async fn cover_regions(
        &self,
        layout: &mut [Table],
        regions: &[Range<u64>],
        planned: &mut Vec<Writes>,
        bits_are_durable: &mut bool,
    ) -> Result<()> {
        for (number, table) in layout.iter_mut().enumerate() {
            let mut writes = Writes::default();
            let result = self.plan_cover(number, table, regions, &mut writes).await;
            planned.push(writes);
            result?;
        }
        for (at, bytes) in planned.iter().flat_map(|writes| &writes.bits) {
            self.write_bytes(*at, Buffer::copy_of(bytes)).await?;
        }
        let changes_tables = planned.iter().any(|writes| !writes.entries.is_empty());
        if changes_tables {
            self.allocator.refcounts.write_back().await?;
        }
        self.file.flush().await?;
        *bits_are_durable = true;
        if changes_tables {
            for (table, writes) in layout.iter().zip(planned.iter()) {
                self.write_table_entries(table, &writes.entries).await?;
            }
            self.file.flush().await?;
        }
        let mut live = self.bitmaps.live();
        for region in regions {
            live.covered.mark(region);
        }
        Ok(())
    }

    /// Finds out what setting the bits of `regions` writes; enters new clusters into the
    /// table in memory.
    async fn plan_cover(
        &self,
        number: usize,
        table: &mut Table,
        regions: &[Range<u64>],
        writes: &mut Writes,
    ) -> Result<()> {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        for (index, ranges) in self.touched_clusters(number, regions) {
            let Some(&old) = table.clusters.get(index) else {
                continue;
            };
            table.coarse.insert(index);
            let base = index as u64 * cluster_bytes;
            match old {
                BitmapCluster::Ones => {}
                BitmapCluster::Stored(host) => {
                    for block in blocks(&ranges, base, cluster_bytes) {
                        let bytes = self.bits_on_disk(number, block.clone(), regions);
                        writes.bits.push((host.bytes() + block.start - base, bytes));
                    }
                }
                BitmapCluster::Zeros => {
                    let bytes = self.bits_on_disk(number, base..base + cluster_bytes, regions);
                    let full = bytes.iter().all(|&byte| byte == 0xff);
                    table.clusters[index] = match full {
                        true => BitmapCluster::Ones,
                        false => self.place_bits(bytes, writes).await?,
                    };
                    writes.entries.insert(index);
                }
            }
        }
        Ok(())
    }

    /// A new cluster for `bytes`; on a full disk all bits are ones, which takes none.
    async fn place_bits(&self, bytes: Vec<u8>, writes: &mut Writes) -> Result<BitmapCluster> {
        match self.allocate_run(1, &mut writes.new).await {
            Ok(host) => {
                writes.bits.push((host.bytes(), bytes));
                Ok(BitmapCluster::Stored(host))
            }
            Err(error) if error.kind() == ErrorKind::NoSpace => Ok(BitmapCluster::Ones),
            Err(error) => Err(error),
        }
    }

    /// Clusters of bits that regions touch: number, and the bits as ranges.
    fn touched_clusters(
        &self,
        number: usize,
        regions: &[Range<u64>],
    ) -> BTreeMap<usize, Vec<Range<u64>>> {
        let per_cluster = self.geometry.cluster_size_bytes() * 8;
        let live = self.bitmaps.live();
        let mut touched: BTreeMap<usize, Vec<Range<u64>>> = BTreeMap::new();
        for region in regions {
            let bits = live.bitmaps[number].dirty.bits_of(region);
            for index in bits.start / per_cluster..bits.end.div_ceil(per_cluster) {
                let start = index * per_cluster;
                let inside = bits.start.max(start)..bits.end.min(start + per_cluster);
                touched.entry(index as usize).or_default().push(inside);
            }
        }
        touched
    }

    /// What the disk holds of a bitmap once `regions` are covered: a range of bytes.
    fn bits_on_disk(&self, number: usize, bytes: Range<u64>, regions: &[Range<u64>]) -> Vec<u8> {
        let live = self.bitmaps.live();
        let bitmap = &live.bitmaps[number];
        let dirty = &bitmap.dirty;
        let mut out = vec![0; (bytes.end - bytes.start) as usize];
        bitmap.copy_on_disk(bytes.start, &mut out);
        let window = bytes.start * 8..bytes.end * 8;
        let mut set = |range: &Range<u64>| {
            let bits = dirty.bits_of(range);
            let from = bits.start.max(window.start);
            let to = bits.end.min(window.end).min(dirty.bits().len());
            set_bits(
                &mut out,
                from.saturating_sub(window.start)..to.saturating_sub(window.start),
            );
        };
        regions.iter().for_each(&mut set);
        let granularity_bits = dirty.granularity_bits();
        let end = window.end.saturating_mul(1 << granularity_bits);
        let mut from = window.start << granularity_bits;
        while let Some(run) = live.covered.next_run(from).filter(|run| run.start < end) {
            from = run.end;
            set(&run);
        }
        out
    }

    /// Writes entries of a table where it is.
    pub(super) async fn write_table_entries(
        &self,
        table: &Table,
        entries: &BTreeSet<usize>,
    ) -> Result<()> {
        for run in runs_of(entries) {
            let mut raw = Buffer::zeroed(run.len() * 8);
            put_entries(&table.clusters[run.clone()], &mut raw);
            let at = table.offset.bytes() + run.start as u64 * 8;
            self.write_bytes(at, raw).await?;
        }
        Ok(())
    }
}

/// Table entries that a bitmap needs.
pub(super) fn entries_for(image: &Image, dirty: &Dirty) -> u64 {
    BitmapDirectoryEntry::table_entries_for(
        dirty.size_bytes(),
        dirty.granularity_bits(),
        &image.geometry,
    )
    .max(1)
}

/// Has a directory entry point at a table.
pub(super) fn point_at(entry: &mut BitmapDirectoryEntry, table: &Table) {
    entry.table_offset = table.offset;
    entry.table_entries = table.entries;
}

/// The blocks, as ranges of a bitmap's bytes, that ranges of bits in the cluster at
/// `base` touch.
fn blocks(bits: &[Range<u64>], base: u64, cluster_bytes: u64) -> Vec<Range<u64>> {
    let block = BLOCK_BYTES.min(cluster_bytes);
    let mut numbers = BTreeSet::new();
    for range in bits {
        let first = (range.start / 8 - base) / block;
        let end = (range.end.div_ceil(8) - base).div_ceil(block);
        numbers.extend(first as usize..end as usize);
    }
    let place = |number: usize| base + number as u64 * block;
    let runs = runs_of(&numbers).into_iter();
    runs.map(|run| place(run.start)..place(run.end)).collect()
}

fn set_bits(bytes: &mut [u8], bits: Range<u64>) {
    let mut at = bits.start;
    while at < bits.end {
        if at.is_multiple_of(8) && bits.end - at >= 8 {
            let whole = (at / 8) as usize..(bits.end / 8) as usize;
            at = bits.end / 8 * 8;
            bytes[whole].fill(0xff);
        } else {
            bytes[(at / 8) as usize] |= 1 << (at % 8);
            at += 1;
        }
    }
}
