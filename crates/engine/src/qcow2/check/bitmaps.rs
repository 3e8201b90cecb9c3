//! Persistent bitmaps: their clusters are counted. A repair gives up all of them if
//! anything that leads to one is broken, for nobody could open the image then; the
//! guest's data does not depend on them. A bitmap whose table has more entries than the disk
//! asks for is marked as in use, so that nobody relies on its bits; the others are kept.

use vellum_format::bitmap::{
    BitmapCluster, BitmapDirectoryEntry, BitmapFlags, BitmapTableEntry, BitmapsExtension,
    encode_directory,
};
use vellum_format::features::Autoclear;
use vellum_format::header::field;

use super::findings::Findings;
use super::source::Image;
use super::tables;
use super::walk::Walk;
use crate::qcow2::bitmap::{list_lost, set_lost};
use crate::qcow2::header::load;
use crate::qcow2::header::rewrite::rewrite_header;
use crate::qcow2::integrity::errors::bad_format;
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
        if is_too_long(image, bitmap) {
            walk.findings()
                .corruption(|| format!("ERROR {}", too_long(image, bitmap)));
        }
    }
    Ok(())
}

/// Whether a bitmap that claims to be right has another table than the disk asks for: one that is
/// too short is refused as the directory is read. QEMU does not open the image.
fn is_too_long(image: &Image, bitmap: &BitmapDirectoryEntry) -> bool {
    let in_use = bitmap.flags.contains(BitmapFlags::IN_USE);
    !in_use && !bitmap.fits(image.header.guest_size_bytes(), &image.geometry)
}

fn too_long(image: &Image, bitmap: &BitmapDirectoryEntry) -> String {
    let size_bytes = image.header.guest_size_bytes();
    let bits = bitmap.granularity_bits;
    let needed = BitmapDirectoryEntry::table_entries_for(size_bytes, bits, &image.geometry);
    format!(
        "bitmap '{}' has a table of {} entries, where the disk asks for {}",
        bitmap.name_text(),
        bitmap.table_entries,
        needed
    )
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

/// Calls `each` with what every entry of a bitmap's table says, as far as the file goes.
pub(in crate::qcow2) async fn for_each_entry(
    image: &Image,
    bitmap: &BitmapDirectoryEntry,
    mut each: impl FnMut(vellum_format::Result<BitmapCluster>),
) -> Result<()> {
    let start = bitmap.table_offset.0;
    let end = start + u64::from(bitmap.table_entries) * 8;
    // Beyond the end of the file all bits are zero.
    let file_end = end.min(image.len_bytes());
    image.spend(file_end.saturating_sub(start))?;
    let pieces: Vec<u64> = (start..file_end)
        .step_by(PIECE_SIZE_BYTES as usize)
        .collect();
    tables::for_each_table(image, &pieces, PIECE_SIZE_BYTES, |number, piece| {
        let count = ((end - pieces[number]).min(PIECE_SIZE_BYTES) / 8) as usize;
        let entries = (0..count).map_while(|index| BitmapTableEntry::read(piece, index));
        entries.for_each(|entry| each(entry.decode(&image.geometry)));
        Ok(())
    })
    .await
}

/// Calls `each` with the offset of every cluster of bits. Says what is wrong with the
/// first entry of the table that means nothing.
async fn for_each_stored(
    image: &Image,
    bitmap: &BitmapDirectoryEntry,
    mut each: impl FnMut(u64),
) -> Result<Option<String>> {
    let mut broken = None;
    for_each_entry(image, bitmap, |entry| match entry {
        _ if broken.is_some() => {}
        Ok(BitmapCluster::Zeros | BitmapCluster::Ones) => {}
        Ok(BitmapCluster::Stored(offset)) => each(offset.0),
        Err(error) => broken = Some(error.message().to_owned()),
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
        return distrust_too_long(image, extension, findings).await;
    };
    findings.corruption_or_repair(true, || format!("{message}; all bitmaps are given up"));
    let kept = image.header.autoclear.without(Autoclear::BITMAPS);
    let bytes = Buffer::copy_of(&kept.bits().to_be_bytes());
    image.write(field::AUTOCLEAR_FEATURES as u64, bytes).await?;
    image.flush().await?;
    image.reload().await
}

/// Marks bitmaps with too long a table as in use, so that nobody takes what they call clean for
/// unchanged; durable when it returns. The directory and all tables can be read.
async fn distrust_too_long(
    image: &mut Image,
    extension: BitmapsExtension,
    findings: &mut Findings,
) -> Result<()> {
    let mut entries = load::bitmaps(&image.storage, &image.header, extension).await?;
    if !entries.iter().any(|entry| is_too_long(image, entry)) {
        return Ok(());
    }
    let listed = list_lost(&image.header, &entries);
    for entry in &mut entries {
        if is_too_long(image, entry) {
            findings.corruption_or_repair(true, || {
                format!("{}; it is marked as in use", too_long(image, entry))
            });
            entry.flags = entry.flags.with(BitmapFlags::IN_USE);
        }
    }
    let header = &image.header;
    if header
        .autoclear
        .contains(Autoclear::CRASH_CONSISTENT_BITMAPS)
    {
        // Before the flags: those in use are to be trusted unless they are listed (I43).
        rewrite_header(&image.storage, |header| {
            set_lost(header, listed);
            Ok(())
        })
        .await?;
    }
    let bytes = encode_directory(&entries, &image.geometry, header.guest_size_bytes())
        .map_err(|error| bad_format("check", &error).target(image.storage.name()))?;
    let at = extension.directory_offset.0;
    image.write(at, Buffer::copy_of(&bytes)).await?;
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
