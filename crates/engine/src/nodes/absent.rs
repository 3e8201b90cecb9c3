//! [`absent`]: what keeps the place of a device that is away.
//!
//! While a device is away its place has the device's size and no bytes. So whoever reads through an
//! image asks for the size of its backing file without waiting, and takes what lies beyond the end
//! for zeroes.

use std::sync::Arc;

use vellum_io::{Buffer, Error, ErrorKind, Io, Result};

use crate::{BlockDevice, DeviceInfo, Extent, RequestFlags, ZeroRequest};

/// Says of itself what the device said, and refuses every request.
#[derive(Debug)]
struct Absent {
    info: DeviceInfo,
    size_bytes: u64,
}

/// What a link leads to while its device is being opened anew, or cannot be: it has the
/// same size, since what reads past the end of a backing file reads zeroes and asks for the
/// size without waiting, and no bytes.
pub fn absent(device: &dyn BlockDevice) -> Arc<dyn BlockDevice> {
    Arc::new(Absent {
        info: device.info(),
        size_bytes: device.size_bytes(),
    })
}

impl Absent {
    fn refuse<T>(&self, operation: &'static str) -> Io<T> {
        let message = "the image is not open: it could not be opened anew";
        let error = Error::new(ErrorKind::Io, operation, message);
        Io::ready(Err(error.target(self.info.name.as_str())))
    }
}

impl BlockDevice for Absent {
    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, _: u64, _: Buffer) -> Io<Buffer> {
        self.refuse("read")
    }

    fn write(&self, _: u64, _: Buffer, _: RequestFlags) -> Io<Buffer> {
        self.refuse("write")
    }

    fn write_zeroes(&self, _: u64, _: u64, _: ZeroRequest) -> Io<()> {
        self.refuse("write zeroes")
    }

    fn discard(&self, _: u64, _: u64) -> Io<()> {
        self.refuse("discard")
    }

    fn flush(&self) -> Io<()> {
        self.refuse("flush")
    }

    fn block_status(&self, _: u64, _: u64, _: u32) -> Io<Extent> {
        self.refuse("block status")
    }

    fn truncate(&self, _: u64) -> Io<()> {
        self.refuse("truncate")
    }

    /// There is nothing to close.
    fn close(&self) -> Io<()> {
        Io::ready(Ok(()))
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}
