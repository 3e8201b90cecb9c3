//! Opens compressed loop images.

use std::sync::Arc;

use vellum::{Result, Storage};

use crate::MappedDevice;
use crate::fields::read_at;

use super::header::{self, Header};
use super::layout::{self, CloopLayout};

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
