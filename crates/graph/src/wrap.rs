//! A device around a device: durable writes.

use std::sync::Arc;

use vellum::{BlockDevice, Buffer, Io, RequestFlags, ZeroRequest, delegate};

/// Makes every write durable before it completes (cache modes writethrough and
/// directsync). As in QEMU, discards are passed on as they are: after a power cut the
/// range may hold what it did before.
#[derive(Debug)]
pub struct WriteThrough {
    inner: Arc<dyn BlockDevice>,
}

impl WriteThrough {
    /// Wraps a device.
    pub fn new(inner: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(WriteThrough { inner })
    }
}

impl BlockDevice for WriteThrough {
    delegate!(
        inner: info, size_bytes, read, read_into, copy_up, discard, flush, block_status, truncate, resize,
        clear, close, backing, storage, format_device, identity, allocated_bytes,
    );

    fn write(&self, offset_bytes: u64, buffer: Buffer, _flags: RequestFlags) -> Io<Buffer> {
        self.inner
            .write(offset_bytes, buffer, RequestFlags::default().fua(true))
    }

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        _flags: RequestFlags,
    ) -> Io<Buffer> {
        self.inner
            .write_compressed(offset_bytes, buffer, RequestFlags::default().fua(true))
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.inner
            .write_zeroes(offset_bytes, len_bytes, request.fua(true))
    }
}
