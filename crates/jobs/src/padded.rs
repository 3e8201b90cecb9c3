//! A device seen with another size: beyond its end, or without one, there are zeroes.

use std::sync::Arc;

use vellum::{
    BlockDevice, Buffer, DeviceInfo, Error, ErrorKind, Extent, ExtentKind, Io, RequestFlags,
    ZeroRequest,
};

/// A backing file as the image above it sees it; read-only.
#[derive(Debug, Clone)]
pub(crate) struct Padded {
    inner: Option<Arc<dyn BlockDevice>>,
    size_bytes: u64,
}

impl Padded {
    pub(crate) fn new(inner: Option<&Arc<dyn BlockDevice>>, size_bytes: u64) -> Arc<Self> {
        let inner = inner.cloned();
        Arc::new(Padded { inner, size_bytes })
    }

    /// How many of the bytes from an offset on the device has.
    fn inner_len_bytes(&self, offset_bytes: u64, len_bytes: u64) -> u64 {
        let size_bytes = self.inner.as_ref().map_or(0, |inner| inner.size_bytes());
        size_bytes.saturating_sub(offset_bytes).min(len_bytes)
    }

    fn read_only<T>() -> Io<T> {
        Io::ready(Err(Error::new(
            ErrorKind::ReadOnly,
            "write",
            "a backing file is not written to",
        )))
    }
}

impl BlockDevice for Padded {
    fn info(&self) -> DeviceInfo {
        let inner = self.inner.as_ref().map(|inner| inner.info());
        DeviceInfo {
            read_only: true,
            ..inner.unwrap_or_else(|| DeviceInfo {
                format: "raw",
                name: "zeroes".to_owned(),
                read_only: true,
                cluster_size_bytes: None,
                request_alignment_bytes: 1,
                discard_alignment_bytes: 1,
                has_zero_init: true,
                growable: false,
            })
        }
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, offset_bytes: u64, mut buffer: Buffer) -> Io<Buffer> {
        let there = self.inner_len_bytes(offset_bytes, buffer.len() as u64);
        let Some(inner) = self.inner.clone().filter(|_| there > 0) else {
            buffer.fill(0);
            return Io::ready(Ok(buffer));
        };
        if there == buffer.len() as u64 {
            return inner.read(offset_bytes, buffer);
        }
        Io::boxed(async move {
            let inside = buffer.split_to(there as usize);
            buffer.fill(0);
            let inside = inner.read(offset_bytes, inside).await?;
            Ok(Buffer::join_all([inside, buffer]))
        })
    }

    fn write(&self, _offset_bytes: u64, _buffer: Buffer, _flags: RequestFlags) -> Io<Buffer> {
        Self::read_only()
    }

    fn write_zeroes(&self, _offset_bytes: u64, _len_bytes: u64, _request: ZeroRequest) -> Io<()> {
        Self::read_only()
    }

    fn discard(&self, _offset_bytes: u64, _len_bytes: u64) -> Io<()> {
        Self::read_only()
    }

    fn flush(&self) -> Io<()> {
        Io::ready(Ok(()))
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
        let there = self.inner_len_bytes(offset_bytes, len_bytes);
        match self.inner.as_ref().filter(|_| there > 0) {
            Some(inner) => inner.block_status(offset_bytes, there, max_depth),
            None => Io::ready(Ok(Extent::new(len_bytes, ExtentKind::AbsentZero))),
        }
    }

    fn truncate(&self, _size_bytes: u64) -> Io<()> {
        Self::read_only()
    }

    fn close(&self) -> Io<()> {
        Io::ready(Ok(()))
    }
}
