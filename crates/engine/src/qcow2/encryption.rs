//! An image whose guest data is encrypted.
//!
//! LUKS counts sectors by host offset, so an [`EncryptedStorage`] in the place of the
//! data file does it all; metadata is never encrypted. The AES of old images counts by
//! guest offset, so there one is made for each place, as it is read or written.
//!
//! Invariants:
//! - Of an encrypted image, nothing that was not written reads as zeroes. New
//!   clusters are never taken for fresh, clusters that are made ahead are mapped as
//!   zeroes, holes in the file say nothing, and no space of a cluster that is still
//!   mapped is given back.
//! - Compressed clusters are not encrypted, and none is written to an encrypted image.

use std::sync::Arc;

use vellum_format::Header;
use vellum_format::crypto::CryptMethod;
use vellum_io::{Error, ErrorKind, Result};
use vellum_storage::Storage;

use crate::luks::{
    EncryptedStorage, KeySlot, LuksHeader, MasterKey, Passphrase, read_header, unlock,
};
use crate::qcow2::options::{OpenOptions, OpenPurpose};

/// How an open image is encrypted.
#[derive(Debug)]
pub(crate) enum Encryption {
    /// Not at all.
    None,
    /// In a way that does not matter, since no data is read.
    Locked,
    /// By what holds its data.
    Luks {
        /// What unlocked it.
        passphrase: Passphrase,
        /// What holds its data.
        plain: EncryptedStorage,
        /// The key of its sectors.
        key: MasterKey,
    },
    /// Cluster by cluster, by guest offset.
    Legacy(EncryptedStorage),
}

impl Encryption {
    /// The same for another opening over the same data storage.
    pub(crate) fn of_reopened(&self) -> Encryption {
        match self {
            Encryption::None => Encryption::None,
            Encryption::Luks {
                passphrase,
                plain,
                key,
            } => Encryption::Luks {
                passphrase: passphrase.clone(),
                plain: plain.clone(),
                key: key.clone(),
            },
            Encryption::Locked => Encryption::Locked,
            Encryption::Legacy(cipher) => Encryption::Legacy(cipher.clone()),
        }
    }
}

impl Encryption {
    /// The key of the sectors of a LUKS image.
    pub(crate) fn volume_key(&self) -> Option<&[u8]> {
        match self {
            Encryption::Luks { key, .. } => Some(key.bytes()),
            _ => None,
        }
    }
}

fn refuse(kind: ErrorKind, file: &Arc<dyn Storage>, message: impl Into<String>) -> Error {
    Error::new(kind, "open", message).target(file.name())
}

fn method_name(method: CryptMethod) -> &'static str {
    match method {
        CryptMethod::None => "none",
        CryptMethod::Aes => "aes",
        CryptMethod::Luks => "luks",
    }
}

/// Unlocks an image: what its data is read from, and how it is encrypted.
pub(super) async fn open(
    file: &Arc<dyn Storage>,
    data: Arc<dyn Storage>,
    header: &Header,
    options: &OpenOptions,
) -> Result<(Arc<dyn Storage>, Encryption)> {
    let method = header.crypt_method;
    if let Some(expected) = &options.encryption_format
        && expected != method_name(method)
    {
        let message = match method {
            CryptMethod::None => format!(
                "No encryption in image header, but options specified \
                 format '{expected}'"
            ),
            _ => format!(
                "Header reported '{}' encryption format but options specify '{expected}'",
                method_name(method)
            ),
        };
        return Err(refuse(ErrorKind::InvalidArgument, file, message));
    }
    if method == CryptMethod::None {
        return Ok((data, Encryption::None));
    }
    let locked = matches!(options.purpose, OpenPurpose::Locked | OpenPurpose::Metadata);
    if !options.read_only && locked {
        let message = "an encrypted image cannot be written without its key";
        return Err(refuse(ErrorKind::InvalidArgument, file, message));
    }
    if locked {
        return Ok((data, Encryption::Locked));
    }
    let Some(passphrase) = &options.passphrase else {
        let message = "Parameter 'encrypt.key-secret' is required for cipher";
        return Err(refuse(ErrorKind::InvalidArgument, file, message));
    };
    if method == CryptMethod::Aes {
        let cipher = EncryptedStorage::legacy_aes(data.clone(), passphrase)?;
        return Ok((data, Encryption::Legacy(cipher)));
    }
    let (at_bytes, volume) = luks_header(file, header).await?;
    let key = unlock(file, at_bytes, &volume, passphrase).await?;
    let suite = volume
        .suite()
        .map_err(|error| crate::qcow2::integrity::errors::bad_format("open", &error))?;
    let plain = EncryptedStorage::new(data, 0, &suite, &key)?;
    let unlocked = Encryption::Luks {
        passphrase: passphrase.clone(),
        plain: plain.clone(),
        key,
    };
    Ok((Arc::new(plain), unlocked))
}

/// Where the LUKS header of an image stands, and what it says.
pub(super) async fn luks_header(
    file: &Arc<dyn Storage>,
    header: &Header,
) -> Result<(u64, LuksHeader)> {
    let Some(pointer) = header.encryption_header() else {
        let message = "CRYPTO header extension only expected with LUKS encryption method";
        return Err(refuse(ErrorKind::InvalidImage, file, message));
    };
    let at_bytes = pointer.offset.bytes();
    let luks = read_header(file, at_bytes, false).await?;
    let end = |slot: &KeySlot| slot.key_offset_bytes() + luks.key_place_bytes();
    if luks
        .slots
        .iter()
        .any(|slot| end(slot) > pointer.length_bytes)
    {
        let message = "Request for data outside of extension header";
        return Err(refuse(ErrorKind::InvalidImage, file, message));
    }
    Ok((at_bytes, luks))
}
