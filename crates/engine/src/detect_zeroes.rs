//! Writes of zeroes turned into zero requests (`detect-zeroes`).

use std::sync::Arc;

use crate::{BlockDevice, Buffer, Io, RequestFlags, ZeroRequest, delegate};

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
    delegate!(
        inner: info, size_bytes, read, copy_up, discard, flush, block_status, truncate, resize, clear,
        close, backing, storage, format_device, identity, allocated_bytes,
    );
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
}
