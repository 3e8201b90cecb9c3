//! Storage in memory, for tests and for small images that never touch a disk.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::{Capabilities, Storage, WriteFlags, ZeroFlags};
use vellum_io::buffer::total_len;
use vellum_io::{Buffers, Io, Result};

/// Bytes in memory; every request completes at once.
#[derive(Debug)]
pub struct MemStorage {
    bytes: Mutex<Vec<u8>>,
    /// How many requests have changed something.
    changes: AtomicU64,
    name: String,
}

impl Default for MemStorage {
    fn default() -> Self {
        Self::with_bytes(Vec::new())
    }
}

impl MemStorage {
    /// An empty storage.
    pub fn new() -> Self {
        Self::default()
    }

    /// A storage holding `bytes`.
    pub fn with_bytes(bytes: Vec<u8>) -> Self {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        MemStorage {
            bytes: Mutex::new(bytes),
            changes: AtomicU64::new(0),
            name: format!("memory-{number}"),
        }
    }

    /// A copy of all bytes.
    pub fn snapshot(&self) -> Vec<u8> {
        self.lock().clone()
    }

    /// Overwrites bytes that are there as a disk does that fails: nobody is told.
    ///
    /// # Panics
    /// If the range does not lie inside of the storage.
    pub fn damage(&self, offset_bytes: u64, bytes: &[u8]) {
        let start = offset_bytes as usize;
        self.lock()[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock()
    }

    /// For a request that changes something.
    fn lock_for_change(&self) -> MutexGuard<'_, Vec<u8>> {
        self.changes.fetch_add(1, Ordering::Relaxed);
        self.bytes.lock()
    }
}

/// Grows the memory for a request; an empty one grows nothing.
fn grow(bytes: &mut Vec<u8>, start: usize, end: usize) {
    if start < end && bytes.len() < end {
        bytes.resize(end, 0);
    }
}

impl Storage for MemStorage {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            request_alignment_bytes: 1,
            memory_alignment_bytes: 1,
            can_punch: true,
            can_zero: true,
            has_zero_init: true,
            read_only: false,
            growable: true,
        }
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.lock().len() as u64)
    }

    fn modified_at(&self) -> Result<Option<u64>> {
        Ok(Some(self.changes.load(Ordering::Relaxed)))
    }

    fn read(&self, offset_bytes: u64, mut buffers: Buffers) -> Io<Buffers> {
        let bytes = self.lock();
        let mut at = offset_bytes as usize;
        for buffer in &mut buffers {
            let have = bytes.len().saturating_sub(at).min(buffer.len());
            buffer[..have].copy_from_slice(&bytes[at.min(bytes.len())..][..have]);
            buffer[have..].fill(0);
            at += buffer.len();
        }
        Io::ready(Ok(buffers))
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, _flags: WriteFlags) -> Io<Buffers> {
        let mut bytes = self.lock_for_change();
        let mut at = offset_bytes as usize;
        let end = at + total_len(&buffers) as usize;
        grow(&mut bytes, at, end);
        for buffer in &buffers {
            bytes[at..at + buffer.len()].copy_from_slice(buffer);
            at += buffer.len();
        }
        Io::ready(Ok(buffers))
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, _flags: ZeroFlags) -> Io<()> {
        let mut bytes = self.lock_for_change();
        let (start, end) = (offset_bytes as usize, (offset_bytes + len_bytes) as usize);
        if start == end {
            return Io::ready(Ok(()));
        }
        grow(&mut bytes, start, end);
        bytes[start..end].fill(0);
        Io::ready(Ok(()))
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let mut bytes = self.lock_for_change();
        let start = (offset_bytes as usize).min(bytes.len());
        let end = ((offset_bytes + len_bytes) as usize).min(bytes.len());
        bytes[start..end].fill(0);
        Io::ready(Ok(()))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        grow(
            &mut self.lock_for_change(),
            offset_bytes as usize,
            (offset_bytes + len_bytes) as usize,
        );
        Io::ready(Ok(()))
    }

    fn flush(&self) -> Io<()> {
        Io::ready(Ok(()))
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        self.lock_for_change().resize(len_bytes as usize, 0);
        Io::ready(Ok(()))
    }
}
