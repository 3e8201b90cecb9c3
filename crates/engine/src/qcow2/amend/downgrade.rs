//! Version 3 to 2, which has no zero clusters, no features, and refcounts of 16 bits.

use vellum_format::Header;
use vellum_format::extension::kind;
use vellum_format::header::CompressionType;
use vellum_format::l1::L1Entry;
use vellum_format::l2::L2Entry;
use vellum_format::types::HostOffset;
use vellum_io::{Buffer, Result};

use super::work::Work;
use super::zeroes;
use crate::qcow2::header::load::{self, read_bytes};
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::bad_format;

pub(super) async fn downgrade(work: &Work) -> Result<()> {
    let image = work.open().await?;
    let removed = image.remove_all_bitmaps().await;
    let closed = image.close_image().await;
    removed.and(closed)?;
    let image = work.open_metadata().await?;
    let expanded = zeroes::expand(&image, &work.progress).await;
    let closed = image.close_image().await;
    expanded.and(closed)?;
    let switched = work.switch(|header| {
        header.version = 2;
        header.incompatible = Default::default();
        header.compatible = Default::default();
        header.autoclear = Default::default();
        header.compression_type = CompressionType::Zlib;
        header.unknown_header_tail.clear();
        // Nobody vouches for bitmaps in version 2.
        header.remove_extension(kind::BITMAPS);
        header.remove_extension(kind::LOST_BITMAPS);
    });
    switched.await
}

/// The L1 tables of the disk and of its snapshots: where each lies and its entries.
pub(super) async fn l1_tables(image: &Image, header: &Header) -> Result<Vec<(HostOffset, u64)>> {
    let active = (header.l1_table_offset, u64::from(header.l1_entries));
    let mut tables = vec![active];
    for snapshot in load::snapshots(&image.file, header).await?.entries {
        snapshot
            .check_l1_table(&image.geometry)
            .map_err(|error| bad_format("amend", &error))?;
        tables.push((snapshot.l1_table_offset, u64::from(snapshot.l1_entries)));
    }
    Ok(tables)
}

/// Reads an L1 table: where each L2 table lies, if there is one.
pub(super) async fn l2_tables(
    image: &Image,
    (offset, entries): (HostOffset, u64),
) -> Result<Vec<Option<HostOffset>>> {
    let bytes = read_bytes(&image.file, offset.bytes(), entries * 8).await?;
    let entries = bytes.as_chunks().0.iter().copied().map(u64::from_be_bytes);
    let decoded = entries.map(|entry| L1Entry(entry).decode(&image.geometry));
    decoded
        .collect::<std::result::Result<_, _>>()
        .map_err(|error| bad_format("amend", &error))
}

/// Reads an L2 table.
pub(super) async fn read_table(image: &Image, table: HostOffset) -> Result<Buffer> {
    let len_bytes = image.geometry.cluster_size_bytes();
    read_bytes(&image.file, table.bytes(), len_bytes).await
}

/// Whether the disk or a snapshot has a compressed cluster.
pub(super) async fn has_compressed_clusters(image: &Image, header: &Header) -> Result<bool> {
    let count = image.geometry.l2_entries() as usize;
    for l1 in l1_tables(image, header).await? {
        for table in l2_tables(image, l1).await?.into_iter().flatten() {
            let bytes = read_table(image, table).await?;
            let entries = (0..count).filter_map(|i| L2Entry::read(&bytes, i, &image.geometry));
            if entries.into_iter().any(L2Entry::is_compressed) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
