//! Frees what a crash has leaked, at the next open for writing, before anything else is changed.
//!
//! A compatible feature bit says that the image may have leaked clusters, which are counted although
//! nothing refers to them: it is set before the first change, and cleared by a clean close ([`MAY_HAVE_LEAKS`], FORMAT.md,
//! section 7d). The open that finds it reads all refcounts and tables. It trusts nothing else: other
//! programs keep the bit, and change the image as they like.
//!
//! Invariant: a count goes down only if it is one and nothing refers to the cluster. Whatever cannot be
//! read or is damaged ends the search, and leaves the leaks; so does an image with more metadata than
//! [`MOST_METADATA_BYTES`].
//!
//! [`MAY_HAVE_LEAKS`]: Compatible::MAY_HAVE_LEAKS

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt};
use vellum_format::Header;
use vellum_format::bitmap::{BitmapCluster, BitmapTableEntry};
use vellum_format::extension::{Extension, kind};
use vellum_format::features::Compatible;
use vellum_format::geometry::Geometry;
use vellum_format::l1::L1Entry;
use vellum_format::l2::{L2Entry, Mapping};
use vellum_format::refcount::{self, RefcountTableEntry};
use vellum_io::bits::Bits;
use vellum_io::{Buffer, Buffers, Error, Result};
use vellum_storage::mutants::{self, Mutant};
use vellum_storage::{Storage, WriteFlags};

use crate::qcow2::header::fields::write_compatible;
use crate::qcow2::header::load::{self, read_bytes};
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::bad_format;

/// Refcount blocks and L2 tables that an open reads at most: those of some 3 TiB with clusters of
/// 64 KiB. A crash leaks less of such a disk than it is worth to wait for.
const MOST_METADATA_BYTES: u64 = 512 << 20;
/// The same in clusters of the file, for which memory is needed.
const MOST_CLUSTERS: u64 = 1 << 28;
const TABLES_AT_ONCE: usize = 8;
/// Extensions that lead to no clusters but those that are looked at.
const KNOWN_EXTENSIONS: [u32; 3] = [kind::LOST_BITMAPS, kind::WRITE_LOG, kind::CHECKSUMS];
const EFBIG: i32 = 27;

impl Image {
    /// Has the header tell of leaks, before the first change. If that fails, a crash leaks them for good.
    pub(crate) async fn tell_of_leaks(&self) {
        if self.tells_of_leaks {
            drop(self.set_may_have_leaks(true).await);
        }
    }

    /// Has the header tell of no leaks, at a close, after the last commit. That need not be durable.
    ///
    /// # Errors
    /// Those of the storage.
    pub(crate) async fn end_leaks(&self) -> Result<()> {
        self.set_may_have_leaks(false).await
    }

    async fn set_may_have_leaks(&self, value: bool) -> Result<()> {
        let old = self.header().compatible;
        let new = match value {
            true => old.with(Compatible::MAY_HAVE_LEAKS),
            false => old.without(Compatible::MAY_HAVE_LEAKS),
        };
        match new == old {
            true => Ok(()),
            false => self.change_compatible(new).await,
        }
    }
}

struct Search<'a> {
    file: &'a Arc<dyn Storage>,
    header: &'a Header,
    geometry: Geometry,
    blocks: Vec<RefcountTableEntry>,
    /// The clusters that are counted once, and to which nothing refers as far as is known.
    suspects: Bits,
    /// So much may still be read.
    left_bytes: u64,
}

/// Frees what the last use of the image has leaked, durably; then the header tells of no leaks.
///
/// # Errors
/// Those of the storage when counts are written. What cannot be read leaves the leaks where they are.
pub(crate) async fn free_leaks(file: &Arc<dyn Storage>, header: &mut Header) -> Result<()> {
    let Ok(Some(search)) = find_leaks(file, header).await else {
        return Ok(());
    };
    let leaked: Vec<u64> = search.suspects.iter().collect();
    if !leaked.is_empty() {
        // The mapping just read may be the last, unsynced writes of a killed process: the mapping on disk may still
        // refer to these clusters.
        if !mutants::is(Mutant::FreeLeaksUnsynced) {
            file.flush().await?;
        }
        search.lower(&leaked).await?;
        file.flush().await?;
    }
    // Should a crash lose this, the next open looks once more.
    header.compatible = header.compatible.without(Compatible::MAY_HAVE_LEAKS);
    write_compatible(&**file, header.compatible).await
}

/// `None`: there would be too much to read, or something may refer to clusters that is not known.
async fn find_leaks<'a>(
    file: &'a Arc<dyn Storage>,
    header: &'a Header,
) -> Result<Option<Search<'a>>> {
    let geometry = header.geometry();
    let in_file = geometry.clusters_for(file.len_bytes()?);
    if in_file > MOST_CLUSTERS || !is_all_known(header) {
        return Ok(None);
    }
    let blocks = load::refcount_table(file, header, &geometry).await?;
    // A process may have counted clusters and not reached them with the file: they leak once it is longer.
    let last_block = blocks.iter().rposition(|entry| entry.raw_offset() != 0);
    let counted = last_block.map_or(0, |last| {
        (last as u64 + 1) * geometry.refcount_block_entries()
    });
    let clusters = counted.clamp(in_file, MOST_CLUSTERS);
    let mut search = Search {
        file,
        header,
        geometry,
        blocks,
        suspects: Bits::none(clusters),
        left_bytes: MOST_METADATA_BYTES,
    };
    let found = async {
        search.look_at_counts(clusters).await?;
        search.look_at_metadata().await?;
        let mut tables = BTreeSet::new();
        search.look_at_snapshots(&mut tables).await?;
        search.look_at_bitmaps().await?;
        let (start, entries) = (header.l1_table_offset.bytes(), header.l1_entries);
        search.note_l1(start, entries, &mut tables).await?;
        search.look_at_tables(tables).await
    };
    found.await.map(|()| Some(search))
}

/// Whether every reference to a cluster that the header leads to is known here.
fn is_all_known(header: &Header) -> bool {
    header.extensions.iter().all(|extension| match extension {
        // Without its bit the directory may be out of date, and is kept for who can use it.
        Extension::Bitmaps(_) => header.bitmaps().is_some(),
        Extension::Unknown { kind, .. } => KNOWN_EXTENSIONS.contains(kind),
        _ => true,
    })
}

impl Search<'_> {
    /// Reads metadata, if it is not too much.
    async fn read(&mut self, start: u64, len_bytes: u64) -> Result<Buffer> {
        self.spend(len_bytes)?;
        read_bytes(self.file, start, len_bytes).await
    }

    fn spend(&mut self, len_bytes: u64) -> Result<()> {
        let left = self.left_bytes.checked_sub(len_bytes);
        self.left_bytes = left.ok_or_else(|| Error::from_errno("open", EFBIG))?;
        Ok(())
    }

    fn note_used(&mut self, clusters: Range<u64>) {
        for cluster in clusters.start..clusters.end.min(self.suspects.end()) {
            self.suspects.remove(cluster);
        }
    }

    /// The clusters from `start` on that a structure of `len_bytes` takes.
    fn clusters(&self, start: u64, len_bytes: u64) -> Range<u64> {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        start / cluster_bytes..(start.saturating_add(len_bytes)).div_ceil(cluster_bytes)
    }

    async fn block(&self, index: u64) -> Result<Option<(u64, Buffer)>> {
        let Some(entry) = self.blocks.get(index as usize) else {
            return Ok(None);
        };
        let block = entry
            .decode(&self.geometry)
            .map_err(|error| bad_format("open", &error))?;
        let Some(block) = block else {
            return Ok(None);
        };
        let bytes =
            read_bytes(self.file, block.bytes(), self.geometry.cluster_size_bytes()).await?;
        Ok(Some((block.bytes(), bytes)))
    }

    async fn look_at_counts(&mut self, clusters: u64) -> Result<()> {
        let per_block = self.geometry.refcount_block_entries();
        let order = self.geometry.refcount_order;
        for index in 0..clusters.div_ceil(per_block) {
            let Some((_, counts)) = self.block(index).await? else {
                continue;
            };
            self.spend(counts.len() as u64)?;
            let first = index * per_block;
            for inside in 0..per_block.min(clusters - first) {
                if refcount::get(&counts, order, inside as usize) == 1 {
                    self.suspects.insert(first + inside);
                }
            }
        }
        Ok(())
    }

    async fn look_at_metadata(&mut self) -> Result<()> {
        let header = self.header;
        let cluster_bytes = self.geometry.cluster_size_bytes();
        self.note_used(0..1);
        let table_bytes = u64::from(header.refcount_table_clusters) * cluster_bytes;
        let table = self.clusters(header.refcount_table_offset.bytes(), table_bytes);
        self.note_used(table);
        for index in 0..self.blocks.len() {
            let block = self.blocks[index].raw_offset();
            if block != 0 {
                let block = self.clusters(block, cluster_bytes);
                self.note_used(block);
            }
        }
        if let Some(inside) = header.write_log_inside() {
            let log = self.clusters(inside.start, inside.end - inside.start);
            self.note_used(log);
        }
        if let Some(keys) = header.encryption_header() {
            let keys = self.clusters(keys.offset.bytes(), keys.length_bytes);
            self.note_used(keys);
        }
        Ok(())
    }

    /// Adds the L2 tables that an L1 table leads to; all of them are in use, and so is it.
    async fn note_l1(
        &mut self,
        offset_bytes: u64,
        entries: u32,
        tables: &mut BTreeSet<u64>,
    ) -> Result<()> {
        let len_bytes = u64::from(entries) * 8;
        let table = self.clusters(offset_bytes, len_bytes);
        self.note_used(table);
        let raw = self.read(offset_bytes, len_bytes).await?;
        for index in 0..entries as usize {
            let entry = L1Entry::read(&raw, index).unwrap_or_default();
            let table = entry
                .decode(&self.geometry)
                .map_err(|error| bad_format("open", &error))?;
            let Some(table) = table else {
                continue;
            };
            let cluster = table.cluster(&self.geometry).index();
            if tables.insert(cluster) {
                self.spend(self.geometry.cluster_size_bytes())?;
                self.note_used(cluster..cluster + 1);
            }
        }
        Ok(())
    }

    async fn look_at_snapshots(&mut self, tables: &mut BTreeSet<u64>) -> Result<()> {
        let snapshots = load::snapshots(self.file, self.header).await?;
        let table = self.clusters(self.header.snapshots_offset.bytes(), snapshots.size_bytes);
        self.note_used(table);
        for entry in &snapshots.entries {
            entry
                .check_l1_table(&self.geometry)
                .map_err(|error| bad_format("open", &error))?;
            let start = entry.l1_table_offset.bytes();
            self.note_l1(start, entry.l1_entries, tables).await?;
        }
        Ok(())
    }

    async fn look_at_bitmaps(&mut self) -> Result<()> {
        let Some(extension) = self.header.bitmaps() else {
            return Ok(());
        };
        let directory = self.clusters(
            extension.directory_offset.bytes(),
            extension.directory_size_bytes,
        );
        self.note_used(directory);
        for entry in load::bitmaps(self.file, self.header, extension).await? {
            let len_bytes = u64::from(entry.table_entries) * 8;
            let table = self.clusters(entry.table_offset.bytes(), len_bytes);
            self.note_used(table);
            let raw = self.read(entry.table_offset.bytes(), len_bytes).await?;
            for index in 0..entry.table_entries as usize {
                let stored = BitmapTableEntry::read(&raw, index)
                    .unwrap_or_default()
                    .decode(&self.geometry)
                    .map_err(|error| bad_format("open", &error))?;
                if let BitmapCluster::Stored(host) = stored {
                    let cluster = host.cluster(&self.geometry).index();
                    self.note_used(cluster..cluster + 1);
                }
            }
        }
        Ok(())
    }

    /// Notes which clusters these L2 tables lead to.
    async fn look_at_tables(&mut self, tables: BTreeSet<u64>) -> Result<()> {
        if self.geometry.external_data {
            // They lead to clusters of the data file.
            return Ok(());
        }
        let (file, cluster_bytes) = (self.file, self.geometry.cluster_size_bytes());
        let reads = tables.into_iter().map(|table| {
            let start = table.saturating_mul(cluster_bytes);
            read_bytes(file, start, cluster_bytes)
        });
        let mut reads = stream::iter(reads).buffered(TABLES_AT_ONCE);
        while let Some(table) = reads.next().await {
            self.look_at_table(&table?)?;
        }
        Ok(())
    }

    fn look_at_table(&mut self, table: &[u8]) -> Result<()> {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        for index in 0..self.geometry.l2_entries() as usize {
            let Some(entry) = L2Entry::read(table, index, &self.geometry) else {
                break;
            };
            let mapping = entry
                .decode(&self.geometry)
                .map_err(|error| bad_format("open", &error))?;
            let used = match mapping {
                Mapping::Compressed(data) => {
                    let start = data.host_offset.bytes();
                    Some(self.clusters(start, data.end().bytes().saturating_sub(start)))
                }
                other => other
                    .host()
                    .map(|host| self.clusters(host.bytes(), cluster_bytes)),
            };
            if let Some(used) = used {
                self.note_used(used);
            }
        }
        Ok(())
    }

    /// Sets the counts of these clusters to zero.
    async fn lower(&self, leaked: &[u64]) -> Result<()> {
        let per_block = self.geometry.refcount_block_entries();
        let order = self.geometry.refcount_order;
        for leaked in leaked.chunk_by(|a, b| a / per_block == b / per_block) {
            let Some((at, mut counts)) = self.block(leaked[0] / per_block).await? else {
                continue;
            };
            for cluster in leaked {
                let fits = refcount::set(&mut counts, order, (cluster % per_block) as usize, 0);
                debug_assert!(fits, "0 fits every width");
            }
            let buffers = Buffers::from_iter([counts]);
            self.file.write(at, buffers, WriteFlags::default()).await?;
        }
        Ok(())
    }
}
