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
    CurrentHeader, EncryptedStorage, GuestEncryption, KeySlot, LuksHeader, Unlocking, read_header,
    unlock,
};
use crate::qcow2::options::{OpenOptions, OpenPurpose};

fn refuse(kind: ErrorKind, file: &Arc<dyn Storage>, message: impl Into<String>) -> Error {
    Error::new(kind, "open", message).target(file.name())
}

/// Unlocks an image: what its data is read from, and how it is encrypted.
pub(super) async fn open(
    file: &Arc<dyn Storage>,
    data: Arc<dyn Storage>,
    header: &Header,
    options: &OpenOptions,
) -> Result<(Arc<dyn Storage>, GuestEncryption)> {
    let method = header.crypt_method;
    let no_data = matches!(options.purpose, OpenPurpose::Locked | OpenPurpose::Metadata);
    let unlocking = Unlocking::default()
        .format(options.encryption_format.clone())
        .passphrase(options.passphrase.clone())
        .no_data(no_data);
    let passphrase = unlocking.needed_passphrase(method);
    let passphrase = passphrase.map_err(|error| error.target(file.name()))?;
    if method != CryptMethod::None && no_data && !options.read_only {
        let message = "an encrypted image cannot be written without its key";
        return Err(refuse(ErrorKind::InvalidArgument, file, message));
    }
    let Some(passphrase) = passphrase else {
        return Ok((data, GuestEncryption::without_key(method)));
    };
    if method == CryptMethod::Aes {
        let encryption = GuestEncryption::legacy_aes(data.clone(), passphrase)?;
        return Ok((data, encryption));
    }
    let (at_bytes, volume) = luks_header(file, header).await?;
    let key = unlock(file, at_bytes, &volume, passphrase).await?;
    let suite = volume
        .suite()
        .map_err(|error| crate::qcow2::integrity::errors::bad_format("open", &error))?;
    let plain = EncryptedStorage::new(data, 0, &suite, &key)?;
    let unlocked = GuestEncryption::Luks {
        passphrase: passphrase.clone(),
        plain: plain.clone(),
        key,
        header: CurrentHeader::new(volume),
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
