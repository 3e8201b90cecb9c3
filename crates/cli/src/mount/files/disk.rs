//! The disk in an image, for readers that block.

use std::io;

use vellum::blocking::Device;
use vellum_files::ReadAt;

/// The disk.
pub(super) struct Disk {
    device: Device,
    len_bytes: u64,
}

impl Disk {
    pub(super) fn new(device: Device) -> Disk {
        let len_bytes = device.size_bytes();
        Disk { device, len_bytes }
    }
}

impl ReadAt for Disk {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()> {
        let read = self.device.read(offset_bytes, bytes);
        read.map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }
}
