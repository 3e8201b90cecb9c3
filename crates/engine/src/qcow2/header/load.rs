//! Reads the parts of an image that are read whole: header, refcount table, snapshot table, bitmap
//! directory.

use std::sync::Arc;

use vellum_format::bitmap::{BitmapDirectoryEntry, BitmapsExtension, decode_directory};
use vellum_format::geometry::Geometry;
use vellum_format::header::{Purpose, first_cluster_size_bytes};
use vellum_format::refcount::RefcountTableEntry;
use vellum_format::snapshot::{SNAPSHOT_HEADER_SIZE_BYTES, SnapshotEntry, decode_table};
use vellum_format::{FormatError, FormatErrorKind, Header, limits};

use crate::qcow2::integrity::errors::bad_format;
use crate::{Buffer, Buffers, Error, Result, Storage};

/// Enough for the first cluster of most images.
const FIRST_READ_BYTES: u64 = 65536;
const EINVAL: i32 = 22;
const EFBIG: i32 = 27;

/// Reads `len_bytes` at `offset_bytes`; zeroes beyond the end of the storage.
pub(crate) async fn read_bytes(
    storage: &Arc<dyn Storage>,
    offset_bytes: u64,
    len_bytes: u64,
) -> Result<Buffer> {
    let buffer = Buffer::for_read(len_bytes as usize);
    storage
        .read(offset_bytes, Buffers::from_buf([buffer]))
        .into_single()
        .await
}

/// Reads and decodes the header.
pub(crate) async fn header(storage: &Arc<dyn Storage>, purpose: Purpose) -> Result<Header> {
    let broken = |error: &FormatError| bad_format("open", error).target(storage.name());
    let unread = |error: Error| error.context("open", "Could not read qcow2 header");
    let first = read_bytes(storage, 0, FIRST_READ_BYTES).await;
    let mut bytes = first.map_err(unread)?;
    let wanted = first_cluster_size_bytes(&bytes).map_err(|error| broken(&error))?;
    if wanted > FIRST_READ_BYTES {
        bytes = read_bytes(storage, 0, wanted).await.map_err(unread)?;
    }
    Header::decode_for(&bytes, purpose).map_err(|error| broken(&error))
}

/// Reads the entries of the refcount table.
pub(crate) async fn refcount_table(
    storage: &Arc<dyn Storage>,
    header: &Header,
    geometry: &Geometry,
) -> Result<Vec<RefcountTableEntry>> {
    let len_bytes = u64::from(header.refcount_table_clusters) * geometry.cluster_size_bytes();
    let bytes = read_bytes(storage, header.refcount_table_offset.bytes(), len_bytes).await?;
    let entries = (0..bytes.len() / 8).filter_map(|index| RefcountTableEntry::read(&bytes, index));
    Ok(entries.collect())
}

/// The snapshot table.
#[derive(Debug, Default)]
pub(crate) struct SnapshotTable {
    pub(crate) entries: Vec<SnapshotEntry>,
    /// Bytes that the table fills.
    pub(crate) size_bytes: u64,
}

/// Refuses a snapshot table whose place or count breaks the limits, in QEMU's words.
pub(crate) fn check_snapshot_table(header: &Header) -> Result<()> {
    let refuse = |message: &str, errno: i32| {
        Err(Error::new(crate::ErrorKind::InvalidImage, "open", message).with_errno(errno))
    };
    if header.snapshot_count > limits::MAX_SNAPSHOTS {
        return refuse("snapshot table too large", EFBIG);
    }
    let size = u64::from(header.snapshot_count) * SNAPSHOT_HEADER_SIZE_BYTES as u64;
    let end = header.snapshots_offset.checked_add(size);
    let aligned = header
        .geometry()
        .is_cluster_aligned(header.snapshots_offset.0);
    if !aligned || end.is_none_or(|end| end.0 > limits::MAX_SIZE_BYTES) {
        return refuse("snapshot table offset invalid", EINVAL);
    }
    Ok(())
}

/// Reads the snapshot table.
pub(crate) async fn snapshots(
    storage: &Arc<dyn Storage>,
    header: &Header,
) -> Result<SnapshotTable> {
    check_snapshot_table(header)?;
    if header.snapshot_count == 0 {
        return Ok(SnapshotTable::default());
    }
    // The header does not tell the table's length: begin with what short names
    // take, and read more as long as the table goes on.
    let mut len_bytes = (u64::from(header.snapshot_count) * 128).max(FIRST_READ_BYTES);
    loop {
        let bytes = read_bytes(storage, header.snapshots_offset.0, len_bytes).await?;
        match decode_table(&bytes, header.snapshot_count) {
            Ok((entries, used)) => {
                return Ok(SnapshotTable {
                    entries,
                    size_bytes: used as u64,
                });
            }
            Err(error)
                if error.kind() == FormatErrorKind::Truncated
                    && len_bytes <= limits::MAX_SNAPSHOT_TABLE_SIZE_BYTES =>
            {
                len_bytes *= 2;
            }
            Err(error) => {
                let errno = match error.kind() {
                    FormatErrorKind::TooLarge => EFBIG,
                    _ => EINVAL,
                };
                let error = bad_format("open", &error).with_errno(errno);
                return Err(error.target(storage.name()));
            }
        }
    }
}

/// Reads the bitmap directory that the header extension leads to.
pub(crate) async fn bitmaps(
    storage: &Arc<dyn Storage>,
    header: &Header,
    extension: BitmapsExtension,
) -> Result<Vec<BitmapDirectoryEntry>> {
    let offset = extension.directory_offset.0;
    let bytes = read_bytes(storage, offset, extension.directory_size_bytes).await?;
    decode_directory(
        &bytes,
        extension.count,
        &header.geometry(),
        header.guest_size_bytes(),
    )
    .map_err(|error| {
        bad_format("open", &error)
            .with_errno(EINVAL)
            .target(storage.name())
    })
}
