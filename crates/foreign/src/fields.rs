//! Numbers in bytes of either order, by reads and writes that cannot panic, and small reads of files.

use vellum::{Buffer, Buffers, Error, Result, Storage};
use vellum_storage::WriteFlags;

/// The `N` bytes at `at`; `None` if they are not all there.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

pub(crate) fn le16(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_le_bytes)
}

pub(crate) fn le32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_le_bytes)
}

pub(crate) fn le64(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_le_bytes)
}

pub(crate) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_be_bytes)
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_be_bytes)
}

/// Writes `value` at `at`, if that is wholly inside.
pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    let place = bytes
        .get_mut(at..)
        .and_then(|rest| rest.get_mut(..value.len()));
    if let Some(place) = place {
        place.copy_from_slice(value);
    }
}

/// `bytes` up to its first NUL: what a C program sees of the string.
pub(crate) fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|&byte| byte == 0).next().unwrap_or(bytes)
}

/// Bytes of a file; zeroes beyond its end. Whoever asks has found the length to be small enough for the
/// memory.
pub(crate) async fn read_at(file: &dyn Storage, offset_bytes: u64, len: usize) -> Result<Buffer> {
    let buffers = Buffers::from_buf([Buffer::for_read(len)]);
    file.read(offset_bytes, buffers).into_single().await
}

/// Writes bytes to a file, not durably.
pub(crate) async fn write_at(file: &dyn Storage, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
    let buffers = Buffers::from_buf([Buffer::copy_of(bytes)]);
    let written = file.write(offset_bytes, buffers, WriteFlags::default());
    written.await.map(drop)
}

/// Makes durable what was written to a file. No failure of it is one that room for more would mend, whatever
/// its number (rule 11).
pub(crate) async fn barrier(file: &dyn Storage) -> Result<()> {
    file.flush().await.map_err(Error::of_failed_sync)
}
