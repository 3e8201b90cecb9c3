//! qcow, the first version, before qcow2.
//!
//! A header, the name of a backing file, a first table of leaves (L1), and then leaves (L2), clusters and
//! compressed clusters in the order in which they were made. There is no count of references: what was
//! replaced is lost until the image is copied.
//!
//! What a power cut leaves: space at the end of the file that nothing leads to. Entries are written after
//! what they lead to is durable. There is no flag, no check and nothing to mend.
//!
//! Encrypted images are refused.

mod create;
mod header;
mod layout;

use std::sync::Arc;

use vellum::{BlockDevice, Result, Storage};

pub use create::{CreateOptions, create};
pub use header::Header;
pub use layout::QcowLayout;

use crate::facts::{BackingName, CompressedWrites, Facts};
use crate::fields::read_at;
use crate::{Layout, MappedDevice};

/// Whether the first bytes of a file (48 will do) are those of such an image.
pub fn probe(bytes: &[u8]) -> bool {
    header::has_magic(bytes)
}

/// Reads the header, and the name of the backing file.
async fn read(file: &Arc<dyn Storage>) -> Result<(Header, Option<String>)> {
    let bytes = read_at(&**file, 0, header::HEADER_BYTES).await?;
    let header = Header::decode(&bytes)?;
    let Some((at, len)) = header.backing_name_at()? else {
        return Ok((header, None));
    };
    let name = read_at(&**file, at, len).await?;
    let name = crate::fields::until_nul(&name);
    Ok((header, Some(String::from_utf8_lossy(name).into_owned())))
}

/// What an image says of itself: the name of its backing file above all, which whoever opens it opens before.
///
/// # Errors
/// As [`open`].
pub async fn facts(file: &Arc<dyn Storage>) -> Result<Facts> {
    let (_, name) = read(file)
        .await
        .map_err(|error| error.target(file.name()))?;
    Ok(layout_facts(name))
}

fn layout_facts(name: Option<String>) -> Facts {
    let backing = name.map(|name| BackingName { name, format: None });
    Facts {
        backing,
        compression: CompressedWrites::Also,
        ..Facts::default()
    }
}

/// Opens an image.
///
/// # Errors
/// [`vellum::ErrorKind::InvalidImage`] for what is no such image, [`vellum::ErrorKind::Unsupported`] for an
/// encrypted one; else what the storage says.
pub async fn open(
    file: Arc<dyn Storage>,
    backing: Option<Arc<dyn BlockDevice>>,
    read_only: bool,
) -> Result<Arc<MappedDevice<QcowLayout>>> {
    let (header, name) = read(&file)
        .await
        .map_err(|error| error.target(file.name()))?;
    let end_bytes = file.len_bytes()?;
    let layout = QcowLayout::new(file, header, layout_facts(name), end_bytes);
    debug_assert!(layout.block_bytes() >= 512);
    Ok(MappedDevice::new(layout, backing, read_only))
}
