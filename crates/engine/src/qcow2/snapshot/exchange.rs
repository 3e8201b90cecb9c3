//! Exchanging metadata: everything that a change of the snapshots touches is written
//! to new places, and one write of the header puts all of it into force.
//!
//! Invariants:
//! - Until that write the image on disk is what it was: a crash wastes the new
//!   places at most. After it counts, flags and snapshot table are those of the
//!   change, without an intermediate state.
//! - Counts stay where they are if nothing that was there before is referred to more or
//!   less often: then those of new metadata rise before that write, and those of the
//!   old fall after it.
//! - Nobody changes the mapping or the counts meanwhile: see [`Image::exclusively`].
//! - What the exchange sets free is used again only after every read that began
//!   before it has ended.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::header::field;
use vellum_format::l1::L1Entry;
use vellum_format::snapshot::{SnapshotEntry, encode_table};
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::buffer::total_len;
use vellum_io::{Buffer, Buffers, Result, finish_all};
use vellum_storage::WriteFlags;

use super::counts::Counts;
use super::places::Places;
use super::references::{Deltas, too_low};
use crate::qcow2::alloc::allocator::{Allocator, HeldEnd};
use crate::qcow2::commit::write_order::{DropReason, DroppedRun};
use crate::qcow2::create::write::region;
use crate::qcow2::header::load::{SnapshotTable, read_bytes};
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::bad_format;

/// Memory for tables that are read or written at the same time.
const MAX_TABLE_BYTES: u64 = 4 << 20;
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
    pub(super) reason: DropReason,
    /// The active L1 table and the counts get new places even if they stay as they are.
    pub(super) moves: bool,
}

impl Change {
    /// Nothing that was there before is referred to more or less often.
    fn keeps_references(&self) -> bool {
        self.more.is_empty() && self.fewer.is_empty() && self.left.is_empty()
    }

    /// The counts stay where they are.
    fn keeps_counts(&self) -> bool {
        self.keeps_references() && !self.moves
    }
}

/// Metadata in its new places, before the header leads to it.
struct Exchanged {
    l1: HostOffset,
    snapshots: HostOffset,
    snapshots_bytes: u64,
    /// `None`: they stay where they are.
    counts: Option<Counts>,
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
        // All of them end: after an error their places are given back.
        finish_all(self.tables_at_once(), writes).await.map(drop)
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
        let (held, exchanged) = match self.write_new(&allocator, &mut change, &mut places).await {
            Ok(written) => written,
            Err(error) => {
                places.give_back(self).await;
                return Err(error);
            }
        };
        if let Err(error) = self.put_into_force(&change, &exchanged).await {
            drop(held);
            if self.fail_stop.check("snapshot", &self.name).is_ok() {
                places.give_back(self).await;
            }
            return Err(error);
        }
        self.adopt(&change, &exchanged)?;
        self.read_epochs.wait_for_all().await;
        match &exchanged.counts {
            Some(counts) => self.free_unused(counts, change.reason).await,
            None => self.release_metadata(&change).await?,
        }
        Ok(())
    }

    /// Refuses a change that gives back what is not counted.
    async fn check_counted(&self, change: &Change) -> Result<()> {
        for cluster in change.metadata.iter().flat_map(|(run, _)| run.clone()) {
            if self.refcount(HostCluster(cluster)).await? == 0 {
                return Err(too_low(cluster));
            }
        }
        Ok(())
    }

    /// Gives back what held metadata before, where counts have not moved.
    async fn release_metadata(&self, change: &Change) -> Result<()> {
        for (clusters, by) in &change.metadata {
            debug_assert_eq!(
                *by, -1,
                "only what moves with the counts is referred to more"
            );
            self.release_clusters(DroppedRun {
                start: HostCluster(clusters.start),
                count: clusters.end - clusters.start,
                reason: change.reason,
                freeable: 0,
            })
            .await?;
        }
        Ok(())
    }

    /// Writes everything to new places and makes it durable.
    async fn write_new<'a>(
        self: &Arc<Self>,
        allocator: &'a Allocator,
        change: &mut Change,
        places: &mut Places,
    ) -> Result<(HeldEnd<'a>, Exchanged)> {
        let l1 = self.place_l1(change, places).await?;
        if let (Some(taken), Some(new)) = (&change.taken, change.entries.last_mut()) {
            let clusters = self.geometry.clusters_for(taken.len() as u64 * 8);
            new.l1_table_offset = places.run(self, clusters).await?;
            new.l1_entries = taken.len() as u32;
            self.write_l1(new.l1_table_offset, taken, false).await?;
        }
        let (snapshots, snapshots_bytes) = self.place_snapshots(change, places).await?;
        let (held, counts) = match change.keeps_counts() {
            true => {
                self.check_counted(change).await?;
                // Else the refcount table could move as the header is written.
                let held = allocator.hold_end().await;
                allocator.refcounts.write_back().await?;
                (held, None)
            }
            false => {
                let (held, mut counts) = self.place_counts(allocator, change, places).await?;
                self.write_counts(change, &mut counts).await?;
                self.write_refcount_table(&counts).await?;
                (held, Some(counts))
            }
        };
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
        if same && !change.moves {
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

    /// Reads an L2 table or a refcount block.
    pub(super) async fn read_table(&self, table: HostOffset) -> Result<Buffer> {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        read_bytes(&self.file, table.bytes(), cluster_bytes).await
    }

    /// Has the header lead to the new metadata.
    async fn put_into_force(&self, change: &Change, new: &Exchanged) -> Result<()> {
        let header = self.header();
        let mut fields = Vec::with_capacity(HEADER_FIELDS.len());
        fields.extend(change.size_bytes.to_be_bytes());
        fields.extend(header.crypt_method.number().to_be_bytes());
        fields.extend((change.active.len() as u32).to_be_bytes());
        fields.extend(new.l1.bytes().to_be_bytes());
        let (table, clusters) = self.counts_of(new);
        fields.extend(table.bytes().to_be_bytes());
        fields.extend((clusters as u32).to_be_bytes());
        fields.extend((change.entries.len() as u32).to_be_bytes());
        fields.extend(new.snapshots.bytes().to_be_bytes());
        debug_assert_eq!(fields.len(), HEADER_FIELDS.len());
        // Rule 3: all of the change comes into force with this write.
        let old = read_bytes(&self.file, 0, HEADER_FIELDS.end as u64).await?;
        self.switch_header_fields(HEADER_FIELDS.start, &old[HEADER_FIELDS], &fields)
            .await
    }

    /// Where the refcount table lies, and how long it is.
    fn counts_of(&self, new: &Exchanged) -> (HostOffset, u64) {
        match &new.counts {
            Some(counts) => (counts.table, counts.clusters),
            None => {
                let table = self.allocator.refcounts.table();
                (table.offset, table.clusters)
            }
        }
    }

    /// Takes the new metadata into use.
    fn adopt(&self, change: &Change, new: &Exchanged) -> Result<()> {
        self.l1.replace(new.l1, &change.active);
        for &table in &change.left {
            self.forget_slices(table);
        }
        if let Some(counts) = &new.counts {
            self.adopt_counts(counts);
        }
        let (counts, counts_clusters) = self.counts_of(new);
        self.change_header(|header| {
            header.size_bytes = change.size_bytes;
            header.l1_entries = change.active.len() as u32;
            header.l1_table_offset = new.l1;
            header.refcount_table_offset = counts;
            header.refcount_table_clusters = counts_clusters as u32;
            header.snapshot_count = change.entries.len() as u32;
            header.snapshots_offset = new.snapshots;
        });
        self.set_snapshot_table(SnapshotTable {
            entries: change.entries.clone(),
            size_bytes: new.snapshots_bytes,
        });
        self.remap_metadata();
        self.unwritten.forget(0..u64::MAX);
        if change.size_bytes != self.size.visible_bytes() {
            self.set_size(change.size_bytes);
        }
        Ok(())
    }
}

/// Fills a part of a table of words that begins `at` bytes into it.
pub(super) fn fill_words(bytes: &mut [u8], at: u64, word: impl Fn(u64) -> u64) {
    for (index, place) in (at / 8..).zip(bytes.chunks_exact_mut(8)) {
        place.copy_from_slice(&word(index).to_be_bytes());
    }
}
