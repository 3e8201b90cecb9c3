//! Devices around devices: durable writes, and the care taken with a guessed raw
//! format.

use std::sync::Arc;

use vellum::qcow2::create::Preallocation;
use vellum::{
    BlockDevice, Buffer, DeviceInfo, Error, ErrorKind, Extent, Io, RequestFlags, Result, Storage,
    ZeroRequest,
};

use crate::probe::{Probed, probe};

/// The methods that a wrapper passes on as they are.
macro_rules! pass_on {
    () => {
        fn info(&self) -> DeviceInfo {
            self.inner.info()
        }
        fn size_bytes(&self) -> u64 {
            self.inner.size_bytes()
        }
        fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
            self.inner.read(offset_bytes, buffer)
        }
        fn flush(&self) -> Io<()> {
            self.inner.flush()
        }
        fn block_status(&self, offset_bytes: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
            self.inner.block_status(offset_bytes, len_bytes, max_depth)
        }
        fn truncate(&self, size_bytes: u64) -> Io<()> {
            self.inner.truncate(size_bytes)
        }
        fn resize(&self, size_bytes: u64, preallocation: Preallocation) -> Io<()> {
            self.inner.resize(size_bytes, preallocation)
        }
        fn make_empty(&self) -> Io<()> {
            self.inner.make_empty()
        }
        fn close(&self) -> Io<()> {
            self.inner.close()
        }
        fn backing(&self) -> Option<Arc<dyn BlockDevice>> {
            self.inner.backing()
        }
        fn storage(&self) -> Option<Arc<dyn Storage>> {
            self.inner.storage()
        }
        fn as_qcow2(&self) -> Option<&vellum::qcow2::Qcow2> {
            self.inner.as_qcow2()
        }
        fn allocated_bytes(&self) -> Result<Option<u64>> {
            self.inner.allocated_bytes()
        }
    };
}
pub(crate) use pass_on;

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
    pass_on!();

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

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.inner.discard(offset_bytes, len_bytes)
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
    pass_on!();

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

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.inner.write_zeroes(offset_bytes, len_bytes, request)
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.inner.discard(offset_bytes, len_bytes)
    }
}
