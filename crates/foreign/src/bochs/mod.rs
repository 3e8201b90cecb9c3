//! Growing disk images of Bochs, to be read.
//!
//! A header of 512 bytes, a catalog of 32-bit entries, then extents in the order in which they were
//! made: a bitmap of the sectors that were written, and all sectors. Sectors that were not written read
//! as zeroes.
//!
//! Images of this kind are never changed here, so there is nothing to say of a crash.

mod header;
mod layout;

use std::sync::Arc;

use vellum::{Result, Storage};

pub use header::Header;
pub use layout::BochsLayout;

use crate::MappedDevice;
use crate::fields::read_at;

/// Whether the first bytes of a file (512 will do) are those of such an image.
pub fn probe(bytes: &[u8]) -> bool {
    header::has_magic(bytes)
}

/// Opens an image, read-only.
///
/// # Errors
/// [`vellum::ErrorKind::InvalidImage`] for what is no such image; else what the storage says.
pub async fn open(file: Arc<dyn Storage>) -> Result<Arc<MappedDevice<BochsLayout>>> {
    let bytes = read_at(&*file, 0, header::HEADER_BYTES).await?;
    let header = Header::decode(&bytes).map_err(|error| error.target(file.name()))?;
    Ok(MappedDevice::new(
        BochsLayout::new(file, header),
        None,
        true,
    ))
}
