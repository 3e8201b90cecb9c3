//! Writes of zeroes turned into zero requests (`detect-zeroes`).

use std::sync::Arc;

use crate::qcow2::create::Preallocation;
use crate::{
    BlockDevice, Buffer, DeviceInfo, Extent, Io, RequestFlags, Result, Storage, ZeroRequest,
};

/// A device that looks at what is written and does not store zeroes.
#[derive(Debug)]
pub struct ZeroDetector {
    inner: Arc<dyn BlockDevice>,
    may_unmap: bool,
}

impl ZeroDetector {
    /// Wraps a device; with `may_unmap` zeroes give space back.
    pub fn new(inner: Arc<dyn BlockDevice>, may_unmap: bool) -> Arc<Self> {
        Arc::new(ZeroDetector { inner, may_unmap })
    }

    /// Makes the range of a buffer of zeroes read so.
    fn zero(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        let request = ZeroRequest {
            may_unmap: self.may_unmap,
            no_fallback: false,
            fua: flags.fua,
        };
        let zeroes = self
            .inner
            .write_zeroes(offset_bytes, buffer.len() as u64, request);
        // The request runs by itself; only handing the buffer back waits for it.
        Io::boxed(async move { zeroes.await.map(|()| buffer) })
    }
}

impl BlockDevice for ZeroDetector {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        self.inner.read(offset_bytes, buffer)
    }

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        if buffer.is_empty() || !buffer.is_zero() {
            return self.inner.write(offset_bytes, buffer, flags);
        }
        self.zero(offset_bytes, buffer, flags)
    }

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Io<Buffer> {
        if buffer.is_empty() || !buffer.is_zero() {
            return self.inner.write_compressed(offset_bytes, buffer, flags);
        }
        self.zero(offset_bytes, buffer, flags)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        let may_unmap = request.may_unmap || self.may_unmap;
        self.inner.write_zeroes(
            offset_bytes,
            len_bytes,
            ZeroRequest {
                may_unmap,
                ..request
            },
        )
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.inner.discard(offset_bytes, len_bytes)
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

    fn close(&self) -> Io<()> {
        self.inner.close()
    }

    fn backing(&self) -> Option<Arc<dyn BlockDevice>> {
        self.inner.backing()
    }

    fn storage(&self) -> Option<Arc<dyn Storage>> {
        self.inner.storage()
    }

    fn as_qcow2(&self) -> Option<&crate::qcow2::Qcow2> {
        self.inner.as_qcow2()
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        self.inner.allocated_bytes()
    }
}
