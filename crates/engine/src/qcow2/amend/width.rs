//! Another width of refcounts: a whole new refcount table with its blocks beside the
//! old ones, and one switch.
//!
//! The old structure counts the clusters of the new one as used while it is written.
//! The new one does not count the old: after the switch these clusters are free.
//! A crash before the switch leaks the new structure; afterwards nothing is left to
//! be done.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::geometry::Geometry;
use vellum_format::limits::MAX_REFCOUNT_TABLE_SIZE_BYTES;
use vellum_format::refcount::{self, RefcountTableEntry};
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::{Buffer, Buffers, ErrorKind, Result};
use vellum_storage::WriteFlags;

use super::work::Work;
use super::work::refuse;
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::image::Image;

pub(super) async fn change_width(work: &Work, order: u32) -> Result<()> {
    let image = work.open_metadata().await?;
    let geometry = Geometry {
        refcount_order: order,
        ..image.geometry
    };
    let needed = survey(work, &image, &geometry).await?;
    let new = allocate(&image, geometry, needed).await?;
    // What the old blocks say of the new structure becomes durable, and can be read
    // from the disk.
    image.commit().await?;
    write_blocks(work, &image, &new).await?;
    write_table(&image, &new).await?;
    image.file.flush().await?;
    let switched = work.switch(|header| {
        header.refcount_table_offset = new.table_offset();
        header.refcount_table_clusters = new.table_clusters as u32;
        header.refcount_order = order;
    });
    switched.await
}

/// The refcounts on disk, read block by block.
struct OldCounts<'a> {
    image: &'a Image,
    blocks: Vec<RefcountTableEntry>,
    loaded: Option<(usize, Buffer)>,
}

impl<'a> OldCounts<'a> {
    fn new(image: &'a Image) -> Self {
        let blocks = image.allocator.refcounts.table().entries.to_vec();
        OldCounts {
            image,
            blocks,
            loaded: None,
        }
    }

    /// Calls `look` with each cluster of `clusters` that is in use and its count.
    async fn visit(
        &mut self,
        clusters: Range<u64>,
        mut look: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let geometry = &self.image.geometry;
        let per_block = geometry.refcount_block_entries();
        let mut at = clusters.start;
        while at < clusters.end {
            let number = at / per_block;
            let stop = ((number + 1) * per_block).min(clusters.end);
            if let Some(block) = self.block(number as usize).await? {
                for cluster in at..stop {
                    let index = (cluster % per_block) as usize;
                    match refcount::get(block, geometry.refcount_order, index) {
                        0 => {}
                        count => look(cluster, count)?,
                    }
                }
            }
            at = stop;
        }
        Ok(())
    }

    async fn block(&mut self, number: usize) -> Result<Option<&[u8]>> {
        let entry = self.blocks.get(number).copied().unwrap_or_default();
        if entry.raw_offset() == 0 {
            return Ok(None);
        }
        if self
            .loaded
            .as_ref()
            .is_none_or(|(loaded, _)| *loaded != number)
        {
            let len_bytes = self.image.geometry.cluster_size_bytes();
            let bytes = read_bytes(&self.image.file, entry.raw_offset(), len_bytes).await?;
            self.loaded = Some((number, bytes));
        }
        Ok(self.loaded.as_ref().map(|(_, bytes)| &bytes[..]))
    }
}

/// The clusters of the refcount table and its blocks that are given up.
struct OldStructure {
    table: Range<u64>,
    /// In order.
    blocks: Vec<u64>,
}

impl OldStructure {
    fn of(image: &Image) -> Self {
        let table = image.allocator.refcounts.table();
        let cluster_of = |offset: HostOffset| offset.cluster(&image.geometry).index();
        let entries = table.entries.used().iter();
        let entries = entries.map(|entry| entry.raw_offset());
        let mut blocks: Vec<u64> = entries
            .filter(|&offset| offset != 0)
            .map(|offset| cluster_of(HostOffset(offset)))
            .collect();
        blocks.sort_unstable();
        let first = cluster_of(table.offset);
        OldStructure {
            table: first..first + table.clusters,
            blocks,
        }
    }

    fn contains(&self, cluster: u64) -> bool {
        self.table.contains(&cluster) || self.blocks.binary_search(&cluster).is_ok()
    }
}

/// Which blocks of the new width are needed, in order. Refuses counts that do not fit.
async fn survey(work: &Work, image: &Image, new: &Geometry) -> Result<Vec<u64>> {
    let mut old = OldCounts::new(image);
    let per_old = image.geometry.refcount_block_entries();
    let (per_new, most) = (new.refcount_block_entries(), new.max_refcount());
    let blocks = old.blocks.len() as u64;
    let mut needed: Vec<u64> = Vec::new();
    for number in 0..blocks {
        let clusters = number * per_old..(number + 1) * per_old;
        let visited = old.visit(clusters, |cluster, count| {
            if count > most {
                return Err(refuse(
                    ErrorKind::InvalidArgument,
                    format!(
                        "Cannot decrease refcount entry width to {} bits: Cluster at offset {:#x} \
                         has a refcount of {count}",
                        new.refcount_bits(),
                        cluster * new.cluster_size_bytes()
                    ),
                ));
            }
            if needed.last() != Some(&(cluster / per_new)) {
                needed.push(cluster / per_new);
            }
            Ok(())
        });
        visited.await?;
        work.progress.report(number, 2 * blocks);
    }
    Ok(needed)
}

/// Where the new structure lies: first its blocks, in order, then its table.
struct NewStructure {
    geometry: Geometry,
    start: HostOffset,
    /// Indexes of the blocks.
    blocks: Vec<u64>,
    table_clusters: u64,
    /// Clusters that were allocated; more than are used, perhaps.
    allocated: u64,
}

impl NewStructure {
    fn block_offset(&self, number: usize) -> HostOffset {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        HostOffset(self.start.bytes() + number as u64 * cluster_bytes)
    }

    fn table_offset(&self) -> HostOffset {
        self.block_offset(self.blocks.len())
    }

    fn used_clusters(&self) -> u64 {
        self.blocks.len() as u64 + self.table_clusters
    }

    fn first_cluster(&self) -> u64 {
        self.start.cluster(&self.geometry).index()
    }

    /// How a cluster is counted that was counted `old` times.
    fn count(&self, cluster: u64, old: u64, structure: &OldStructure) -> u64 {
        let first = self.first_cluster();
        if (first..first + self.allocated).contains(&cluster) {
            return u64::from(cluster < first + self.used_clusters());
        }
        match structure.contains(cluster) {
            true => old - 1,
            false => old,
        }
    }
}

/// Finds room for blocks of the new width that count what they must and themselves.
async fn allocate(
    image: &Arc<Image>,
    geometry: Geometry,
    needed: Vec<u64>,
) -> Result<NewStructure> {
    let per_block = geometry.refcount_block_entries();
    let mut count = needed.len() as u64 + 2;
    loop {
        let start = image.allocator.allocate_run(count).await?;
        let first = start.cluster(&geometry).index();
        let mut blocks = needed.clone();
        blocks.extend(first / per_block..(first + count).div_ceil(per_block));
        blocks.sort_unstable();
        blocks.dedup();
        let last = blocks.last().copied().unwrap_or(0);
        let table_clusters = geometry.clusters_for((last + 1) * 8);
        if table_clusters * geometry.cluster_size_bytes() > MAX_REFCOUNT_TABLE_SIZE_BYTES {
            image.allocator.release(HostCluster(first), count).await?;
            image.commit().await?;
            let message = "This operation would make the refcount table grow beyond the maximum \
                           size supported by QEMU, aborting";
            return Err(refuse(ErrorKind::NoSpace, message).with_errno(28));
        }
        let wanted = blocks.len() as u64 + table_clusters;
        if wanted <= count {
            return Ok(NewStructure {
                geometry,
                start,
                blocks,
                table_clusters,
                allocated: count,
            });
        }
        image.allocator.release(HostCluster(first), count).await?;
        count = wanted;
    }
}

async fn write_blocks(work: &Work, image: &Image, new: &NewStructure) -> Result<()> {
    let mut old = OldCounts::new(image);
    let structure = OldStructure::of(image);
    let per_block = new.geometry.refcount_block_entries();
    let total = new.blocks.len() as u64;
    for (number, &index) in new.blocks.iter().enumerate() {
        let mut block = Buffer::zeroed(new.geometry.cluster_size_bytes() as usize);
        let clusters = index * per_block..(index + 1) * per_block;
        let visited = old.visit(clusters, |cluster, old| {
            let count = new.count(cluster, old, &structure);
            let at = (cluster % per_block) as usize;
            let fits = refcount::set(&mut block, new.geometry.refcount_order, at, count);
            debug_assert!(fits, "the survey has seen every count");
            Ok(())
        });
        visited.await?;
        let offset = new.block_offset(number).bytes();
        write(image, offset, block).await?;
        work.progress.report(total + number as u64 + 1, 2 * total);
    }
    Ok(())
}

async fn write_table(image: &Image, new: &NewStructure) -> Result<()> {
    let len_bytes = new.table_clusters * new.geometry.cluster_size_bytes();
    let mut table = Buffer::zeroed(len_bytes as usize);
    for (number, &index) in new.blocks.iter().enumerate() {
        let entry = RefcountTableEntry::new(new.block_offset(number));
        let written = entry.write(&mut table, index as usize);
        debug_assert!(written, "the table was made for it");
    }
    write(image, new.table_offset().bytes(), table).await
}

async fn write(image: &Image, offset_bytes: u64, bytes: Buffer) -> Result<()> {
    let buffers = Buffers::from_iter([bytes]);
    let flags = WriteFlags::default();
    image
        .file
        .write(offset_bytes, buffers, flags)
        .await
        .map(drop)
}
