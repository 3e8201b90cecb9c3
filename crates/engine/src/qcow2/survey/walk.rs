//! Walks over all tables of an image.
//!
//! With what the check reads them with, but on a way of its own: the check takes each table once, in the
//! order of the file and on all cores, and only counts. Whose a cluster is, and where an extent ends, show
//! only in the order of the guest, the disk before its snapshots.

use std::collections::HashMap;
use std::sync::Arc;

use vellum_format::bitmap::BitmapCluster;
use vellum_format::compressed::CompressedDescriptor;
use vellum_format::snapshot::SnapshotEntry;
use vellum_format::{Geometry, HostOffset, L1Entry, L2Entry, Mapping};

use super::cells::{Cells, Content};
use super::report::{Mapped, MetadataBytes, SnapshotSpace, Survey, SurveyOptions};
use super::tables::CacheTally;
use crate::qcow2::check::bitmaps::for_each_entry;
use crate::qcow2::check::counts::{CHUNK_CLUSTERS, Counts};
use crate::qcow2::check::parts::Parts;
use crate::qcow2::check::source::Image;
use crate::qcow2::check::stored::Stored;
use crate::qcow2::check::tables::for_each_table;
use crate::qcow2::header::load;
use crate::{Result, Storage};

/// Who has been seen to use a host cluster: at most one of these.
const BY_DISK: u64 = 1;
const BY_SNAPSHOT: u64 = 2;

/// An L2 table that snapshots use.
#[derive(Debug, Clone, Copy, Default)]
struct Table {
    /// L1 entries that lead to it.
    uses: u64,
    /// The last snapshot among these; the only one if there is one use.
    snapshot: usize,
    /// Bytes that it maps, once it has been read.
    mapped_bytes: Option<u64>,
    by_disk: bool,
}

/// Whose table is being read.
#[derive(Debug, Clone, Copy)]
enum Reader {
    Disk,
    /// Only this snapshot uses the table.
    One(usize),
    /// Several use the table; what the disk uses has been seen.
    Several,
}

/// A snapshot and its number.
type Snapshot<'a> = (usize, &'a SnapshotEntry);

struct Walk<'a> {
    image: &'a Image,
    stored: Stored,
    seen: Counts,
    cells: Cells,
    disk: Mapped,
    metadata: MetadataBytes,
    snapshots: Vec<SnapshotSpace>,
    only_in_snapshots_bytes: u64,
    /// Those that snapshots use.
    tables: Parts<Table>,
    cache: CacheTally,
    /// Where the next data cluster would continue the last one.
    next_host: Option<u64>,
}

/// Surveys the image in `storage`.
///
/// # Errors
/// If the header, the snapshot table or the bitmap directory is refused, a read fails, or
/// the tables overlap so much that reading them would take for ever.
pub async fn survey(storage: Arc<dyn Storage>, options: &SurveyOptions) -> Result<Survey> {
    let image = Image::open(storage, options.on_progress.clone()).await?;
    let geometry = image.geometry;
    let cluster = geometry.cluster_size_bytes();
    let disk_bytes = image.header.guest_size_bytes();
    let mut walk = Walk {
        stored: Stored::load(&image).await?,
        image: &image,
        seen: Counts::default(),
        cells: Cells::new(options.cells, image.len_bytes(), cluster),
        disk: Mapped {
            total_clusters: geometry.clusters_for(disk_bytes),
            ..Mapped::default()
        },
        metadata: MetadataBytes::default(),
        snapshots: Vec::new(),
        only_in_snapshots_bytes: 0,
        tables: Parts::new(image.len_bytes()),
        cache: CacheTally::new(geometry, disk_bytes),
        next_host: None,
    };
    let snapshots = load::snapshots(&image.storage, &image.header).await?;
    walk.snapshots = vec![SnapshotSpace::default(); snapshots.entries.len()];
    walk.metadata.snapshot_table = walk.area(
        image.header.snapshots_offset.0,
        match snapshots.entries.is_empty() {
            true => 0,
            false => snapshots.size_bytes,
        },
    );
    if let [only] = walk.snapshots.as_mut_slice() {
        only.own_bytes += walk.metadata.snapshot_table;
    }
    walk.areas().await?;
    walk.disk(&snapshots.entries).await?;
    walk.bitmaps().await?;
    let counted_bytes = walk.counted_clusters() * cluster;
    Ok(Survey {
        file_length_bytes: image.len_bytes(),
        disk: walk.disk,
        metadata: walk.metadata,
        snapshots: walk.snapshots,
        only_in_snapshots_bytes: walk.only_in_snapshots_bytes,
        counted_bytes,
        cache: walk.cache.finish(),
        host: walk.cells.cells,
        host_cell_bytes: walk.cells.cell_bytes,
    })
}

impl Walk<'_> {
    fn geometry(&self) -> Geometry {
        self.image.geometry
    }

    fn cluster_bytes(&self) -> u64 {
        self.geometry().cluster_size_bytes()
    }

    /// Notes metadata; says how many bytes of whole clusters it takes.
    fn area(&mut self, offset: u64, len_bytes: u64) -> u64 {
        let whole = len_bytes.next_multiple_of(self.cluster_bytes());
        self.cells.add(Content::Metadata, offset, whole);
        whole
    }

    /// Everything that the header leads to directly.
    async fn areas(&mut self) -> Result<()> {
        let header = &self.image.header;
        let cluster = self.cluster_bytes();
        self.metadata.header = self.area(0, cluster);
        let l1_bytes = u64::from(header.l1_entries) * 8;
        self.metadata.l1 = self.area(header.l1_table_offset.0, l1_bytes);
        let table_bytes = u64::from(header.refcount_table_clusters) * cluster;
        self.metadata.refcount_table = self.area(header.refcount_table_offset.0, table_bytes);
        let blocks: Vec<u64> = self.stored.entries().map(|(_, e)| e.raw_offset()).collect();
        for offset in blocks {
            self.metadata.refcount_blocks += self.area(offset, cluster);
        }
        if let Some(pointer) = header.encryption_header() {
            self.metadata.encryption = self.area(pointer.offset.0, pointer.length_bytes);
        }
        if let Some(log) = header.write_log_inside() {
            self.metadata.write_log = self.area(log.start, log.end - log.start);
        }
        Ok(())
    }

    /// The L2 tables that an L1 table leads to, in its order; only what can be read.
    async fn l1_table(&self, offset: HostOffset, entries: u32) -> Result<Vec<u64>> {
        let table = self.image.read_l1_table(offset, entries).await?;
        let geometry = self.geometry();
        let offsets = (0..table.len() / 8)
            .filter_map(|index| L1Entry::read(&table, index)?.decode(&geometry).ok()?)
            .map(|offset| offset.0)
            .filter(|offset| *offset < self.image.len_bytes());
        Ok(offsets.collect())
    }

    /// The disk's tables, and then those of snapshots.
    async fn disk(&mut self, snapshots: &[SnapshotEntry]) -> Result<()> {
        let header = &self.image.header;
        let active = self
            .l1_table(header.l1_table_offset, header.l1_entries)
            .await?;
        self.metadata.l2 = active.len() as u64 * self.cluster_bytes();
        let snapshots = self.snapshot_l1_tables(snapshots);
        self.find_snapshot_tables(&active, &snapshots).await?;
        self.read_tables(&active, Self::disk_table).await?;
        self.snapshot_tables(&snapshots).await?;
        while self.tables.next_part().is_some() {
            self.find_snapshot_tables(&active, &snapshots).await?;
            self.snapshot_tables(&snapshots).await?;
        }
        Ok(())
    }

    /// Counts the L1 tables of snapshots that can be read.
    fn snapshot_l1_tables<'s>(&mut self, snapshots: &'s [SnapshotEntry]) -> Vec<Snapshot<'s>> {
        let geometry = self.geometry();
        let readable = snapshots.iter().enumerate();
        let readable: Vec<_> = readable
            .filter(|(_, snapshot)| snapshot.check_l1_table(&geometry).is_ok())
            .collect();
        for (number, snapshot) in &readable {
            let size_bytes = u64::from(snapshot.l1_entries) * 8;
            let l1_bytes = self.area(snapshot.l1_table_offset.0, size_bytes);
            self.metadata.snapshot_l1 += l1_bytes;
            self.snapshots[*number].own_bytes += l1_bytes;
        }
        readable
    }

    /// Finds the tables in a part of the file that snapshots use.
    async fn find_snapshot_tables(
        &mut self,
        active: &[u64],
        snapshots: &[Snapshot<'_>],
    ) -> Result<()> {
        for &(number, snapshot) in snapshots {
            let tables = self
                .l1_table(snapshot.l1_table_offset, snapshot.l1_entries)
                .await?;
            for offset in tables {
                self.tables.note(offset, |table| {
                    table.uses += 1;
                    table.snapshot = number;
                });
            }
        }
        for offset in active {
            if let Some(table) = self.tables.get_mut(*offset) {
                table.by_disk = true;
            }
        }
        Ok(())
    }

    /// Reads what has not been read of these, and adds up what each snapshot refers to.
    async fn snapshot_tables(&mut self, snapshots: &[Snapshot<'_>]) -> Result<()> {
        let unread = self.tables.known();
        let unread = unread.filter(|(_, table)| table.mapped_bytes.is_none());
        let unread: Vec<u64> = unread.map(|(offset, _)| offset).collect();
        self.read_tables(&unread, Self::snapshot_table).await?;
        for &(number, snapshot) in snapshots {
            let tables = self
                .l1_table(snapshot.l1_table_offset, snapshot.l1_entries)
                .await?;
            let known = tables.iter().filter_map(|offset| self.tables.get(*offset));
            let bytes: u64 = known.filter_map(|table| table.mapped_bytes).sum();
            self.snapshots[number].total_bytes += bytes;
        }
        Ok(())
    }

    async fn read_tables(
        &mut self,
        offsets: &[u64],
        each: impl Fn(&mut Self, u64, &[u8]),
    ) -> Result<()> {
        let image = self.image;
        let cluster = self.cluster_bytes();
        image.spend(offsets.len() as u64 * cluster)?;
        for_each_table(image, offsets, cluster, |number, bytes| {
            each(self, offsets[number], bytes);
            Ok(())
        })
        .await
    }

    fn disk_table(&mut self, offset: u64, bytes: &[u8]) {
        self.area(offset, self.cluster_bytes());
        self.cache.add(bytes);
        let mapped_bytes = self.entries(bytes, Reader::Disk);
        if let Some(table) = self.tables.get_mut(offset) {
            table.mapped_bytes = Some(mapped_bytes);
        }
    }

    fn snapshot_table(&mut self, offset: u64, bytes: &[u8]) {
        let cluster = self.cluster_bytes();
        let Some(&table) = self.tables.get(offset) else {
            return;
        };
        let mut reader = Reader::Several;
        if !table.by_disk {
            self.metadata.snapshot_l2 += self.area(offset, cluster);
            if table.uses == 1 {
                reader = Reader::One(table.snapshot);
                self.snapshots[table.snapshot].own_bytes += cluster;
            }
        }
        let mapped_bytes = self.entries(bytes, reader);
        if let Some(table) = self.tables.get_mut(offset) {
            table.mapped_bytes = Some(mapped_bytes);
        }
    }

    /// Counts what a table maps; says how many bytes these are.
    fn entries(&mut self, table: &[u8], reader: Reader) -> u64 {
        let geometry = self.geometry();
        let mut mapped = 0;
        // How often this table refers to each host cluster that holds compressed data.
        let mut compressed: HashMap<u64, u64> = HashMap::new();
        for index in 0..geometry.l2_entries() as usize {
            let Some(entry) = L2Entry::read(table, index, &geometry) else {
                break;
            };
            if entry == L2Entry::UNALLOCATED {
                continue;
            }
            let Ok(mapping) = entry.decode(&geometry) else {
                self.disk.invalid_clusters += u64::from(matches!(reader, Reader::Disk));
                continue;
            };
            if let Reader::Disk = reader {
                self.note_mapping(mapping);
            }
            match mapping {
                Mapping::Compressed(descriptor) => {
                    mapped += descriptor.max_len_bytes();
                    self.compressed(descriptor, reader, &mut compressed);
                }
                _ => {
                    if let Some(host) = mapping.host() {
                        mapped += geometry.cluster_size_bytes();
                        self.cluster(host, reader);
                    }
                }
            }
        }
        if let Reader::One(number) = reader {
            let own = |(cluster, uses): &(&u64, &u64)| self.refcount(**cluster) == **uses;
            let own = compressed.iter().filter(own).count() as u64;
            self.snapshots[number].own_bytes += own * geometry.cluster_size_bytes();
        }
        mapped
    }

    fn note_mapping(&mut self, mapping: Mapping) {
        let cluster = self.cluster_bytes();
        let disk = &mut self.disk;
        match mapping {
            Mapping::Unallocated => return,
            Mapping::Compressed(descriptor) => {
                disk.compressed_clusters += 1;
                disk.compressed_bytes += descriptor.max_len_bytes();
                self.next_host = None;
                return;
            }
            Mapping::Zero { host, .. } => {
                disk.zero_clusters += 1;
                disk.zero_with_place_clusters += u64::from(host.is_some());
                return;
            }
            Mapping::Data { .. } => disk.data_clusters += 1,
            Mapping::Subclusters {
                allocated, zero, ..
            } => {
                disk.allocated_subclusters += u64::from(allocated.count_ones());
                disk.zero_subclusters += u64::from(zero.count_ones());
                if allocated == 0 {
                    disk.zero_clusters += u64::from(zero == u32::MAX);
                    disk.zero_with_place_clusters += u64::from(mapping.host().is_some());
                    return;
                }
                disk.data_clusters += 1;
                disk.partial_clusters += u64::from(allocated != u32::MAX);
            }
        }
        let Some(HostOffset(host)) = mapping.host() else {
            return;
        };
        disk.extents += u64::from(self.next_host != Some(host));
        self.next_host = Some(host + cluster);
        let is_shared = !self.image.geometry.external_data
            && !self.snapshots.is_empty()
            && self.refcount(host / cluster) > 1;
        self.disk.shared_clusters += u64::from(is_shared);
    }

    /// A host cluster that belongs to one guest cluster.
    fn cluster(&mut self, HostOffset(offset): HostOffset, reader: Reader) {
        if self.geometry().external_data {
            return;
        }
        let cluster = self.image.cluster_of(offset);
        if let Reader::One(number) = reader
            && self.refcount(cluster) == 1
        {
            self.snapshots[number].own_bytes += self.cluster_bytes();
        }
        let content = match reader {
            Reader::Disk if !self.snapshots.is_empty() && self.refcount(cluster) > 1 => {
                Content::Shared
            }
            Reader::Disk => Content::Data,
            _ => Content::Snapshot,
        };
        self.see(cluster, reader, content);
    }

    fn compressed(
        &mut self,
        descriptor: CompressedDescriptor,
        reader: Reader,
        uses: &mut HashMap<u64, u64>,
    ) {
        if self.geometry().external_data {
            return;
        }
        let first = self.image.cluster_of(descriptor.host_offset.0);
        let last = self.image.cluster_of(descriptor.end().0 - 1);
        for cluster in first..=last {
            if let Reader::One(_) = reader {
                *uses.entry(cluster).or_default() += 1;
            }
            self.see(cluster, reader, Content::Compressed);
        }
    }

    /// Notes a host cluster once, for the disk if that uses it.
    fn see(&mut self, cluster: u64, reader: Reader, content: Content) {
        if cluster >= self.image.file_clusters() || self.seen.get(cluster) != 0 {
            return;
        }
        let bytes = self.cluster_bytes();
        let by = match reader {
            Reader::Disk => BY_DISK,
            _ => BY_SNAPSHOT,
        };
        self.seen.set(cluster, by);
        if by == BY_SNAPSHOT {
            self.only_in_snapshots_bytes += bytes;
        }
        self.cells.add(content, cluster * bytes, bytes);
    }

    fn refcount(&self, cluster: u64) -> u64 {
        self.stored.get(cluster).unwrap_or(0)
    }

    async fn bitmaps(&mut self) -> Result<()> {
        let Some(extension) = self.image.header.bitmaps() else {
            return Ok(());
        };
        let directory = extension.directory_offset.0;
        self.metadata.bitmaps += self.area(directory, extension.directory_size_bytes);
        let (image, cluster) = (self.image, self.cluster_bytes());
        for bitmap in load::bitmaps(&image.storage, &image.header, extension).await? {
            let length = u64::from(bitmap.table_entries) * 8;
            self.metadata.bitmaps += self.area(bitmap.table_offset.0, length);
            for_each_entry(image, &bitmap, |entry| {
                if let Ok(BitmapCluster::Stored(offset)) = entry {
                    self.metadata.bitmaps += self.area(offset.0, cluster);
                }
            })
            .await?;
        }
        Ok(())
    }

    /// Clusters of the file that have a refcount.
    fn counted_clusters(&self) -> u64 {
        let counts = self.stored.counts();
        let end = self.image.file_clusters();
        (0..end)
            .step_by(CHUNK_CLUSTERS as usize)
            .map(|first| first..end.min(first + CHUNK_CLUSTERS))
            .filter(|chunk| counts.any_in(chunk.clone()))
            .map(|chunk| chunk.filter(|cluster| counts.get(*cluster) > 0).count() as u64)
            .sum()
    }
}
