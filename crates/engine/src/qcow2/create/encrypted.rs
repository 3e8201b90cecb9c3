//! How a new image is encrypted; its LUKS header.

use std::sync::Arc;

use vellum_format::crypto::{CryptMethod, EncryptionHeaderPointer};
use vellum_format::extension::Extension;
use vellum_storage::ZeroFlags;

use super::layout::Layout;
use super::options::CreateOptions;
use super::write::region;
use crate::luks::{self, EncryptedStorage, FormatOptions, NewVolume, Passphrase};
use crate::qcow2::bad_format;
use crate::{Result, Storage};

/// How a new image is encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Encryption {
    /// With a LUKS header in the image.
    Luks {
        /// Ciphers and the like.
        options: FormatOptions,
        /// What unlocks the image.
        passphrase: Passphrase,
    },
    /// With AES-CBC, of which the passphrase is the key. Only programs that know nothing else should get such
    /// images: whoever sees two states of one, or can guess what is in it, learns a lot.
    LegacyAes(Passphrase),
}

impl CreateOptions {
    /// Bytes of the LUKS header with all places for keys; 0 without encryption.
    pub(super) fn encryption_header_bytes(&self) -> Result<u64> {
        match &self.encryption {
            Some(Encryption::Luks { options, .. }) => luks::header_size_bytes(options),
            Some(Encryption::LegacyAes(_)) | None => Ok(0),
        }
    }
}

/// Makes the LUKS header that `options` ask for.
pub(super) async fn new_volume(options: &CreateOptions) -> Result<Option<NewVolume>> {
    match &options.encryption {
        Some(Encryption::Luks {
            options,
            passphrase,
        }) => luks::format(options, passphrase, false).await.map(Some),
        Some(Encryption::LegacyAes(_)) | None => Ok(None),
    }
}

/// The header's word for how data is encrypted.
pub(super) fn method(options: &CreateOptions) -> CryptMethod {
    match options.encryption {
        Some(Encryption::Luks { .. }) => CryptMethod::Luks,
        Some(Encryption::LegacyAes(_)) => CryptMethod::Aes,
        None => CryptMethod::None,
    }
}

/// The header extension that leads to the LUKS header.
pub(super) fn pointer(layout: &Layout, luks: &NewVolume) -> Extension {
    Extension::CryptoHeader(EncryptionHeaderPointer {
        offset: layout.encryption_header_offset(),
        length_bytes: luks.size_bytes,
    })
}

/// Writes the LUKS header, and zeroes over the rest of its clusters.
pub(super) async fn write(
    storage: &Arc<dyn Storage>,
    layout: &Layout,
    luks: &NewVolume,
) -> Result<()> {
    let start = layout.encryption_header_offset().0;
    let len_bytes = layout.encryption_clusters * layout.geometry.cluster_size_bytes();
    region(storage, start..start + len_bytes, |at, bytes| {
        bytes.fill(0);
        let header = luks.bytes.get(at as usize..).unwrap_or_default();
        let count = header.len().min(bytes.len());
        bytes[..count].copy_from_slice(&header[..count]);
    })
    .await
}

/// Encrypts zeroes over all data of a version 2 image whose clusters are made ahead:
/// it cannot map them as zeroes.
pub(super) async fn fill(
    storage: &Arc<dyn Storage>,
    layout: &Layout,
    options: &CreateOptions,
    luks: Option<&NewVolume>,
) -> Result<()> {
    let range = layout.data_range();
    if range.is_empty() || options.version >= 3 {
        return Ok(());
    }
    let len_bytes = range.end - range.start;
    let (data, start) = match (&options.encryption, luks) {
        (Some(Encryption::Luks { passphrase, .. }), Some(luks)) => {
            let at_bytes = layout.encryption_header_offset().0;
            let key = luks::unlock(storage, at_bytes, &luks.header, passphrase).await?;
            let suite = luks.header.suite();
            let suite = suite.map_err(|error| bad_format("create", &error))?;
            let data = EncryptedStorage::new(storage.clone(), 0, &suite, &key)?;
            (data, range.start)
        }
        (Some(Encryption::LegacyAes(passphrase)), _) => {
            // The first byte of the data is the guest's first.
            let data = EncryptedStorage::legacy_aes(storage.clone(), passphrase)?;
            (data.placed(0, range.start), 0)
        }
        _ => return Ok(()),
    };
    data.write_zeroes(start, len_bytes, ZeroFlags::default())
        .await
}
