//! New images.

use std::sync::Arc;

use vellum::{Result, Storage};
use vellum_storage::ZeroFlags;

use super::header::{BLOCK_BYTES, Header, UNALLOCATED};
use crate::fields::write_at;
use crate::random_id::random_id;

/// Entries of a new map are written in pieces of so many.
const ENTRIES_AT_ONCE: u32 = 1 << 18;

vellum_io::with_setters! {
    /// What a new image is to be.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct CreateOptions {
        /// The virtual size in bytes.
        pub size_bytes: u64,
        /// Whether each block has its place from the beginning.
        pub is_static: bool,
    }
}

/// Makes an image in an empty file.
///
/// # Errors
/// [`vellum::ErrorKind::Unsupported`] for a size beyond what the format has; what the storage says.
pub async fn create(file: &Arc<dyn Storage>, options: &CreateOptions) -> Result<()> {
    let header = Header::new(options.size_bytes, options.is_static)?;
    let mut at_bytes = header.map_bytes;
    let mut index = 0;
    while index < header.blocks {
        let end = header.blocks.min(index + ENTRIES_AT_ONCE);
        let entries = (index..end).map(|place| match options.is_static {
            true => place,
            false => UNALLOCATED,
        });
        let bytes: Vec<u8> = entries.flat_map(u32::to_le_bytes).collect();
        let len_bytes = bytes.len() as u64;
        write_at(&**file, at_bytes, &bytes).await?;
        at_bytes += len_bytes;
        index = end;
    }
    let data_bytes = match options.is_static {
        true => u64::from(header.blocks) * BLOCK_BYTES,
        false => 0,
    };
    if file.capabilities().growable {
        file.truncate(header.data_bytes + data_bytes).await?;
    }
    if options.is_static && !file.capabilities().has_zero_init {
        let zeroed = file.write_zeroes(header.data_bytes, data_bytes, ZeroFlags::default());
        zeroed.await?;
    }
    write_at(&**file, 0, &header.encode(&[random_id()?, random_id()?])).await?;
    file.flush().await
}
