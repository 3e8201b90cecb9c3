//! A file on another machine, as far as a cache sees it: bytes that come late, or not at all.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vellum_io::buffer::total_len;
use vellum_io::lane::sleep;
use vellum_io::{Buffers, Error, ErrorKind, Io, Result};
use vellum_storage::{Storage, WriteFlags, ZeroFlags};

pub const BLOCK: u64 = 64 << 10;

#[derive(Debug)]
pub struct Below {
    pub bytes: Vec<u8>,
    pub fetched_bytes: AtomicU64,
    /// Each read, in its order.
    pub reads: Mutex<Vec<(u64, u64)>>,
    pub is_away: AtomicBool,
    pub is_changed: AtomicBool,
    pub delay: Duration,
}

impl Below {
    pub fn new(bytes: Vec<u8>) -> Arc<Below> {
        Self::slow(bytes, Duration::ZERO)
    }

    pub fn slow(bytes: Vec<u8>, delay: Duration) -> Arc<Below> {
        Arc::new(Below {
            bytes,
            fetched_bytes: AtomicU64::new(0),
            reads: Mutex::default(),
            is_away: AtomicBool::new(false),
            is_changed: AtomicBool::new(false),
            delay,
        })
    }

    pub fn fetched_bytes(&self) -> u64 {
        self.fetched_bytes.load(Ordering::SeqCst)
    }

    fn copy(&self, offset: u64, mut buffers: Buffers) -> Result<Buffers> {
        let failed = |kind| Error::new(kind, "read", "no").target("below");
        if self.is_changed.load(Ordering::SeqCst) {
            return Err(failed(ErrorKind::Changed));
        }
        if self.is_away.load(Ordering::SeqCst) {
            return Err(failed(ErrorKind::Io));
        }
        let len = total_len(&buffers);
        let mut at = offset as usize;
        for buffer in &mut buffers {
            let end = (at + buffer.len()).min(self.bytes.len());
            let start = at.min(end);
            buffer[..end - start].copy_from_slice(&self.bytes[start..end]);
            buffer[end - start..].fill(0);
            at += buffer.len();
        }
        self.fetched_bytes.fetch_add(len, Ordering::SeqCst);
        self.reads.lock().unwrap().push((offset, len));
        Ok(buffers)
    }
}

/// A `Below` that several may have: the trait wants futures that own it.
#[derive(Debug, Clone)]
pub struct Shared(pub Arc<Below>);

impl Storage for Shared {
    fn name(&self) -> &str {
        "below"
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.0.bytes.len() as u64)
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let below = self.0.clone();
        Io::start(async move {
            if !below.delay.is_zero() {
                sleep(below.delay).await;
            }
            below.copy(offset_bytes, buffers)
        })
    }

    fn write(&self, _offset_bytes: u64, _buffers: Buffers, _flags: WriteFlags) -> Io<Buffers> {
        unreachable!("nobody writes to it")
    }

    fn write_zeroes(&self, _offset_bytes: u64, _len_bytes: u64, _flags: ZeroFlags) -> Io<()> {
        unreachable!("nobody writes to it")
    }

    fn flush(&self) -> Io<()> {
        unreachable!("nobody writes to it")
    }

    fn truncate(&self, _len_bytes: u64) -> Io<()> {
        unreachable!("nobody writes to it")
    }
}
