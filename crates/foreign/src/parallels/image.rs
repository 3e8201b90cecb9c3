//! Opens images of Parallels.

use std::sync::Arc;

use vellum::{Error, Result, Storage};

use crate::MappedDevice;
use crate::facts::Fix;
use crate::fields::read_at;

use super::check::repair;
use super::extension;
use super::header::{self, Header};
use super::layout::{ParallelsLayout, Used};

/// Whether the first bytes of a file (64 will do) are those of such an image.
pub fn probe(bytes: &[u8]) -> bool {
    header::has_magic(bytes)
}

/// Reads the header, and where the data begins.
pub(crate) async fn read(file: &dyn Storage) -> Result<Header> {
    let bytes = read_at(file, 0, header::HEADER_BYTES).await?;
    Header::decode(&bytes, file.len_bytes()?)
}

/// Opens an image. One that was not closed, or is damaged, is repaired first, unless it is only read.
///
/// # Errors
/// [`vellum::ErrorKind::InvalidImage`] for what is no such image; else what the storage says.
pub async fn open(
    file: Arc<dyn Storage>,
    read_only: bool,
) -> Result<Arc<MappedDevice<ParallelsLayout>>> {
    let named = |error: Error| error.target(file.name());
    let mut header = read(&*file).await.map_err(named)?;
    let mut used = None;
    if !read_only {
        let mut found = Used::read(&*file, &header).await.map_err(named)?;
        if header.is_in_use || !header.has_good_data_offset || found.is_damaged {
            let fix = Fix {
                leaks: true,
                corruptions: true,
            };
            repair(&file, fix).await.map_err(|error| {
                let message = "Could not repair corrupted image";
                error.context("open", message).target(file.name())
            })?;
            header = read(&*file).await.map_err(named)?;
            found = Used::read(&*file, &header).await.map_err(named)?;
        }
        used = Some(found);
    }
    let bitmaps = match read_only {
        true => extension::read_bitmaps(&*file, &header)
            .await
            .map_err(named)?,
        false => Vec::new(),
    };
    let layout = ParallelsLayout::new(file.clone(), header, used)?.with_bitmaps(bitmaps);
    Ok(MappedDevice::new(layout, None, read_only))
}
