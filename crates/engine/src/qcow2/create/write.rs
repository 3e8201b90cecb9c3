//! Writes a new image: large writes in the order of the file, several in flight.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use vellum_format::{Geometry, L1Entry, Mapping, refcount};
use vellum_storage::WriteFlags;

use super::layout::Layout;
use super::options::SECTOR_SIZE_BYTES;
use crate::Preallocation;
use crate::{Buffer, Buffers, Error, ErrorKind, Io, Result, Storage};

/// Bytes of one write.
const WRITE_SIZE_BYTES: u64 = 2 << 20;
const WRITES_IN_FLIGHT: usize = 4;

/// Empties a storage that can be emptied, and refuses one without enough room.
pub(super) async fn empty(storage: &Arc<dyn Storage>, size_bytes: u64) -> Result<()> {
    let len_bytes = storage.len_bytes()?;
    if storage.capabilities().growable {
        return match len_bytes {
            0 => Ok(()),
            _ => storage.truncate(0).await,
        };
    }
    if len_bytes < size_bytes {
        let message = format!("{size_bytes} bytes are needed, and there are {len_bytes}");
        return Err(Error::new(ErrorKind::NoSpace, "create", message).target(storage.name()));
    }
    Ok(())
}

/// Makes a storage that was empty as long as it has to be.
pub(super) async fn lengthen(storage: &Arc<dyn Storage>, size_bytes: u64) -> Result<()> {
    match storage.len_bytes()? < size_bytes {
        true => storage.truncate(size_bytes).await,
        false => Ok(()),
    }
}

/// Writes everything but the header and the guest's data.
pub(super) async fn tables(
    storage: &Arc<dyn Storage>,
    layout: &Layout,
    encrypted: bool,
) -> Result<()> {
    let geometry = &layout.geometry;
    let cluster_bits = geometry.cluster_bits;
    let start = layout.refcount_table_offset().0;
    let len = layout.refcount_table_clusters << cluster_bits;
    region(storage, start..start + len, |at, bytes| {
        fill_refcount_table(layout, at, bytes)
    })
    .await?;
    let start = layout.refcount_blocks_offset().0;
    let len = layout.refcount_blocks << cluster_bits;
    region(storage, start..start + len, |at, bytes| {
        fill_refcounts(layout, at, bytes)
    })
    .await?;
    let start = layout.l1_table_offset().0;
    let len = layout.l1_entries * 8;
    region(storage, start..start + len, |at, bytes| {
        fill_l1(layout, at, bytes)
    })
    .await?;
    let start = layout.l2_tables_offset().0;
    let len = layout.l2_tables << cluster_bits;
    region(storage, start..start + len, |at, bytes| {
        fill_l2(layout, encrypted, at, bytes)
    })
    .await
}

/// Reserves or fills the space of guest data, as asked for.
pub(crate) async fn space(
    storage: &Arc<dyn Storage>,
    range: Range<u64>,
    preallocation: Preallocation,
) -> Result<()> {
    match preallocation {
        _ if range.is_empty() => Ok(()),
        Preallocation::Off | Preallocation::Metadata => Ok(()),
        Preallocation::Falloc => storage.allocate(range.start, range.end - range.start).await,
        Preallocation::Full => region(storage, range, |_, bytes| bytes.fill(0)).await,
    }
}

/// Writes the first cluster but for its first sector, which says that this is an
/// image. (Once its blocks exist, writing that sector costs one write alone.)
pub(super) async fn first_cluster(
    storage: &Arc<dyn Storage>,
    header: &[u8],
    geometry: &Geometry,
) -> Result<()> {
    let mut cluster = Buffer::zeroed(geometry.cluster_size_bytes() as usize);
    let later = header.len().min(SECTOR_SIZE_BYTES as usize);
    cluster[later..header.len()].copy_from_slice(&header[later..]);
    write_at_start(storage, cluster).await
}

/// Writes the first sector: from here on the file is an image.
pub(super) async fn first_sector(storage: &Arc<dyn Storage>, header: &[u8]) -> Result<()> {
    let mut sector = Buffer::zeroed(SECTOR_SIZE_BYTES as usize);
    let now = header.len().min(SECTOR_SIZE_BYTES as usize);
    sector[..now].copy_from_slice(&header[..now]);
    write_at_start(storage, sector).await
}

async fn write_at_start(storage: &Arc<dyn Storage>, bytes: Buffer) -> Result<()> {
    let buffers = Buffers::from_buf([bytes]);
    let written = storage.write(0, buffers, WriteFlags::default());
    written.await.map(drop)
}

/// Writes a range with what `fill` puts into each buffer; it gets the offset into
/// the range and must set every byte.
pub(crate) async fn region(
    storage: &Arc<dyn Storage>,
    range: Range<u64>,
    mut fill: impl FnMut(u64, &mut [u8]),
) -> Result<()> {
    let mut running: VecDeque<Io<Buffers>> = VecDeque::new();
    let mut at = range.start;
    while at < range.end {
        let spare = match running.len() {
            WRITES_IN_FLIGHT => running.pop_front(),
            _ => None,
        };
        let spare = match spare {
            Some(write) => write.await?.pop(),
            None => None,
        };
        let len = (range.end - at).min(WRITE_SIZE_BYTES);
        let mut buffer = spare.unwrap_or_else(|| Buffer::for_read(len as usize));
        buffer.truncate(len as usize);
        fill(at - range.start, &mut buffer);
        running.push_back(storage.write(at, Buffers::from_buf([buffer]), WriteFlags::default()));
        at += len;
    }
    for write in running {
        write.await?;
    }
    Ok(())
}

/// Sets every 8-byte entry of `bytes` to what `entry` gives for its number.
fn fill_entries(at: u64, bytes: &mut [u8], entry: impl Fn(u64) -> u64) {
    for (index, place) in (at / 8..).zip(bytes.chunks_exact_mut(8)) {
        place.copy_from_slice(&entry(index).to_be_bytes());
    }
}

pub(super) fn fill_refcount_table(layout: &Layout, at: u64, bytes: &mut [u8]) {
    let first = layout.refcount_blocks_offset().0;
    fill_entries(at, bytes, |index| match index < layout.refcount_blocks {
        true => first + (index << layout.geometry.cluster_bits),
        false => 0,
    });
}

pub(super) fn fill_refcounts(layout: &Layout, at: u64, bytes: &mut [u8]) {
    let order = layout.geometry.refcount_order;
    bytes.fill(0);
    // Widths are powers of two, so a write holds whole counts.
    let first = (at << 3) >> order;
    let capacity = ((bytes.len() as u64) << 3) >> order;
    let used = layout.total_clusters().saturating_sub(first).min(capacity);
    for index in 0..used as usize {
        let set = refcount::set(bytes, order, index, 1);
        debug_assert!(set, "1 fits every width");
    }
}

fn fill_l1(layout: &Layout, at: u64, bytes: &mut [u8]) {
    let first = layout.l2_tables_offset();
    fill_entries(at, bytes, |index| {
        let offset = first.checked_add(index << layout.geometry.cluster_bits);
        match offset {
            Some(offset) if index < layout.l2_tables => L1Entry::new(offset, true).0,
            _ => L1Entry::UNALLOCATED.0,
        }
    });
}

fn fill_l2(layout: &Layout, encrypted: bool, at: u64, bytes: &mut [u8]) {
    let geometry = &layout.geometry;
    let entry_size = geometry.l2_entry_size_bytes();
    for index in 0..bytes.len() / entry_size as usize {
        let mapping = match layout.data_offset(at / entry_size + index as u64) {
            None => Mapping::Unallocated,
            // A cluster of which nothing is used yet: the backing file shows through.
            Some(host) if geometry.extended_l2 => Mapping::Subclusters {
                host: Some(host),
                copied: true,
                allocated: 0,
                zero: 0,
            },
            // What was not written does not read as zeroes when it is decrypted.
            Some(host) if encrypted && geometry.version >= 3 => Mapping::Zero {
                host: Some(host),
                copied: true,
            },
            Some(host) => Mapping::Data { host, copied: true },
        };
        let written = mapping.encode(geometry).write(bytes, index, geometry);
        debug_assert!(written, "the entry is inside the write");
    }
}
