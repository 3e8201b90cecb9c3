//! Reports, or puts right, the copied flags of the active tables that are not what
//! the refcounts on disk say. Runs only if the walk has seen that there are some.

use vellum_format::l1::L1_ENTRY_SIZE_BYTES;
use vellum_format::{L1Entry, L2Entry};
use vellum_storage::WriteFlags;

use super::stored::Stored;
use super::walk::has_cluster;
use super::{Findings, Image, tables};
use crate::qcow2::load;
use crate::{Buffer, Buffers, Result};

/// An entry of the active L1 table whose L2 table has a readable refcount.
struct Used {
    index: usize,
    entry: L1Entry,
    refcount: u64,
}

/// Reports the flags in QEMU's order: each L1 entry, then the L2 table behind it.
pub(super) async fn report(image: &Image, stored: &Stored, findings: &mut Findings) -> Result<()> {
    let used = used_entries(image, stored).await?;
    let offsets: Vec<u64> = used.iter().map(|used| used.entry.raw_offset()).collect();
    let size = image.geometry.cluster_size_bytes();
    tables::for_each_table(&image.storage, &offsets, size, |number, table| {
        let Used {
            index,
            entry,
            refcount,
        } = used[number];
        if (refcount == 1) != entry.copied() {
            findings.corruption(|| {
                format!(
                    "ERROR OFLAG_COPIED L2 cluster: l1_index={index} l1_entry={:x} \
                     refcount={refcount}",
                    entry.0
                )
            });
        }
        for (_, entry, refcount) in wrong_entries(image, stored, table) {
            findings.corruption(|| {
                format!(
                    "ERROR OFLAG_COPIED data cluster: l2_entry={:x} refcount={refcount}",
                    entry.descriptor
                )
            });
        }
        Ok(())
    })
    .await
}

async fn used_entries(image: &Image, stored: &Stored) -> Result<Vec<Used>> {
    let offset = image.header.l1_table_offset.0;
    // What lies beyond the end of the file would read as zeroes.
    let in_file = image.len_bytes.saturating_sub(offset).next_multiple_of(8);
    let size = (u64::from(image.header.l1_entries) * 8).min(in_file);
    let table = load::read_bytes(&image.storage, offset, size).await?;
    let used = (0..table.len() / 8).filter_map(|index| {
        let entry = L1Entry::read(&table, index)?;
        if entry.raw_offset() == 0 {
            return None;
        }
        let refcount = stored.get(image.cluster_of(entry.raw_offset()))?;
        Some(Used {
            index,
            entry,
            refcount,
        })
    });
    let used: Vec<Used> = used.collect();
    image.spend(used.len() as u64 * image.geometry.cluster_size_bytes())?;
    Ok(used)
}

/// The entries of an L2 table whose flag is wrong, with their index and refcount.
fn wrong_entries<'a>(
    image: &'a Image,
    stored: &'a Stored,
    table: &'a [u8],
) -> impl Iterator<Item = (usize, L2Entry, u64)> + 'a {
    let geometry = &image.geometry;
    (0..geometry.l2_entries() as usize).filter_map(move |index| {
        let entry = L2Entry::read(table, index, geometry)?;
        if !has_cluster(entry, geometry) {
            return None;
        }
        let refcount = match geometry.external_data {
            true => 1,
            false => stored.get(image.cluster_of(entry.raw_offset()))?,
        };
        ((refcount == 1) != entry.copied()).then_some((index, entry, refcount))
    })
}

/// Puts the flags right that [`report`] would report.
pub(super) async fn repair(image: &Image, stored: &Stored) -> Result<()> {
    let mut writes = Vec::new();
    let used = used_entries(image, stored).await?;
    let offsets: Vec<u64> = used.iter().map(|used| used.entry.raw_offset()).collect();
    let geometry = &image.geometry;
    tables::for_each_table(
        &image.storage,
        &offsets,
        geometry.cluster_size_bytes(),
        |number, table| {
            let Used {
                index,
                entry,
                refcount,
            } = used[number];
            if (refcount == 1) != entry.copied() {
                let right = entry.with_copied(refcount == 1);
                let at = image.header.l1_table_offset.0 + index as u64 * L1_ENTRY_SIZE_BYTES;
                writes.push((at, right.0));
            }
            for (index, entry, refcount) in wrong_entries(image, stored, table) {
                let right = entry.with_copied(refcount == 1);
                let at = offsets[number] + index as u64 * geometry.l2_entry_size_bytes();
                writes.push((at, right.descriptor));
            }
            Ok(())
        },
    )
    .await?;
    for (at, entry) in writes {
        let bytes = Buffers::from_buf([Buffer::copy_of(&entry.to_be_bytes())]);
        image
            .storage
            .write(at, bytes, WriteFlags::default())
            .await?;
    }
    Ok(())
}
