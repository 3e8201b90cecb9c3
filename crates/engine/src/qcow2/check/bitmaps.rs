//! Persistent bitmaps: their clusters are counted. A repair gives up all of them if
//! anything that leads to one is broken, for nobody could open the image then; the
//! guest's data does not depend on them.

use vellum_format::bitmap::{
    BitmapCluster, BitmapDirectoryEntry, BitmapTableEntry, BitmapsExtension,
};
use vellum_format::features::Autoclear;
use vellum_format::header::field;

use super::Findings;
use super::source::Image;
use super::tables;
use super::walk::Walk;
use crate::qcow2::header::load;
use crate::{Buffer, Error, ErrorKind, Result};

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
    let cluster_size = image.geometry.cluster_size_bytes();
    let broken = for_each_stored(image, bitmap, |at| walk.add_area(at, cluster_size)).await?;
    let Some(message) = broken else {
        return Ok(());
    };
    walk.findings().corruption(|| format!("ERROR {message}"));
    Err(Error::new(ErrorKind::Corrupt, "check", message).with_errno(EINVAL))
}

/// Calls `each` with the offset of every cluster of bits. Says what is wrong with the
/// first entry of the table that means nothing.
async fn for_each_stored(
    image: &Image,
    bitmap: &BitmapDirectoryEntry,
    mut each: impl FnMut(u64),
) -> Result<Option<String>> {
    let start = bitmap.table_offset.0;
    let end = start + u64::from(bitmap.table_entries) * 8;
    // Beyond the end of the file all bits are zero.
    let file_end = end.min(image.len_bytes());
    image.spend(file_end.saturating_sub(start))?;
    let pieces: Vec<u64> = (start..file_end)
        .step_by(PIECE_SIZE_BYTES as usize)
        .collect();
    let mut broken = None;
    tables::for_each_table(image, &pieces, PIECE_SIZE_BYTES, |number, piece| {
        let count = ((end - pieces[number]).min(PIECE_SIZE_BYTES) / 8) as usize;
        let mut entries = (0..count).map_while(|index| BitmapTableEntry::read(piece, index));
        if broken.is_none() {
            broken = entries.find_map(|entry| match entry.decode(&image.geometry) {
                Ok(BitmapCluster::Zeros | BitmapCluster::Ones) => None,
                Ok(BitmapCluster::Stored(offset)) => {
                    each(offset.0);
                    None
                }
                Err(error) => Some(error.message().to_owned()),
            });
        }
        Ok(())
    })
    .await?;
    Ok(broken)
}

/// Gives up all bitmaps if anything that leads to them is broken. Their clusters are
/// leaked then, until the refcounts are fixed; durable when it returns.
pub(super) async fn give_up_broken(image: &mut Image, findings: &mut Findings) -> Result<()> {
    let Some(extension) = image.header.bitmaps() else {
        return Ok(());
    };
    let Some(message) = find_fault(image, extension).await? else {
        return Ok(());
    };
    findings.corruption_or_repair(true, || format!("{message}; all bitmaps are given up"));
    let kept = image.header.autoclear.without(Autoclear::BITMAPS);
    let bytes = Buffer::copy_of(&kept.bits().to_be_bytes());
    image.write(field::AUTOCLEAR_FEATURES as u64, bytes).await?;
    image.flush().await?;
    image.reload().await
}

/// What is wrong with the directory, or else with a table.
async fn find_fault(image: &Image, extension: BitmapsExtension) -> Result<Option<String>> {
    let beyond = |offset: u64, size: u64| {
        let end = offset.saturating_add(size);
        let over = end.saturating_sub(image.len_bytes()) >= image.geometry.cluster_size_bytes();
        over.then(|| format!("offset={offset:x}: a bitmap reaches beyond the end of the file"))
    };
    let size = extension.directory_size_bytes;
    if let Some(fault) = beyond(extension.directory_offset.0, size) {
        return Ok(Some(fault));
    }
    let bitmaps = match load::bitmaps(&image.storage, &image.header, extension).await {
        Ok(bitmaps) => bitmaps,
        Err(error) if is_about_content(&error) => return Ok(Some(error.message().to_owned())),
        Err(error) => return Err(error),
    };
    for bitmap in &bitmaps {
        let mut outside = beyond(bitmap.table_offset.0, u64::from(bitmap.table_entries) * 8);
        let cluster_size = image.geometry.cluster_size_bytes();
        let broken = for_each_stored(image, bitmap, |at| {
            outside = outside.take().or_else(|| beyond(at, cluster_size));
        });
        let broken = broken.await?;
        if broken.is_some() || outside.is_some() {
            return Ok(broken.or(outside));
        }
    }
    Ok(None)
}

/// Whether an error tells of what was read, rather than of reading it.
fn is_about_content(error: &Error) -> bool {
    let kinds = [
        ErrorKind::InvalidImage,
        ErrorKind::Corrupt,
        ErrorKind::Unsupported,
    ];
    kinds.contains(&error.kind())
}
