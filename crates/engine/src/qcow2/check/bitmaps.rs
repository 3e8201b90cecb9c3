//! Counts the clusters of persistent bitmaps.

use vellum_format::bitmap::{BitmapCluster, BitmapDirectoryEntry, BitmapTableEntry};

use super::source::Image;
use super::tables;
use super::walk::Walk;
use crate::qcow2::load;
use crate::{Error, ErrorKind, Result};

const EINVAL: i32 = 22;
/// Bitmap tables are read in pieces of this size, of which many are in flight.
const PIECE_SIZE_BYTES: u64 = 65536;

/// Counts directory, tables and bits. As in QEMU a broken directory or table ends
/// the whole check.
pub(super) async fn walk(image: &Image, walk: &mut Walk<'_>) -> Result<()> {
    let Some(extension) = image.header.bitmaps() else {
        return Ok(());
    };
    walk.add_area(extension.directory_offset.0, extension.directory_size_bytes);
    let bitmaps = match load::bitmaps(&image.storage, &image.header, extension).await {
        Ok(bitmaps) => bitmaps,
        Err(error) => {
            walk.findings()
                .corruption(|| format!("ERROR {}", error.message()));
            return Err(error);
        }
    };
    for bitmap in &bitmaps {
        walk.add_area(bitmap.table_offset.0, u64::from(bitmap.table_entries) * 8);
        count_clusters(image, walk, bitmap).await?;
    }
    Ok(())
}

async fn count_clusters(
    image: &Image,
    walk: &mut Walk<'_>,
    bitmap: &BitmapDirectoryEntry,
) -> Result<()> {
    let start = bitmap.table_offset.0;
    let end = start + u64::from(bitmap.table_entries) * 8;
    // Beyond the end of the file all bits are zero.
    let file_end = end.min(image.len_bytes());
    image.spend(file_end.saturating_sub(start))?;
    let pieces: Vec<u64> = (start..file_end)
        .step_by(PIECE_SIZE_BYTES as usize)
        .collect();
    let cluster_size = image.geometry.cluster_size_bytes();
    tables::for_each_table(image, &pieces, PIECE_SIZE_BYTES, |number, piece| {
        let entries = ((end - pieces[number]).min(PIECE_SIZE_BYTES) / 8) as usize;
        for index in 0..entries {
            let Some(entry) = BitmapTableEntry::read(piece, index) else {
                break;
            };
            match entry.decode(&image.geometry) {
                Ok(BitmapCluster::Zeros | BitmapCluster::Ones) => {}
                Ok(BitmapCluster::Stored(offset)) => walk.add_area(offset.0, cluster_size),
                Err(error) => {
                    walk.findings()
                        .corruption(|| format!("ERROR {}", error.message()));
                    return Err(
                        Error::new(ErrorKind::Corrupt, "check", error.message()).with_errno(EINVAL)
                    );
                }
            }
        }
        Ok(())
    })
    .await
}
