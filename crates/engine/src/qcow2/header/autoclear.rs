//! The autoclear features of a file that is not an open image yet, or no more.

use vellum_format::features::Autoclear;
use vellum_format::header::field;
use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::{Storage, WriteFlags};

/// Writes the autoclear features, durably.
pub(crate) async fn write_autoclear(file: &dyn Storage, new: Autoclear) -> Result<()> {
    // One sector, and nothing else of the block: a crash leaves it with its checksum, or as it was.
    let bytes = Buffers::from_iter([Buffer::copy_of(&new.bits().to_be_bytes())]);
    let at = field::AUTOCLEAR_FEATURES as u64;
    file.write(at, bytes, WriteFlags::default()).await?;
    file.flush().await
}
