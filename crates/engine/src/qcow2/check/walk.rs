//! Walks everything that the header leads to and counts references to clusters.

use std::collections::{BTreeMap, BTreeSet};

use vellum_format::snapshot::SnapshotEntry;
use vellum_format::{Geometry, HostOffset, L1Entry, L2Entry, limits};

use super::counts::Counts;
use super::stored::Stored;
use super::{FindingKind, Findings, Image, Outcome, bitmaps, tables};
use crate::Result;
use crate::qcow2::load;

/// Clusters beyond the end of the file whose refcounts are looked up; for more than
/// these they are taken as 0.
const MAX_BEYOND: usize = 1 << 20;

/// How often an L1 table leads to an L2 table.
#[derive(Debug, Clone, Copy, Default)]
struct Uses {
    /// From all L1 tables together.
    all: u64,
    /// From the L1 table of the disk itself.
    active: u64,
}

/// What an L2 entry is, as far as references go.
enum Kind {
    Nothing,
    Compressed,
    /// A host cluster, whether or not it is read.
    Cluster(u64),
}

/// Reads the snapshot table; a broken one ends the check, as in QEMU.
pub(super) async fn snapshots(
    image: &Image,
    findings: &mut Findings,
) -> Result<load::SnapshotTable> {
    if let Err(error) = load::check_snapshot_table(&image.header) {
        findings.report(FindingKind::CheckError, 1, || {
            format!("ERROR {}", error.message())
        });
        return Err(error);
    }
    let table = match load::snapshots(&image.storage, &image.header).await {
        Ok(table) => table,
        Err(error) => {
            let message = format!(
                "ERROR failed to read the snapshot table: {}",
                error.message()
            );
            findings.report(FindingKind::CheckError, 1, || message);
            return Err(error);
        }
    };
    for (index, entry) in table.entries.iter().enumerate() {
        if image.header.version >= 3 && entry.disk_size_bytes.is_none() {
            findings.corruption(|| format!("ERROR snapshot table entry {index} is incomplete"));
        }
    }
    Ok(table)
}

pub(super) struct Walk<'a> {
    image: &'a Image,
    stored: Stored,
    findings: &'a mut Findings,
    references: Counts,
    clusters: u64,
    max_refcount: u64,
    l2_tables: BTreeMap<u64, Uses>,
    copied_flags_differ: bool,
    beyond: BTreeSet<u64>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(image: &'a Image, stored: Stored, findings: &'a mut Findings) -> Self {
        Walk {
            image,
            stored,
            findings,
            references: Counts::default(),
            clusters: image.file_clusters(),
            max_refcount: image.geometry.max_refcount(),
            l2_tables: BTreeMap::new(),
            copied_flags_differ: false,
            beyond: BTreeSet::new(),
        }
    }

    /// Counts everything, in QEMU's order.
    pub(super) async fn run(mut self, snapshots: &load::SnapshotTable) -> Result<Outcome> {
        let header = &self.image.header;
        self.add(0, self.image.geometry.cluster_size_bytes());
        self.l1_table(header.l1_table_offset, header.l1_entries.into(), true)
            .await?;
        self.snapshot_l1_tables(&snapshots.entries).await?;
        self.l2_tables().await?;
        self.add(header.snapshots_offset.0, snapshots.size_bytes);
        let table_size =
            u64::from(header.refcount_table_clusters) << self.image.geometry.cluster_bits;
        self.add(header.refcount_table_offset.0, table_size);
        if let Some(pointer) = header.encryption_header() {
            self.add(pointer.offset.0, pointer.length_bytes);
        }
        bitmaps::walk(self.image, &mut self).await?;
        self.refcount_blocks();
        Ok(Outcome {
            stored: self.stored,
            references: self.references,
            clusters: self.clusters,
            copied_flags_differ: self.copied_flags_differ,
            beyond: self.beyond,
        })
    }

    pub(super) fn findings(&mut self) -> &mut Findings {
        self.findings
    }

    /// Counts one reference to each cluster of a range.
    pub(super) fn add(&mut self, offset: u64, size: u64) {
        self.add_times(offset, size, 1);
    }

    fn add_times(&mut self, offset: u64, size: u64, times: u64) {
        if size == 0 {
            return;
        }
        let end = offset.saturating_add(size);
        // The last cluster of a file may be there in part.
        if end.saturating_sub(self.image.len_bytes) >= self.image.geometry.cluster_size_bytes() {
            self.findings.corruptions(times, || {
                format!(
                    "ERROR: counting reference for region exceeding the end of the file by one \
                     cluster or more: offset {offset:#x} size {size:#x}"
                )
            });
            return;
        }
        for cluster in self.image.cluster_of(offset)..=self.image.cluster_of(end - 1) {
            self.add_cluster(cluster, times);
        }
    }

    #[inline]
    fn add_cluster(&mut self, cluster: u64, times: u64) {
        self.clusters = self.clusters.max(cluster + 1);
        let sum = self.references.get(cluster).saturating_add(times);
        self.references.set(cluster, sum.min(self.max_refcount));
        if sum > self.max_refcount {
            self.overflow(cluster, sum - self.max_refcount);
        }
    }

    #[cold]
    fn overflow(&mut self, cluster: u64, times: u64) {
        let offset = cluster << self.image.geometry.cluster_bits;
        self.findings.corruptions(times, || {
            format!(
                "ERROR: overflow cluster offset={offset:#x}\n\
                 Use qemu-img amend to increase the refcount entry width or qemu-img convert to \
                 create a clean copy if the image cannot be opened for writing"
            )
        });
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
                self.l1_table(offset, entries.into(), false).await?;
            }
        }
        Ok(())
    }

    /// Counts an L1 table and notes which L2 tables it leads to.
    async fn l1_table(&mut self, offset: HostOffset, entries: u64, active: bool) -> Result<()> {
        // What lies beyond the end of the file would read as zeroes.
        let len = (entries * 8).min(self.image.len_bytes.saturating_sub(offset.0));
        self.image.spend(len)?;
        self.add(offset.0, entries * 8);
        let table =
            load::read_bytes(&self.image.storage, offset.0, len.next_multiple_of(8)).await?;
        for index in 0..table.len() / 8 {
            match L1Entry::read(&table, index) {
                None | Some(L1Entry::UNALLOCATED) => {}
                Some(entry) => self.l1_entry(entry, active),
            }
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
        self.add(offset, self.image.geometry.cluster_size_bytes());
        if !self.image.geometry.is_cluster_aligned(offset) {
            self.findings.corruption(|| {
                format!(
                    "ERROR l2_offset={offset:x}: Table is not cluster aligned; L1 entry corrupted"
                )
            });
        }
        let uses = self.l2_tables.entry(offset).or_default();
        uses.all += 1;
        if active {
            uses.active += 1;
            self.note_copied_flag(offset, entry.copied());
        }
    }

    /// Reads every L2 table once, in the order of the file.
    async fn l2_tables(&mut self) -> Result<()> {
        let mut l2_tables = std::mem::take(&mut self.l2_tables);
        // Beyond the end of the file there are only zeroes.
        l2_tables.retain(|&offset, _| offset < self.image.len_bytes);
        let offsets: Vec<u64> = l2_tables.keys().copied().collect();
        let uses: Vec<Uses> = l2_tables.into_values().collect();
        let image = self.image;
        let size = image.geometry.cluster_size_bytes();
        image.spend(offsets.len() as u64 * size)?;
        tables::for_each_table(&image.storage, &offsets, size, |number, table| {
            self.l2_table(table, uses[number]);
            Ok(())
        })
        .await
    }

    fn l2_table(&mut self, table: &[u8], uses: Uses) {
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
            match self.kind(entry) {
                Kind::Compressed => self.compressed(index, entry, uses),
                Kind::Cluster(offset) => {
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

    fn kind(&self, entry: L2Entry) -> Kind {
        if entry.is_compressed() {
            Kind::Compressed
        } else if has_cluster(entry, &self.image.geometry) {
            Kind::Cluster(entry.raw_offset())
        } else {
            Kind::Nothing
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
        let has_data = match self.image.geometry.extended_l2 {
            true => entry.bitmap as u32 != 0,
            false => entry.descriptor & 1 == 0,
        };
        let what = if has_data { "Data" } else { "Preallocated" };
        self.findings.corruptions(uses.all, || {
            format!(
                "ERROR offset={offset:x}: {what} cluster is not properly aligned; L2 entry \
                 corrupted."
            )
        });
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

    /// Counts the refcount blocks, each of which must have one reference: its own.
    fn refcount_blocks(&mut self) {
        let cluster_size = self.image.geometry.cluster_size_bytes();
        let entries: Vec<_> = self.stored.entries().collect();
        for (number, entry) in entries {
            let offset = entry.raw_offset();
            let cluster = self.image.cluster_of(offset);
            if entry.reserved_bits() != 0 {
                self.findings.corruption(|| {
                    format!("ERROR refcount table entry {number} has reserved bits set")
                });
            } else if !self.image.geometry.is_cluster_aligned(offset) {
                self.findings.corruption(|| {
                    format!(
                        "ERROR refcount block {number} is not cluster aligned; refcount table \
                         entry corrupted"
                    )
                });
            } else if cluster >= self.clusters {
                self.findings
                    .corruption(|| format!("ERROR refcount block {number} is outside image"));
            } else {
                self.add(offset, cluster_size);
                let count = self.references.get(cluster);
                if count != 1 {
                    self.findings
                        .corruption(|| format!("ERROR refcount block {number} refcount={count}"));
                }
            }
        }
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
fn compressed_range(descriptor: u64, cluster_bits: u32) -> (u64, u64) {
    let offset_bits = 62 - (cluster_bits - 8);
    let offset = descriptor & ((1 << offset_bits) - 1);
    let sectors = (descriptor >> offset_bits) & ((1 << (cluster_bits - 8)) - 1);
    let sector_size = limits::COMPRESSED_SECTOR_BYTES;
    (offset, (sectors + 1) * sector_size - offset % sector_size)
}
