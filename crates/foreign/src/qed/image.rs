//! Opens images of QED.

use std::sync::Arc;

use vellum::{BlockDevice, Result, Storage};

use crate::MappedDevice;
use crate::facts::{BackingName, Facts};
use crate::fields::{barrier, read_at, until_nul, write_at};

use super::check;
use super::header::{self, Header};
use super::layout::QedLayout;

/// Whether the first bytes of a file (64 will do) are those of such an image.
pub fn probe(bytes: &[u8]) -> bool {
    header::has_magic(bytes)
}

/// Reads the header, and the name of the backing file.
pub(crate) async fn read(file: &Arc<dyn Storage>) -> Result<(Header, Facts)> {
    let read = async {
        let bytes = read_at(&**file, 0, header::HEADER_BYTES).await?;
        let header = Header::decode(&bytes)?;
        header.check_places(header.end_bytes(file.len_bytes()?))?;
        let mut facts = Facts {
            is_dirty: header.needs_check(),
            ..Facts::default()
        };
        if let Some((at, len)) = header.backing_name_at()? {
            let name = read_at(&**file, at, len).await?;
            facts.backing = Some(BackingName {
                name: String::from_utf8_lossy(until_nul(&name)).into_owned(),
                format: header.backing_is_raw().then(|| "raw".to_owned()),
            });
        }
        Ok((header, facts))
    };
    read.await
        .map_err(|error: vellum::Error| error.target(file.name()))
}

/// What an image says of itself: the name of its backing file above all, which whoever opens it opens before.
///
/// # Errors
/// As [`open`].
pub async fn facts(file: &Arc<dyn Storage>) -> Result<Facts> {
    Ok(read(file).await?.1)
}

/// Opens an image. One that has to be checked is repaired first, unless it is only read.
///
/// # Errors
/// [`vellum::ErrorKind::InvalidImage`] for what is no such image, [`vellum::ErrorKind::Unsupported`] for
/// features that are not known; else what the storage says.
pub async fn open(
    file: Arc<dyn Storage>,
    backing: Option<Arc<dyn BlockDevice>>,
    read_only: bool,
) -> Result<Arc<MappedDevice<QedLayout>>> {
    let (mut header, facts) = read(&file).await?;
    if !read_only {
        if header.forget_unknown() {
            write_at(&*file, 0, &header.encode()).await?;
            barrier(&*file).await?;
        }
        if header.needs_check() {
            check::repair_to_write(&file)
                .await
                .map_err(|error| error.context("open", "Image corrupted").target(file.name()))?;
            (header, _) = read(&file).await?;
        }
    }
    let len_bytes = file.len_bytes()?;
    let layout = QedLayout::new(file, header, facts, len_bytes);
    Ok(MappedDevice::new(layout, backing, read_only))
}
