//! A part of a device as a device.

use std::sync::Arc;

use vellum::{
    BlockDevice, Buffer, DeviceInfo, Error, ErrorKind, Extent, Io, RequestFlags, Result,
    ZeroRequest, delegate,
};

/// The bytes of a device from an offset to its end.
#[derive(Debug)]
pub struct Slice {
    device: Arc<dyn BlockDevice>,
    offset_bytes: u64,
}

impl Slice {
    /// Shows `device` from `offset_bytes` on.
    ///
    /// # Errors
    /// If the offset lies beyond the end.
    pub fn new(device: Arc<dyn BlockDevice>, offset_bytes: u64) -> Result<Arc<Self>> {
        let size_bytes = device.size_bytes();
        if offset_bytes > size_bytes {
            let message = format!(
                "Offset ({offset_bytes}) cannot be greater than size of the containing file \
                 ({size_bytes})"
            );
            return Err(Error::new(ErrorKind::InvalidArgument, "open", message));
        }
        Ok(Arc::new(Slice {
            device,
            offset_bytes,
        }))
    }

    /// Where an offset of the slice lies in the device: an overflow lies beyond
    /// its end, which the device refuses.
    fn place(&self, offset_bytes: u64) -> u64 {
        self.offset_bytes.saturating_add(offset_bytes)
    }
}

impl BlockDevice for Slice {
    delegate!(device: flush, close);
    fn info(&self) -> DeviceInfo {
        let info = self.device.info();
        let aligned = self
            .offset_bytes
            .is_multiple_of(u64::from(info.request_alignment_bytes));
        DeviceInfo {
            request_alignment_bytes: if aligned {
                info.request_alignment_bytes
            } else {
                1
            },
            growable: false,
            ..info
        }
    }

    fn size_bytes(&self) -> u64 {
        self.device.size_bytes().saturating_sub(self.offset_bytes)
    }

    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        self.device.read(self.place(offset_bytes), buffer)
    }

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        self.device.write(self.place(offset_bytes), buffer, flags)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.device
            .write_zeroes(self.place(offset_bytes), len_bytes, request)
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.device.discard(self.place(offset_bytes), len_bytes)
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
        self.device
            .block_status(self.place(offset_bytes), len_bytes, max_depth)
    }

    fn truncate(&self, _size_bytes: u64) -> Io<()> {
        let message = "a part of a device cannot be resized";
        Io::ready(Err(Error::new(ErrorKind::Unsupported, "resize", message)))
    }
}
