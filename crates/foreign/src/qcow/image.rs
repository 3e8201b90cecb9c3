//! Opens images of version 1.

use std::sync::Arc;

use vellum::luks::{CryptMethod, GuestEncryption, Unlocking};
use vellum::{BlockDevice, Result, Storage};

use crate::facts::{BackingName, CompressedWrites, Facts};
use crate::fields::read_at;
use crate::{Layout, MappedDevice};

use super::header::{self, Header};
use super::layout::QcowLayout;

/// Whether the first bytes of a file (48 will do) are those of such an image.
pub fn probe(bytes: &[u8]) -> bool {
    header::has_magic(bytes)
}

/// Reads the header, and the name of the backing file.
pub(crate) async fn read(file: &Arc<dyn Storage>) -> Result<(Header, Option<String>)> {
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
    let (header, name) = read(file)
        .await
        .map_err(|error| error.target(file.name()))?;
    Ok(layout_facts(&header, name))
}

fn layout_facts(header: &Header, name: Option<String>) -> Facts {
    let backing = name.map(|name| BackingName { name, format: None });
    let is_encrypted = header.crypt_method != CryptMethod::None;
    Facts {
        backing,
        is_encrypted,
        compression: match is_encrypted {
            true => CompressedWrites::No,
            false => CompressedWrites::Also,
        },
        ..Facts::default()
    }
}

vellum_io::with_setters! {
    /// How an image is opened.
    #[derive(Debug, Clone, Default)]
    #[non_exhaustive]
    pub struct OpenOptions {
        /// Nothing is changed.
        pub read_only: bool,
        /// What is said of its encryption.
        pub unlocking: Unlocking,
    }
}

/// Opens an image.
///
/// # Errors
/// [`vellum::ErrorKind::InvalidImage`] for what is no such image, [`vellum::ErrorKind::InvalidArgument`] for an
/// encrypted one without a passphrase; else what the storage says. A wrong passphrase is not noticed.
pub async fn open(
    file: Arc<dyn Storage>,
    backing: Option<Arc<dyn BlockDevice>>,
    options: OpenOptions,
) -> Result<Arc<MappedDevice<QcowLayout>>> {
    let named = |error: vellum::Error| error.target(file.name());
    let (header, name) = read(&file).await.map_err(named)?;
    let passphrase = options.unlocking.needed_passphrase(header.crypt_method);
    let encryption = match passphrase.map_err(named)? {
        Some(passphrase) => GuestEncryption::legacy_aes(file.clone(), passphrase)?,
        None => GuestEncryption::without_key(header.crypt_method),
    };
    let facts = layout_facts(&header, name);
    let end_bytes = file.len_bytes()?;
    let layout = QcowLayout::new(file, header, facts, encryption, end_bytes);
    debug_assert!(layout.block_bytes() >= 512);
    Ok(MappedDevice::new(layout, backing, options.read_only))
}
