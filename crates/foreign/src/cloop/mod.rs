//! Compressed images for Linux' `cloop`, to be read.
//!
//! A header that begins as a shell script, the size of a block and the number of blocks, one offset for
//! each block and one for the end, then the blocks, each a zlib stream.
//!
//! The offsets are checked when an image is opened, and read again, two at a time, when a block is: so
//! an image with very many of them takes no memory.
//!
//! Images of this kind are never changed here, so there is nothing to say of a crash.

mod header;
mod layout;

use std::sync::Arc;

use vellum::{Result, Storage};

pub use header::Header;
pub use layout::CloopLayout;

use crate::MappedDevice;
use crate::fields::read_at;

/// Whether the first bytes of a file (128 will do) are those of such an image: the second version's
/// script, as far as there are bytes of it.
pub fn probe(bytes: &[u8]) -> bool {
    header::has_magic(bytes)
}

/// Opens an image, read-only.
///
/// # Errors
/// [`vellum::ErrorKind::InvalidImage`] for what is no such image; else what the storage says.
pub async fn open(file: Arc<dyn Storage>) -> Result<Arc<MappedDevice<CloopLayout>>> {
    let bytes = read_at(&*file, 0, header::HEADER_BYTES).await?;
    let header = Header::decode(&bytes).map_err(|error| error.target(file.name()))?;
    layout::check_offsets(&*file, &header)
        .await
        .map_err(|error| error.target(file.name()))?;
    Ok(MappedDevice::new(
        CloopLayout::new(file, header),
        None,
        true,
    ))
}
