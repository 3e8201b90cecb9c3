//! Devices around devices: durable writes, and the care taken with a guessed raw
//! format.

use std::sync::Arc;

use vellum::{BlockDevice, Buffer, Error, ErrorKind, Io, RequestFlags, ZeroRequest, pass_on};

use crate::probe::{Probed, probe};

/// Makes every write durable before it completes (cache modes writethrough and
/// directsync).
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
    pass_on!(
        inner: info, size_bytes, read, discard, flush, block_status, truncate, resize, make_empty,
        close, backing, storage, as_qcow2, allocated_bytes,
    );

    fn write(&self, offset_bytes: u64, buffer: Buffer, _flags: RequestFlags) -> Io<Buffer> {
        self.inner
            .write(offset_bytes, buffer, RequestFlags { fua: true })
    }

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        _flags: RequestFlags,
    ) -> Io<Buffer> {
        self.inner
            .write_compressed(offset_bytes, buffer, RequestFlags { fua: true })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.inner.write_zeroes(
            offset_bytes,
            len_bytes,
            ZeroRequest {
                fua: true,
                ..request
            },
        )
    }
}

/// The first bytes of a raw image, by which its format is guessed.
const FIRST_BLOCK_BYTES: u64 = 512;

/// A raw device whose format was only guessed: a guest must not write a first
/// block that would make the next guess another one, and so gain the power to
/// name other files.
#[derive(Debug)]
pub struct ProbedRaw {
    inner: Arc<dyn BlockDevice>,
}

impl ProbedRaw {
    /// Wraps a device.
    pub fn new(inner: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(ProbedRaw { inner })
    }

    fn refusal(&self) -> Error {
        Error::new(
            ErrorKind::PermissionDenied,
            "write",
            "Operation not permitted",
        )
        .target(self.inner.info().name)
        .with_errno(libc::EPERM)
    }
}

impl BlockDevice for ProbedRaw {
    pass_on!(
        inner: info, size_bytes, read, write_zeroes, discard, flush, block_status, truncate, resize,
        make_empty, close, backing, storage, as_qcow2, allocated_bytes,
    );

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        if offset_bytes >= FIRST_BLOCK_BYTES || buffer.is_empty() {
            return self.inner.write(offset_bytes, buffer, flags);
        }
        let inner = self.inner.clone();
        let refusal = self.refusal();
        Io::task(vellum_storage::spawn(async move {
            let block_bytes = FIRST_BLOCK_BYTES.min(inner.size_bytes().max(1)) as usize;
            let mut block = inner.read(0, Buffer::for_read(block_bytes)).await?;
            let at = offset_bytes as usize;
            let end = block_bytes.min(at + buffer.len());
            if at < end {
                block[at..end].copy_from_slice(&buffer[..end - at]);
            }
            if probe(&block) != Probed::Raw {
                return Err(refusal);
            }
            inner.write(offset_bytes, buffer, flags).await
        }))
    }
}
