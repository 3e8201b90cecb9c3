//! The care taken with a raw image whose format was only guessed.
//!
//! Invariant: whoever changes the first sector holds its lock from the look at what the sector will hold to
//! the end of the change; the guess looks at no other bytes.

use std::sync::Arc;

use async_lock::Mutex;
use vellum::Preallocation;
use vellum::{
    BlockDevice, Buffer, Error, ErrorKind, Io, RequestFlags, Result, ZeroRequest, delegate,
};
use vellum_io::spawn;

use crate::probe::{PROBE_BYTES, Probed, probe};

/// A raw device whose format was only guessed: a guest must not write a first
/// block that would make the next guess another one, and so gain the power to
/// name other files.
///
/// Invariant: whatever changes the first block holds its lock from before it looks at
/// what the block will hold until the change has ended, so no two changes that are harmless
/// each make a header together.
#[derive(Debug)]
pub struct ProbedRaw {
    inner: Arc<dyn BlockDevice>,
    first_block: Arc<Mutex<()>>,
}

/// The first block of a device, as it would be.
type Block = [u8; PROBE_BYTES];

impl ProbedRaw {
    /// Wraps a device.
    pub fn new(inner: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(ProbedRaw {
            inner,
            first_block: Arc::default(),
        })
    }

    /// Does what changes the first block if that is raw data afterwards. `edit` makes the
    /// change in a copy of the block; each of the blocks that it returns may be what it leads to.
    fn guarded<T: Send + 'static>(
        &self,
        edit: impl FnOnce(&mut Block) + Send + 'static,
        request: impl FnOnce(&dyn BlockDevice) -> Io<T> + Send + 'static,
    ) -> Io<T> {
        let (inner, first_block) = (self.inner.clone(), self.first_block.clone());
        Io::task(spawn(async move {
            let _held = first_block.lock().await;
            let mut block = read_block(&*inner).await?;
            edit(&mut block);
            if probe(&block) != Probed::Raw {
                return Err(refusal(&*inner));
            }
            request(&*inner).await
        }))
    }
}

/// The first block, followed by zeroes where the device is shorter: so it will be when
/// that grows.
async fn read_block(device: &dyn BlockDevice) -> Result<Block> {
    let mut block = [0; PROBE_BYTES];
    let there = device.size_bytes().min(PROBE_BYTES as u64) as usize;
    if there > 0 {
        let bytes = device.read(0, Buffer::for_read(there)).await?;
        block[..there].copy_from_slice(&bytes);
    }
    Ok(block)
}

fn refusal(device: &dyn BlockDevice) -> Error {
    let message = "Operation not permitted";
    Error::new(ErrorKind::PermissionDenied, "write", message)
        .target(device.info().name)
        .with_errno(libc::EPERM)
}

/// Whether a request of `len_bytes` at `offset_bytes` leaves the first block alone.
fn is_elsewhere(offset_bytes: u64, len_bytes: u64) -> bool {
    offset_bytes >= PROBE_BYTES as u64 || len_bytes == 0
}

/// The part of the first block that a range covers.
fn covered(offset_bytes: u64, len_bytes: u64) -> std::ops::Range<usize> {
    let end = offset_bytes
        .saturating_add(len_bytes)
        .min(PROBE_BYTES as u64);
    offset_bytes as usize..end as usize
}

impl BlockDevice for ProbedRaw {
    // What is not passed on and not guarded here is refused, by the trait's defaults.
    delegate!(
        inner: info, size_bytes, read, flush, block_status, close, backing, storage,
        identity, allocated_bytes,
    );

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        if is_elsewhere(offset_bytes, buffer.len() as u64) {
            return self.inner.write(offset_bytes, buffer, flags);
        }
        let range = covered(offset_bytes, buffer.len() as u64);
        let mut start = [0; PROBE_BYTES];
        start[..range.len()].copy_from_slice(&buffer[..range.len()]);
        self.guarded(
            move |block| {
                let len = range.len();
                block[range].copy_from_slice(&start[..len]);
            },
            move |inner| inner.write(offset_bytes, buffer, flags),
        )
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        if is_elsewhere(offset_bytes, len_bytes) {
            return self.inner.write_zeroes(offset_bytes, len_bytes, request);
        }
        self.guarded(
            move |block| block[covered(offset_bytes, len_bytes)].fill(0),
            move |inner| inner.write_zeroes(offset_bytes, len_bytes, request),
        )
    }

    /// It leaves the bytes, which are raw data, or zeroes.
    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        if is_elsewhere(offset_bytes, len_bytes) {
            return self.inner.discard(offset_bytes, len_bytes);
        }
        self.guarded(
            move |block| block[covered(offset_bytes, len_bytes)].fill(0),
            move |inner| inner.discard(offset_bytes, len_bytes),
        )
    }

    fn truncate(&self, size_bytes: u64) -> Io<()> {
        self.resize(size_bytes, Preallocation::Off)
    }

    /// What is cut off reads as zeroes when the device grows again.
    fn resize(&self, size_bytes: u64, preallocation: Preallocation) -> Io<()> {
        self.guarded(
            move |block| block[size_bytes.min(PROBE_BYTES as u64) as usize..].fill(0),
            move |inner| inner.resize(size_bytes, preallocation),
        )
    }
}
