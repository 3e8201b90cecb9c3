//! Reads and writes of metadata, whole.

use vellum::{Buffer, Buffers, Result, Storage};
use vellum_storage::WriteFlags;

/// The bytes at an offset; what lies beyond the file's end is zero. Whoever asks has found the length to be
/// small enough for the memory.
pub(crate) async fn read(file: &dyn Storage, at_bytes: u64, len_bytes: usize) -> Result<Buffer> {
    let buffers = Buffers::from_buf([Buffer::for_read(len_bytes)]);
    Ok(Buffer::join_all(file.read(at_bytes, buffers).await?))
}

/// Writes bytes, not durably.
pub(crate) async fn write(file: &dyn Storage, at_bytes: u64, bytes: &[u8]) -> Result<()> {
    let buffers = Buffers::from_buf([Buffer::copy_of(bytes)]);
    file.write(at_bytes, buffers, WriteFlags::default())
        .await
        .map(drop)
}
