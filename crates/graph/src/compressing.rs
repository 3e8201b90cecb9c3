//! [`Compressing`]: a device whose writes are compressed.
//!
//! Invariant: whoever writes a part of a cluster reads the rest and holds the whole device meanwhile, so
//! that no other write is undone.

use std::ops::Range;
use std::sync::Arc;

use async_lock::RwLock;
use vellum::{BlockDevice, Buffer, Io, RequestFlags, Result, ZeroRequest, delegate};

/// Writes whole clusters, compressed, whatever it is asked to write.
#[derive(Debug)]
pub struct Compressing {
    inner: Arc<dyn BlockDevice>,
    unit_bytes: u64,
    padding: Arc<RwLock<()>>,
}

impl Compressing {
    /// Wraps a device that takes compressed writes.
    pub fn new(inner: Arc<dyn BlockDevice>) -> Arc<Self> {
        let unit_bytes = inner.info().cluster_size_bytes.unwrap_or(1);
        Arc::new(Compressing {
            inner,
            unit_bytes,
            padding: Arc::default(),
        })
    }

    /// The whole clusters around a range; the last one may end with the device.
    fn around(&self, start: u64, end: u64) -> Range<u64> {
        let whole = end.next_multiple_of(self.unit_bytes);
        start / self.unit_bytes * self.unit_bytes..whole.min(self.size_bytes().max(end))
    }
}

async fn write_padded(
    inner: Arc<dyn BlockDevice>,
    around: Range<u64>,
    offset_bytes: u64,
    buffer: Buffer,
    flags: RequestFlags,
) -> Result<Buffer> {
    let len_bytes = (around.end - around.start) as usize;
    let mut whole = inner
        .read(around.start, Buffer::for_read(len_bytes))
        .await?;
    let inside = (offset_bytes - around.start) as usize;
    whole[inside..inside + buffer.len()].copy_from_slice(&buffer);
    inner.write_compressed(around.start, whole, flags).await?;
    Ok(buffer)
}

impl BlockDevice for Compressing {
    delegate!(
        inner: info, size_bytes, read, copy_up, flush, block_status, truncate, resize, clear, close,
        backing, storage, format_device, identity, allocated_bytes,
    );

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        let end = offset_bytes + buffer.len() as u64;
        let around = self.around(offset_bytes, end);
        let (inner, padding) = (self.inner.clone(), self.padding.clone());
        Io::task(vellum_io::spawn(async move {
            if around == (offset_bytes..end) {
                let _beside = padding.read_arc().await;
                return inner.write_compressed(offset_bytes, buffer, flags).await;
            }
            let _alone = padding.write_arc().await;
            write_padded(inner, around, offset_bytes, buffer, flags).await
        }))
    }

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Io<Buffer> {
        self.write(offset_bytes, buffer, flags)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        let (inner, padding) = (self.inner.clone(), self.padding.clone());
        Io::task(vellum_io::spawn(async move {
            let _beside = padding.read_arc().await;
            inner.write_zeroes(offset_bytes, len_bytes, request).await
        }))
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let (inner, padding) = (self.inner.clone(), self.padding.clone());
        Io::task(vellum_io::spawn(async move {
            let _beside = padding.read_arc().await;
            inner.discard(offset_bytes, len_bytes).await
        }))
    }
}
