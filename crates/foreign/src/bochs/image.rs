//! Opens growing images of Bochs.

use std::sync::Arc;

use vellum::{Result, Storage};

use crate::MappedDevice;
use crate::fields::read_at;

use super::header::{self, Header};
use super::layout::BochsLayout;

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
