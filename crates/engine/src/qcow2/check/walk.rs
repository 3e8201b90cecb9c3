//! Walks everything that the header leads to, but for the refcount blocks, and counts
//! references to clusters.

use std::collections::BTreeSet;
use std::sync::Arc;

use vellum_format::snapshot::SnapshotEntry;
use vellum_format::{Geometry, HostOffset, L1Entry, L2Entry, limits};

use super::bitmaps;
use super::findings::Findings;
use super::l2_tables::{L2Tables, Uses};
use super::outcome::{Outcome, Zeroed};
use super::report::Fix;
use super::snapshots;
use super::source::Image;
use super::stored::Stored;
use super::tables;
use super::tables::Batch;
use super::tally::{Tally, report_overflow};
use super::team::{Found, Team};
use crate::Result;

/// Clusters beyond the end of the file whose refcounts are looked up; for more than
/// these they are taken as 0.
const MAX_BEYOND: usize = 1 << 20;

/// Entries that one run puts right at most; the next finds the others.
const MAX_ZEROED: usize = 1 << 20;

/// What an L2 entry is, as far as references go.
pub(super) enum Kind {
    Nothing,
    Compressed,
    /// A host cluster, whether or not it is read.
    Cluster(u64),
}

impl Kind {
    pub(super) fn of(entry: L2Entry, geometry: &Geometry) -> Self {
        if entry.is_compressed() {
            Kind::Compressed
        } else if has_cluster(entry, geometry) {
            Kind::Cluster(entry.raw_offset())
        } else {
            Kind::Nothing
        }
    }
}

pub(super) struct Walk<'a> {
    image: &'a Image,
    stored: Stored,
    findings: &'a mut Findings,
    tally: Tally,
    fix: Option<Fix>,
    l2_tables: L2Tables,
    zeroed: Vec<Zeroed>,
    copied_flags_differ: bool,
    beyond: BTreeSet<u64>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        image: &'a Image,
        stored: Stored,
        fix: Option<Fix>,
        findings: &'a mut Findings,
    ) -> Self {
        Walk {
            image,
            stored,
            findings,
            tally: Tally::new(image),
            fix,
            l2_tables: L2Tables::new(image.len_bytes()),
            zeroed: Vec::new(),
            copied_flags_differ: false,
            beyond: BTreeSet::new(),
        }
    }

    /// Counts everything but the refcount blocks, in QEMU's order.
    pub(super) async fn run(mut self, snapshots: &snapshots::Table) -> Result<Outcome> {
        let header = &self.image.header;
        self.add_area(0, self.image.geometry.cluster_size_bytes());
        self.l1_table(header.l1_table_offset, header.l1_entries, true)
            .await?;
        self.snapshot_l1_tables(&snapshots.entries).await?;
        loop {
            self.l2_tables().await?;
            if !self.l2_tables.next_part(self.image) {
                break;
            }
            self.find_l2_tables(&snapshots.entries).await?;
        }
        self.add_area(snapshots.offset_bytes, snapshots.size_bytes);
        let table_size =
            u64::from(header.refcount_table_clusters) << self.image.geometry.cluster_bits;
        self.add_area(header.refcount_table_offset.0, table_size);
        if let Some(pointer) = header.encryption_header() {
            self.add_area(pointer.offset.0, pointer.length_bytes);
        }
        if let Some(log) = header.write_log_inside() {
            self.add_area(log.start, log.end - log.start);
        }
        bitmaps::walk(self.image, &mut self).await?;
        Ok(Outcome {
            stored: self.stored,
            tally: self.tally,
            l2_tables: self.l2_tables,
            zeroed: self.zeroed,
            copied_flags_differ: self.copied_flags_differ,
            beyond: self.beyond,
            must_rebuild: false,
        })
    }

    pub(super) fn findings(&mut self) -> &mut Findings {
        self.findings
    }

    /// Counts one reference to each cluster of a range that holds metadata.
    pub(super) fn add_area(&mut self, offset: u64, size: u64) {
        self.tally.add_area(self.image, self.findings, offset, size);
    }

    fn add_times(&mut self, offset: u64, size: u64, times: u64) {
        self.tally
            .add(self.image, self.findings, offset, size, times);
    }

    async fn snapshot_l1_tables(&mut self, snapshots: &[SnapshotEntry]) -> Result<()> {
        if self.image.geometry.external_data && !snapshots.is_empty() {
            let count = snapshots.len();
            self.findings
                .corruption(|| format!("ERROR {count} snapshots in image with data file"));
        }
        for snapshot in snapshots {
            let (id, name) = (snapshot.id_text(), snapshot.name_text());
            let offset = snapshot.l1_table_offset;
            let entries = snapshot.l1_entries;
            if !self.image.geometry.is_cluster_aligned(offset.0) {
                self.findings.corruption(|| {
                    format!(
                        "ERROR snapshot {id} ({name}) l1_offset={offset:#x}: L1 table is not \
                         cluster aligned; snapshot table entry corrupted"
                    )
                });
            } else if u64::from(entries) * 8 > limits::MAX_L1_SIZE_BYTES {
                self.findings.corruption(|| {
                    format!(
                        "ERROR snapshot {id} ({name}) l1_size={entries:#x}: L1 table is too \
                         large; snapshot table entry corrupted"
                    )
                });
            } else {
                self.l1_table(offset, entries, false).await?;
            }
        }
        Ok(())
    }

    /// Reads the L1 tables again, for the L2 tables in another part of the file.
    async fn find_l2_tables(&mut self, snapshots: &[SnapshotEntry]) -> Result<()> {
        let image = self.image;
        let own = (image.header.l1_table_offset, image.header.l1_entries, true);
        let readable = snapshots
            .iter()
            .map(|snapshot| (snapshot.l1_table_offset, snapshot.l1_entries, false))
            .filter(|&(offset, entries, _)| {
                image.geometry.is_cluster_aligned(offset.0)
                    && u64::from(entries) * 8 <= limits::MAX_L1_SIZE_BYTES
            });
        for (offset, entries, active) in std::iter::once(own).chain(readable) {
            let table = image.read_l1_table(offset, entries).await?;
            for entry in l1_entries(&table) {
                self.l2_tables.add(entry.raw_offset(), active);
            }
        }
        Ok(())
    }

    /// Counts an L1 table and notes which L2 tables it leads to.
    async fn l1_table(&mut self, offset: HostOffset, entries: u32, active: bool) -> Result<()> {
        self.add_area(offset.0, u64::from(entries) * 8);
        let table = self.image.read_l1_table(offset, entries).await?;
        for entry in l1_entries(&table) {
            self.l1_entry(entry, active);
        }
        Ok(())
    }

    fn l1_entry(&mut self, entry: L1Entry, active: bool) {
        if entry.reserved_bits() != 0 {
            let raw = entry.0;
            self.findings
                .corruption(|| format!("ERROR found L1 entry with reserved bits set: {raw:x}"));
        }
        let offset = entry.raw_offset();
        self.add_times(offset, self.image.geometry.cluster_size_bytes(), 1);
        if !self.image.geometry.is_cluster_aligned(offset) {
            self.findings.corruption(|| {
                format!(
                    "ERROR l2_offset={offset:x}: Table is not cluster aligned; L1 entry corrupted"
                )
            });
        }
        self.l2_tables.add(offset, active);
        if active {
            self.note_copied_flag(offset, entry.copied());
        }
    }

    /// Reads every L2 table that is known once, in the order of the file.
    async fn l2_tables(&mut self) -> Result<()> {
        let (offsets, uses) = self.l2_tables.known();
        let image = self.image;
        let size = image.geometry.cluster_size_bytes();
        image.spend(offsets.len() as u64 * size)?;
        let (geometry, len_bytes) = (image.geometry, image.len_bytes());
        let stored = self.stored.shared_counts();
        let Some(team) = Team::new(geometry, len_bytes, stored, self.tally.share()) else {
            self.tally.take_back();
            let mut each = |number: usize, table: &[u8]| {
                self.l2_table(offsets[number], table, uses[number]);
                Ok(())
            };
            return tables::for_each_table(image, &offsets, size, &mut each).await;
        };
        let shared = Arc::new((team, uses));
        let team = shared.clone();
        let work = move |batch: &Batch| team.0.count(batch, &team.1);
        tables::for_each_batch(image, &offsets, size, work, |batch, found| {
            self.add_found(&found);
            for &number in &found.left {
                self.l2_table(offsets[number], batch.table(number), shared.1[number]);
            }
        })
        .await?;
        self.tally.take_back();
        Ok(())
    }

    /// Takes over what was counted elsewhere.
    fn add_found(&mut self, found: &Found) {
        let report = &mut self.findings.report;
        report.allocated_clusters += found.allocated_clusters;
        report.fragmented_clusters += found.fragmented_clusters;
        report.compressed_clusters += found.compressed_clusters;
        self.copied_flags_differ |= found.copied_flags_differ;
        for &(cluster, by) in &found.overflows {
            report_overflow(self.findings, self.image.offset_of(cluster), by);
        }
    }

    fn l2_table(&mut self, table_offset: u64, table: &[u8], uses: Uses) {
        let geometry = self.image.geometry;
        let cluster_size = geometry.cluster_size_bytes();
        let mut next_offset = 0;
        for index in 0..geometry.l2_entries() as usize {
            let Some(entry) = L2Entry::read(table, index, &geometry) else {
                return;
            };
            if entry == L2Entry::UNALLOCATED {
                continue;
            }
            if entry.reserved_bits() != 0 {
                let raw = entry.descriptor;
                self.findings.corruptions(uses.all, || {
                    format!("ERROR found l2 entry with reserved bits set: {raw:x}")
                });
            }
            match Kind::of(entry, &geometry) {
                Kind::Compressed => self.compressed(index, entry, uses),
                Kind::Cluster(offset) => {
                    let at = table_offset + index as u64 * geometry.l2_entry_size_bytes();
                    if self.is_zeroed(entry, table_offset, at) {
                        continue;
                    }
                    self.cluster(entry, offset, uses);
                    if next_offset != 0 && next_offset != offset {
                        self.findings.report.fragmented_clusters += uses.active;
                    }
                    next_offset = offset + cluster_size;
                }
                Kind::Nothing if entry.bitmap as u32 != 0 => {
                    self.findings.corruptions(uses.all, || {
                        "ERROR: Unallocated cluster has non-zero subcluster allocation map".into()
                    });
                }
                Kind::Nothing => {}
            }
        }
    }

    fn compressed(&mut self, index: usize, entry: L2Entry, uses: Uses) {
        let raw = entry.descriptor;
        let (offset, size) = compressed_range(raw, self.image.geometry.cluster_bits);
        if entry.copied() {
            self.findings.corruptions(uses.all, || {
                format!(
                    "ERROR: coffset={offset:#x}: copied flag must never be set for compressed \
                     clusters"
                )
            });
        }
        let raw = entry.with_copied(false).descriptor;
        if self.image.geometry.external_data {
            self.findings.corruptions(uses.all, || {
                format!("ERROR compressed cluster {index} with data file, entry={raw:#x}")
            });
            return;
        }
        if entry.bitmap != 0 {
            self.findings.corruptions(uses.all, || {
                format!(
                    "ERROR compressed cluster {index} with non-zero subcluster allocation \
                     bitmap, entry={raw:#x}"
                )
            });
            return;
        }
        self.add_times(offset, size, uses.all);
        let report = &mut self.findings.report;
        report.allocated_clusters += uses.active;
        report.compressed_clusters += uses.active;
        // They share sectors, so that none follows the one before it.
        report.fragmented_clusters += uses.active;
    }

    #[inline]
    fn cluster(&mut self, entry: L2Entry, offset: u64, uses: Uses) {
        let geometry = self.image.geometry;
        if (entry.bitmap >> 32) & entry.bitmap & u64::from(u32::MAX) != 0 {
            self.findings.corruptions(uses.all, || {
                format!(
                    "ERROR offset={offset:x}: Allocated cluster has corrupted subcluster \
                     allocation bitmap"
                )
            });
        }
        if !geometry.is_cluster_aligned(offset) {
            self.unaligned(entry, offset, uses);
        }
        self.findings.report.allocated_clusters += uses.active;
        if !geometry.external_data {
            self.add_times(offset, geometry.cluster_size_bytes(), uses.all);
        }
        if uses.active == 0 {
            // Copied flags mean something in the active tables only.
        } else if geometry.external_data {
            self.copied_flags_differ |= !entry.copied();
        } else {
            self.note_copied_flag(offset, entry.copied());
        }
    }

    #[cold]
    fn unaligned(&mut self, entry: L2Entry, offset: u64, uses: Uses) {
        let has_data = holds_data(entry, &self.image.geometry);
        let what = if has_data { "Data" } else { "Preallocated" };
        self.findings
            .corruptions(uses.all, || format!("ERROR {}", unaligned(offset, what)));
    }

    /// Whether the entry has a broken place without data in it, which is given up.
    #[inline]
    fn is_zeroed(&mut self, entry: L2Entry, table: u64, at: u64) -> bool {
        let offset = entry.raw_offset();
        let geometry = &self.image.geometry;
        if self.fix != Some(Fix::All)
            || geometry.is_cluster_aligned(offset)
            || holds_data(entry, geometry)
            || self.zeroed.len() >= MAX_ZEROED
        {
            return false;
        }
        self.findings
            .corruption_or_repair(true, || unaligned(offset, "Preallocated"));
        let entry = match geometry.extended_l2 {
            true => L2Entry {
                descriptor: 0,
                bitmap: (entry.bitmap | entry.bitmap << 32) & !u64::from(u32::MAX),
            },
            false => L2Entry {
                descriptor: 1,
                bitmap: 0,
            },
        };
        self.zeroed.push(Zeroed { table, at, entry });
        true
    }

    /// Notes whether a copied flag of the active tables may be wrong; then they are
    /// read once more, to report in order what is.
    #[inline]
    fn note_copied_flag(&mut self, offset: u64, copied: bool) {
        let cluster = self.image.cluster_of(offset);
        if self.stored.is_loaded(cluster) {
            let refcount = self.stored.counts().get(cluster);
            self.copied_flags_differ |= (refcount == 1) != copied;
        } else if self.beyond.len() < MAX_BEYOND {
            self.beyond.insert(cluster);
            self.copied_flags_differ = true;
        }
    }
}

/// The entries of an L1 table that lead anywhere.
fn l1_entries(table: &[u8]) -> impl Iterator<Item = L1Entry> {
    let entries = (0..table.len() / 8).filter_map(|index| L1Entry::read(table, index));
    entries.filter(|entry| *entry != L1Entry::UNALLOCATED)
}

/// What is wrong with a host offset that is none.
fn unaligned(offset: u64, what: &str) -> String {
    format!("offset={offset:x}: {what} cluster is not properly aligned; L2 entry corrupted.")
}

/// Whether some of what the entry maps is read from its host cluster.
fn holds_data(entry: L2Entry, geometry: &Geometry) -> bool {
    match geometry.extended_l2 {
        true => entry.bitmap as u32 != 0,
        false => entry.descriptor & 1 == 0,
    }
}

/// Whether the entry of an L2 table has a host cluster that is its own: one that the
/// copied flag speaks of.
pub(super) fn has_cluster(entry: L2Entry, geometry: &Geometry) -> bool {
    if entry.is_compressed() {
        return false;
    }
    // Only in an external data file is offset 0 a place; there the copied flag tells
    // it from nothing. A zero cluster without a place has no flag that counts.
    let zero = !geometry.extended_l2 && entry.descriptor & 1 != 0;
    entry.raw_offset() != 0 || (geometry.external_data && entry.copied() && !zero)
}

/// The host bytes of a compressed cluster, up to the end of its last sector. Unlike
/// the codec's this takes any offset, however far beyond the end of the file.
pub(super) fn compressed_range(descriptor: u64, cluster_bits: u32) -> (u64, u64) {
    let offset_bits = 62 - (cluster_bits - 8);
    let offset = descriptor & ((1 << offset_bits) - 1);
    let sectors = (descriptor >> offset_bits) & ((1 << (cluster_bits - 8)) - 1);
    let sector_size = limits::COMPRESSED_SECTOR_BYTES;
    (offset, (sectors + 1) * sector_size - offset % sector_size)
}
