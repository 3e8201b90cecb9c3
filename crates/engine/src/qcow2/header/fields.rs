//! The header of an open image: as it is in memory, and its fields on disk, changed in place.

use std::sync::Arc;

use vellum_format::features::{Compatible, Incompatible};
use vellum_format::header::{Header, field};
use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::{Storage, WriteFlags};

use crate::qcow2::image::Image;

/// Writes the compatible features. The next flush makes that durable.
pub(crate) async fn write_compatible(file: &dyn Storage, new: Compatible) -> Result<()> {
    let bytes = Buffers::from_iter([Buffer::copy_of(&new.bits().to_be_bytes())]);
    let at = field::COMPATIBLE_FEATURES as u64;
    file.write(at, bytes, WriteFlags::default()).await.map(drop)
}

impl Image {
    /// The header as it is now.
    pub(crate) fn header(&self) -> Arc<Header> {
        self.header.get()
    }

    /// Changes the header in memory.
    pub(crate) fn change_header(&self, change: impl FnOnce(&mut Header)) {
        self.header.change(change);
    }

    /// Writes one field of the header in place. The known fields all lie in the
    /// first 512 bytes, so a crash leaves the old or the new value.
    pub(crate) async fn write_header_field(&self, offset_bytes: usize, bytes: &[u8]) -> Result<()> {
        let _one = self.header.lock_for_writing().await;
        let buffers = Buffers::from_iter([Buffer::copy_of(bytes)]);
        self.file
            .write(offset_bytes as u64, buffers, WriteFlags::default())
            .await?;
        self.file.flush().await
    }

    /// Changes the incompatible features, in memory once they are durable.
    pub(crate) async fn change_incompatible(
        &self,
        change: impl FnOnce(Incompatible) -> Incompatible,
    ) -> Result<()> {
        let _one = self.header.lock_for_writing().await;
        let new = change(self.header().incompatible);
        let bytes = Buffer::copy_of(&new.bits().to_be_bytes());
        self.file
            .write(
                field::INCOMPATIBLE_FEATURES as u64,
                Buffers::from_iter([bytes]),
                WriteFlags::default(),
            )
            .await?;
        self.file.flush().await?;
        self.change_header(|header| header.incompatible = new);
        Ok(())
    }

    /// Changes the compatible features. The next flush makes that durable.
    pub(crate) async fn change_compatible(&self, new: Compatible) -> Result<()> {
        let _one = self.header.lock_for_writing().await;
        write_compatible(&*self.file, new).await?;
        self.change_header(|header| header.compatible = new);
        Ok(())
    }

    /// As [`Image::write_header_field`], for fields that lead to other metadata from now
    /// on. If they cannot be written, the `old` ones are written once more.
    ///
    /// # Errors
    /// The first one. The image goes on as it was before if the old fields are there
    /// again; if even that is not known, it accepts no more changes.
    pub(crate) async fn switch_header_fields(
        &self,
        offset_bytes: usize,
        old: &[u8],
        new: &[u8],
    ) -> Result<()> {
        let _one = self.header.lock_for_writing().await;
        let write = |bytes: &[u8]| {
            let buffers = Buffers::from_iter([Buffer::copy_of(bytes)]);
            self.file
                .write(offset_bytes as u64, buffers, WriteFlags::default())
        };
        let Err(error) = write(new).await else {
            let flushed = self.file.flush().await;
            return flushed.inspect_err(|error| self.stop_changes(error.clone()));
        };
        let taken_back = async {
            write(old).await?;
            self.file.flush().await
        };
        if taken_back.await.is_err() {
            self.stop_changes(error.clone());
        }
        Err(error)
    }
}
