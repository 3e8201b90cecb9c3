//! Key slots of an image that is in use.

use std::sync::Arc;

use crate::luks::{GuestEncryption, KeyChange, LuksHeader, change_keys};
use crate::qcow2::Qcow2;
use crate::qcow2::amend;
use crate::qcow2::encryption::luks_header;
use crate::qcow2::image::Image;
use vellum_format::Header;
use vellum_io::{Error, ErrorKind, Result};

impl Image {
    /// Changes the key slots of an image that has some.
    pub(crate) async fn change_keys(
        &self,
        header: &Header,
        change: KeyChange,
    ) -> Result<LuksHeader> {
        let GuestEncryption::Luks {
            passphrase: known,
            header: current,
            ..
        } = &self.encryption
        else {
            let message = "the image was opened without its key";
            return Err(Error::new(ErrorKind::Denied, "amend", message));
        };
        let (at_bytes, volume) = luks_header(&self.file, header).await?;
        let changed = change_keys(&self.file, at_bytes, volume, known, change).await?;
        current.set(&changed);
        Ok(changed)
    }
}

impl Qcow2 {
    /// Adds a passphrase to an image with LUKS encryption, or takes some away, and
    /// returns its LUKS header as it is then. Every passphrase that is to stay is
    /// there after a crash at any moment. What was begun runs to its end, whatever becomes of the future.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] in QEMU's words if the image is not encrypted with
    /// LUKS or the change cannot be made, [`ErrorKind::Denied`] for a wrong passphrase.
    pub async fn change_keys(&self, change: KeyChange) -> Result<LuksHeader> {
        self.check_key_slots()?;
        let change = |image: Arc<Image>| async move {
            image.begin_change("amend").await?;
            let _one = image.header.lock_for_writing().await;
            image.change_keys(&image.header(), change).await
        };
        self.image.start_change(change).await
    }

    /// The header of the LUKS volume that holds the disk, with the key slots that there are now; `None` if it
    /// is not encrypted with LUKS, or was opened without its key.
    pub fn luks_header(&self) -> Option<Arc<LuksHeader>> {
        match &self.image.encryption {
            GuestEncryption::Luks { header, .. } => Some(header.get()),
            _ => None,
        }
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
