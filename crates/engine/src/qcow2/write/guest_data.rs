//! Guest data on its way to and from its place in the data file, as [`encryption`] wants it.
//!
//! [`encryption`]: crate::qcow2::encryption

use std::ops::Range;

use crate::luks::GuestEncryption;
use crate::qcow2::alloc::allocator::Allocation;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::MappingRun;
use vellum_format::types::HostOffset;
use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::{Storage, WriteFlags, ZeroFlags};

impl Image {
    /// Whether guest data is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.encryption.is_some()
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
        matches!(
            self.encryption,
            GuestEncryption::None | GuestEncryption::Luks { .. }
        )
    }

    /// Reads a run of data that is not stored as the guest reads it.
    pub(crate) async fn read_data(
        &self,
        run: &MappingRun,
        host_bytes: u64,
        piece: Buffer,
    ) -> Result<Buffer> {
        let buffers = Buffers::from_buf([piece]);
        let read = |data: &dyn Storage, at| data.read(at, buffers);
        let guest = run.guest.bytes();
        let read = self.encryption.at(&*self.data, guest, host_bytes, read)?;
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
        let write = |data: &dyn Storage, at| data.write(at, buffers, flags);
        let encryption = &self.encryption;
        encryption.at(&*self.data, guest, host_bytes, write)?.await
    }

    /// Makes a range of the disk read as zeroes in a raw data file, where it has its place.
    pub(crate) async fn zero_raw_data(&self, range: Range<u64>, flags: ZeroFlags) -> Result<()> {
        let len_bytes = range.end - range.start;
        match self.reads_as_stored() {
            true => self.data.write_zeroes(range.start, len_bytes, flags).await,
            false => self.zero_data(range.start, range.start, len_bytes).await,
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
        let zero = |data: &dyn Storage, at| data.write_zeroes(at, len_bytes, flags);
        let encryption = &self.encryption;
        encryption.at(&*self.data, guest, host_bytes, zero)?.await
    }
}
