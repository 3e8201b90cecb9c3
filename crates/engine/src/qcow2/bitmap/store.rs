//! Bits from the disk and to new places on it; the directory.

use std::collections::BTreeSet;
use std::ops::Range;

use vellum_format::bitmap::{
    BitmapCluster, BitmapDirectoryEntry, BitmapTableEntry, BitmapsExtension, encode_directory,
};
use vellum_format::extension::{Extension, kind};
use vellum_format::features::Autoclear;
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};
use vellum_storage::WriteFlags;

use super::crash_consistent::list_lost;
use super::dirty::Dirty;
use super::state::Table;
use crate::qcow2::commit::write_order::{DropReason, DroppedRun};
use crate::qcow2::header::load::{self, read_bytes};
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::{bad_format, corrupt};

/// Bytes of bits that are read for each byte of the file, and in any case: hostile
/// tables can name one cluster any number of times.
const BITS_PER_FILE_BYTE: u64 = 4;
const MIN_BITS_BYTES: u64 = 16 << 20;

/// Clusters that were allocated for something that nothing points at yet.
#[derive(Debug, Default)]
pub(super) struct NewClusters(Vec<(HostOffset, u64)>);

impl Image {
    /// Writes bytes of the image file; they are durable after a barrier.
    pub(super) async fn write_bytes(&self, at: u64, bytes: Buffer) -> Result<()> {
        let buffers = Buffers::from_iter([bytes]);
        let flags = WriteFlags::default();
        self.file.write(at, buffers, flags).await.map(drop)
    }

    /// The bitmap directory as it is on disk.
    pub(super) async fn bitmap_entries(&self) -> Result<Vec<BitmapDirectoryEntry>> {
        let header = self.header();
        match header.bitmaps() {
            Some(extension) => load::bitmaps(&self.file, &header, extension).await,
            None => Ok(Vec::new()),
        }
    }

    /// Reads the bits of a bitmap for a device of `size_bytes`. Where the table is too
    /// short for it everything is dirty.
    pub(super) async fn load_bitmap(
        &self,
        entry: &BitmapDirectoryEntry,
        size_bytes: u64,
    ) -> Result<(Dirty, Table)> {
        let geometry = &self.geometry;
        let granularity = entry.granularity_bits;
        let mut dirty = Dirty::new(granularity, size_bytes);
        let bytes = u64::from(entry.table_entries) * 8;
        let raw = read_bytes(&self.file, entry.table_offset.bytes(), bytes).await?;
        let cluster_bytes = geometry.cluster_size_bytes();
        let file_bytes = self.file.len_bytes()?;
        let mut left = file_bytes
            .saturating_mul(BITS_PER_FILE_BYTE)
            .max(MIN_BITS_BYTES);
        let mut clusters = Vec::with_capacity(entry.table_entries as usize);
        for index in 0..entry.table_entries as usize {
            let cluster = BitmapTableEntry::read(&raw, index)
                .ok_or_else(|| corrupt("read bitmap", "the bitmap table is too short"))?
                .decode(geometry)
                .map_err(|error| bad_format("read bitmap", &error).target(self.name.clone()))?;
            clusters.push(cluster);
            let first_byte = index as u64 * cluster_bytes;
            let first_bit = first_byte * 8;
            if first_bit >= dirty.bits().len() {
                continue;
            }
            match cluster {
                BitmapCluster::Zeros => {}
                BitmapCluster::Ones => dirty
                    .bits_mut()
                    .set(first_bit..first_bit + cluster_bytes * 8),
                BitmapCluster::Stored(host) => {
                    left = left.checked_sub(cluster_bytes).ok_or_else(|| {
                        corrupt("read bitmap", "the bitmap table names too many clusters")
                    })?;
                    let bits = read_bytes(&self.file, host.bytes(), cluster_bytes).await?;
                    dirty.bits_mut().add_from(first_byte, &bits);
                }
            }
        }
        let told = clusters.len() as u64 * cluster_bytes * 8;
        let all = dirty.bits().len();
        dirty.bits_mut().set(told..all);
        let table = Table {
            offset: entry.table_offset,
            entries: entry.table_entries,
            clusters,
            coarse: BTreeSet::new(),
        };
        Ok((dirty, table))
    }

    /// Whether every cluster of a bitmap belongs to it alone, so that it may be changed
    /// in place.
    pub(super) async fn owns_table(&self, table: &Table) -> Result<bool> {
        for (first, count) in table.host_clusters(&self.geometry) {
            for cluster in first..first + count {
                if self.refcount(HostCluster(cluster)).await? != 1 {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Allocates clusters side by side.
    pub(super) async fn allocate_run(
        &self,
        clusters: u64,
        new: &mut NewClusters,
    ) -> Result<HostOffset> {
        let start = match clusters {
            1 => self.allocate(1).await?.start,
            _ => {
                self.begin_lazy_refcounts().await?;
                self.allocator.allocate_run(clusters).await?
            }
        };
        new.0.push((start, clusters));
        Ok(start)
    }

    /// Gives back what nothing points at.
    pub(super) async fn give_back_new(&self, new: NewClusters) {
        for (start, count) in new.0 {
            let first = start.cluster(&self.geometry);
            drop(self.allocator.release(first, count).await);
        }
    }

    /// Writes bits and their table to new places. Neither is durable, and nothing points
    /// at them, before the directory is replaced. If this fails all of `new` is given back.
    pub(super) async fn store_bits(&self, dirty: &Dirty, new: &mut NewClusters) -> Result<Table> {
        let stored = self.write_bits(dirty, new).await;
        if stored.is_err() {
            self.give_back_new(std::mem::take(new)).await;
        }
        stored
    }

    async fn write_bits(&self, dirty: &Dirty, new: &mut NewClusters) -> Result<Table> {
        let geometry = &self.geometry;
        let cluster_bytes = geometry.cluster_size_bytes();
        let entries = BitmapDirectoryEntry::table_entries_for(
            dirty.size_bytes(),
            dirty.granularity_bits(),
            geometry,
        )
        .max(1);
        let mut clusters = Vec::with_capacity(entries as usize);
        let mut bytes = Buffer::zeroed(cluster_bytes as usize);
        for index in 0..entries {
            let cluster = match content(dirty, index, &mut bytes) {
                Content::Zeros => BitmapCluster::Zeros,
                Content::Ones => BitmapCluster::Ones,
                Content::Mixed => {
                    let host = self.allocate_run(1, new).await?;
                    self.write_bytes(host.bytes(), Buffer::copy_of(&bytes))
                        .await?;
                    BitmapCluster::Stored(host)
                }
            };
            clusters.push(cluster);
        }
        let run = geometry.clusters_for(entries * 8);
        let offset = self.allocate_run(run, new).await?;
        let mut raw = Buffer::zeroed((run * cluster_bytes) as usize);
        put_entries(&clusters, &mut raw);
        self.write_bytes(offset.bytes(), raw).await?;
        Ok(Table {
            offset,
            entries: entries as u32,
            clusters,
            coarse: BTreeSet::new(),
        })
    }

    /// Writes a new directory, and has the header point at it. `new`: what it needs and
    /// nothing points at yet; given back if this fails.
    pub(super) async fn replace_directory(
        &self,
        entries: &[BitmapDirectoryEntry],
        mut new: NewClusters,
    ) -> Result<()> {
        let old = self.header().bitmaps();
        let switched = self.switch_directory(entries, &mut new).await;
        if let Err(error) = switched {
            // After a failed write of the header nobody knows what it points at.
            if self.fail_stop.check("bitmap", &self.name).is_ok() {
                self.give_back_new(new).await;
            }
            return Err(error);
        }
        if let Some(old) = old {
            let first = old.directory_offset.cluster(&self.geometry).index();
            let count = self.geometry.clusters_for(old.directory_size_bytes);
            self.drop_clusters([(first, count)]);
        }
        Ok(())
    }

    async fn switch_directory(
        &self,
        entries: &[BitmapDirectoryEntry],
        new: &mut NewClusters,
    ) -> Result<()> {
        let extension = match entries.is_empty() {
            true => None,
            false => Some(self.write_directory(entries, new).await?),
        };
        self.allocator.refcounts.write_back().await?;
        self.file.flush().await?;
        let lost = list_lost(&self.header(), entries);
        self.update_header(|header| {
            header.remove_extension(kind::LOST_BITMAPS);
            match extension {
                Some(extension) => {
                    header.set_extension(Extension::Bitmaps(extension));
                    header.autoclear = header.autoclear.with(Autoclear::BITMAPS);
                }
                None => {
                    header.remove_extension(kind::BITMAPS);
                    let both = Autoclear::BITMAPS | Autoclear::CRASH_CONSISTENT_BITMAPS;
                    header.autoclear = header.autoclear.without(both);
                }
            }
            if header
                .autoclear
                .contains(Autoclear::CRASH_CONSISTENT_BITMAPS)
            {
                header.extensions.extend(lost);
            }
        })
        .await
    }

    async fn write_directory(
        &self,
        entries: &[BitmapDirectoryEntry],
        new: &mut NewClusters,
    ) -> Result<BitmapsExtension> {
        let bytes = encode_directory(entries, &self.geometry, self.size_bytes())
            .map_err(|error| bad_format("write bitmaps", &error).target(self.name.clone()))?;
        let run = self.geometry.clusters_for(bytes.len() as u64);
        let offset = self.allocate_run(run, new).await?;
        let mut padded = Buffer::zeroed((run * self.geometry.cluster_size_bytes()) as usize);
        padded[..bytes.len()].copy_from_slice(&bytes);
        self.write_bytes(offset.bytes(), padded).await?;
        Ok(BitmapsExtension {
            count: entries.len() as u32,
            directory_size_bytes: bytes.len() as u64,
            directory_offset: offset,
        })
    }

    /// Writes flags of bitmaps where the directory is; a crash leaves any of them as it
    /// was. Durable at its end.
    pub(super) async fn rewrite_flags(&self, entries: &[BitmapDirectoryEntry]) -> Result<()> {
        let Some(extension) = self.header().bitmaps() else {
            return Ok(());
        };
        let bytes = encode_directory(entries, &self.geometry, self.size_bytes())
            .map_err(|error| bad_format("write bitmaps", &error).target(self.name.clone()))?;
        if bytes.len() as u64 != extension.directory_size_bytes {
            let message = "the bitmap directory is not as long as its entries";
            return Err(Error::new(ErrorKind::Corrupt, "write bitmaps", message));
        }
        let at = extension.directory_offset.bytes();
        self.write_bytes(at, Buffer::copy_of(&bytes)).await?;
        self.file.flush().await
    }

    /// Notes runs of clusters that nothing on disk points at any more.
    pub(super) fn drop_clusters(&self, runs: impl IntoIterator<Item = (u64, u64)>) {
        for (first, count) in runs {
            self.commits.defer_free(DroppedRun {
                start: HostCluster(first),
                count,
                reason: DropReason::Other,
                freeable: 0,
            });
        }
    }

    pub(super) fn drop_table_of_bitmap(&self, table: &Table) {
        self.drop_clusters(table.host_clusters(&self.geometry));
    }
}

/// What a cluster of bits is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Zeros,
    Ones,
    Mixed,
}

/// Fills `bytes` with cluster `index` of a bitmap's bits.
pub(super) fn content(dirty: &Dirty, index: u64, bytes: &mut [u8]) -> Content {
    dirty.bits().copy_to(index * bytes.len() as u64, bytes);
    let first = bytes.first().copied().unwrap_or(0);
    match first {
        0 | 0xff if bytes.iter().all(|&byte| byte == first) => match first {
            0 => Content::Zeros,
            _ => Content::Ones,
        },
        _ => Content::Mixed,
    }
}

/// Writes table entries to the beginning of `raw`.
pub(super) fn put_entries(clusters: &[BitmapCluster], raw: &mut [u8]) {
    for (index, cluster) in clusters.iter().enumerate() {
        let written = cluster.encode().write(raw, index);
        debug_assert!(written, "the table has room for its entries");
    }
}

/// Runs of numbers side by side.
pub(super) fn runs_of(numbers: &BTreeSet<usize>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some(last) if last.end == number => last.end += 1,
            _ => runs.push(number..number + 1),
        }
    }
    runs
}
