//! Guest data on its way to and from its place in the data file, as [`encryption`] wants it.
//!
//! [`encryption`]: crate::qcow2::encryption

use crate::qcow2::alloc::allocator::Allocation;
use crate::qcow2::encryption::Encryption;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::MappingRun;
use vellum_format::types::HostOffset;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};
use vellum_storage::{Storage, WriteFlags, ZeroFlags};

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
        allocation.reads_as_zeroes &= !self.is_encrypted();
        Ok(allocation)
    }

    /// Whether what the storage gives is what the guest reads.
    pub(crate) fn reads_as_stored(&self) -> bool {
        matches!(self.encryption, Encryption::None | Encryption::Luks { .. })
    }

    /// Reads a run of data of an image with old AES.
    pub(crate) async fn read_legacy(
        &self,
        run: &MappingRun,
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
