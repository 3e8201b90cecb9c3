//! An image whose guest data is encrypted.
//!
//! LUKS counts sectors by host offset, so an [`EncryptedStorage`] in the place of the
//! data file does it all; metadata is never encrypted. The AES of old images counts by
//! guest offset, so there one is made for each place, as it is read or written.
//!
//! Invariant: of an encrypted image, nothing that was not written reads as zeroes. New
//! clusters are never taken for fresh, clusters that are made ahead are mapped as
//! zeroes, holes in the file say nothing, and no space of a cluster that is still
//! mapped is given back.

use std::sync::Arc;

use vellum_format::Header;
use vellum_format::crypto::CryptMethod;
use vellum_format::types::HostOffset;
use vellum_storage::{Buffer, Buffers, Error, ErrorKind, Result, Storage, WriteFlags, ZeroFlags};

use super::alloc::Allocation;
use super::amend;
use super::image::Image;
use super::map::Run;
use super::options::OpenOptions;
use crate::luks::{
    EncryptedStorage, KeyChange, KeySlot, LuksHeader, Passphrase, change_keys, read_header, unlock,
};
use crate::qcow2::Qcow2;

/// How an open image is encrypted.
#[derive(Debug)]
pub(crate) enum Encryption {
    /// Not at all.
    None,
    /// In a way that does not matter, since no data is read.
    Locked,
    /// By what holds its data; this unlocked it.
    Luks(Passphrase),
    /// Cluster by cluster, by guest offset.
    Legacy(EncryptedStorage),
}

impl Encryption {
    /// The same for another opening over the same data storage.
    pub(crate) fn of_reopened(&self) -> Encryption {
        match self {
            Encryption::None => Encryption::None,
            Encryption::Luks(passphrase) => Encryption::Luks(passphrase.clone()),
            Encryption::Locked => Encryption::Locked,
            Encryption::Legacy(cipher) => Encryption::Legacy(cipher.clone()),
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
    if !options.read_only && (options.metadata_only || options.locked) {
        let message = "an encrypted image cannot be written without its key";
        return Err(refuse(ErrorKind::InvalidArgument, file, message));
    }
    if options.metadata_only || options.locked {
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
        .map_err(|error| super::fault::bad_format("open", &error))?;
    let plain = EncryptedStorage::new(data, 0, &suite, &key)?;
    Ok((Arc::new(plain), Encryption::Luks(passphrase.clone())))
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

impl Image {
    /// Whether guest data is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        !matches!(self.encryption, Encryption::None)
    }

    /// Clusters for data as the guest writes it, as [`Image::allocate_near`] finds them.
    pub(crate) async fn allocate_for_data(
        &self,
        want: u64,
        after: Option<HostOffset>,
    ) -> Result<Allocation> {
        let mut allocation = self.allocate_near(want, after).await?;
        // What reads as zeroes on disk does not when it is decrypted.
        allocation.fresh &= !self.is_encrypted();
        Ok(allocation)
    }

    /// Whether what the storage gives is what the guest reads.
    pub(crate) fn reads_as_stored(&self) -> bool {
        matches!(self.encryption, Encryption::None | Encryption::Luks(_))
    }

    /// Changes the key slots of an image that has some.
    pub(crate) async fn change_keys(
        &self,
        header: &Header,
        change: KeyChange,
    ) -> Result<LuksHeader> {
        let Encryption::Luks(known) = &self.encryption else {
            let message = "the image was opened without its key";
            return Err(Error::new(ErrorKind::Denied, "amend", message));
        };
        let (at_bytes, volume) = luks_header(&self.file, header).await?;
        change_keys(&self.file, at_bytes, volume, known, change).await
    }

    /// Reads a run of data of an image with old AES.
    pub(crate) async fn read_legacy(
        &self,
        run: &Run,
        host_bytes: u64,
        piece: Buffer,
    ) -> Result<Buffer> {
        let Encryption::Legacy(cipher) = &self.encryption else {
            let message = "the image was opened without its key";
            return Err(Error::new(ErrorKind::Denied, "read", message));
        };
        let guest = run.guest.bytes();
        let buffers = Buffers::from_buf([piece]);
        let read = cipher.placed(guest, host_bytes).read(guest, buffers);
        read.into_single().await
    }

    /// Writes data of the guest at `guest` to its place.
    pub(crate) async fn write_data(
        &self,
        guest: u64,
        host_bytes: u64,
        buffers: Buffers,
        flags: WriteFlags,
    ) -> Result<Buffers> {
        match &self.encryption {
            Encryption::Legacy(cipher) => {
                let placed = cipher.placed(guest, host_bytes);
                placed.write(guest, buffers, flags).await
            }
            _ => self.data.write(host_bytes, buffers, flags).await,
        }
    }

    /// Makes the place of guest data read as zeroes.
    pub(crate) async fn zero_data(
        &self,
        guest: u64,
        host_bytes: u64,
        len_bytes: u64,
    ) -> Result<()> {
        let flags = ZeroFlags::default();
        match &self.encryption {
            Encryption::Legacy(cipher) => {
                let placed = cipher.placed(guest, host_bytes);
                placed.write_zeroes(guest, len_bytes, flags).await
            }
            _ => self.data.write_zeroes(host_bytes, len_bytes, flags).await,
        }
    }
}

impl Qcow2 {
    /// Adds a passphrase to an image with LUKS encryption, or takes some away, and
    /// returns its LUKS header as it is then. Every passphrase that is to stay is
    /// there after a crash at any moment.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] in QEMU's words if the image is not encrypted with
    /// LUKS or the change cannot be made, [`ErrorKind::Denied`] for a wrong passphrase.
    pub async fn change_keys(&self, change: KeyChange) -> Result<LuksHeader> {
        let image = &self.image;
        self.check_key_slots()?;
        image.begin_change("amend").await?;
        let _one = image.header_writes.lock().await;
        image.change_keys(&image.header(), change).await
    }

    /// Whether the image has key slots to change.
    ///
    /// # Errors
    /// In QEMU's words, if it is encrypted in another way or not at all.
    pub fn check_key_slots(&self) -> Result<()> {
        amend::encryption::check(&self.image.header())
            .map_err(|error| error.target(self.image.file.name()))
    }
}
