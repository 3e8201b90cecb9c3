//! Where the bytes of a volume come from.
//!
//! Invariants:
//! - Nothing is read beyond the end of the volume, and so nothing of another partition.
//! - The cache holds [`CACHE_BYTES`] at most.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::{Error, Result};

/// What is read and kept at once, in bytes.
const PIECE_BYTES: usize = 16 << 10;
/// What is as long goes past the cache, in bytes: files, mostly.
const UNCACHED_BYTES: usize = 64 << 10;
/// Most that the cache holds, in bytes.
const CACHE_BYTES: usize = 16 << 20;

/// A disk.
pub trait ReadAt: Send + Sync {
    /// How long it is in bytes.
    fn len_bytes(&self) -> u64;

    /// Fills `bytes` with what lies at `offset_bytes`.
    ///
    /// # Errors
    /// What the system says; anything beyond the end.
    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()>;
}

impl ReadAt for Vec<u8> {
    fn len_bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
        let end = start.saturating_add(bytes.len());
        let found = self.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?;
        bytes.copy_from_slice(found);
        Ok(())
    }
}

/// A part of a disk, with a cache that all parts of it share.
#[derive(Clone)]
pub struct Source {
    disk: Arc<Disk>,
    start_bytes: u64,
    len_bytes: u64,
}

struct Disk {
    reader: Arc<dyn ReadAt>,
    cache: Mutex<Cache>,
}

/// Pieces by their number. What has not been asked for since `new` filled up twice is gone.
#[derive(Default)]
struct Cache {
    new: HashMap<u64, Arc<[u8]>>,
    old: HashMap<u64, Arc<[u8]>>,
}

impl Cache {
    fn get(&mut self, number: u64) -> Option<Arc<[u8]>> {
        if let Some(piece) = self.new.get(&number) {
            return Some(piece.clone());
        }
        let piece = self.old.remove(&number)?;
        self.insert(number, piece.clone());
        Some(piece)
    }

    fn insert(&mut self, number: u64, piece: Arc<[u8]>) {
        if self.new.len() >= CACHE_BYTES / PIECE_BYTES / 2 {
            self.old = std::mem::take(&mut self.new);
        }
        self.new.insert(number, piece);
    }
}

impl Disk {
    fn piece(&self, number: u64) -> Result<Arc<[u8]>> {
        if let Some(piece) = self.cache.lock().get(number) {
            return Ok(piece);
        }
        let start = number * PIECE_BYTES as u64;
        let len = (self.reader.len_bytes() - start).min(PIECE_BYTES as u64);
        let mut bytes = vec![0; len as usize];
        self.reader.read_at(start, &mut bytes)?;
        let piece: Arc<[u8]> = bytes.into();
        self.cache.lock().insert(number, piece.clone());
        Ok(piece)
    }
}

impl Source {
    /// All of a disk.
    pub fn new(reader: Arc<dyn ReadAt>) -> Source {
        let len_bytes = reader.len_bytes();
        Source {
            disk: Arc::new(Disk {
                reader,
                cache: Mutex::default(),
            }),
            start_bytes: 0,
            len_bytes,
        }
    }

    /// What of a part there is.
    pub fn part(&self, start_bytes: u64, len_bytes: u64) -> Source {
        let start_bytes = start_bytes.min(self.len_bytes);
        Source {
            disk: self.disk.clone(),
            start_bytes: self.start_bytes + start_bytes,
            len_bytes: len_bytes.min(self.len_bytes - start_bytes),
        }
    }

    /// How long it is in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Fills `bytes` with what lies at `offset_bytes`.
    ///
    /// # Errors
    /// Of kind [`Error::Io`]; [`Error::Damaged`] for what lies beyond the end.
    pub fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        let end = offset_bytes.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.len_bytes) {
            return Err(Error::damaged("what leads beyond the end", offset_bytes));
        }
        let mut at = self.start_bytes + offset_bytes;
        if bytes.len() >= UNCACHED_BYTES {
            return Ok(self.disk.reader.read_at(at, bytes)?);
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let piece = self.disk.piece(at / PIECE_BYTES as u64)?;
            let found = &piece[(at % PIECE_BYTES as u64) as usize..];
            let len = found.len().min(rest.len());
            let (now, later) = rest.split_at_mut(len);
            now.copy_from_slice(&found[..len]);
            (at, rest) = (at + len as u64, later);
        }
        Ok(())
    }

    /// `len` bytes at `offset_bytes`; what asks for them has made sure that it is not too many.
    ///
    /// # Errors
    /// As [`Source::read`].
    pub(crate) fn bytes(&self, offset_bytes: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read(offset_bytes, &mut bytes)?;
        Ok(bytes)
    }

    /// What there is of `len` bytes at the start.
    pub(crate) fn head(&self, len: usize) -> Result<Vec<u8>> {
        self.bytes(0, self.len_bytes.min(len as u64) as usize)
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source")
            .field("start_bytes", &self.start_bytes)
            .field("len_bytes", &self.len_bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_reads_what_the_disk_has_there_and_nothing_else() {
        let mut random = fastrand::Rng::with_seed(7);
        let disk: Vec<u8> = (0..40 << 20).map(|_| random.u8(..)).collect();
        let part = Source::new(Arc::new(disk.clone())).part(12_345, 39 << 20);
        for _ in 0..20_000 {
            let len = random.usize(..100);
            let at = random.usize(..(39 << 20) - len);
            let read = part.bytes(at as u64, len).expect("inside");
            assert!(read == disk[12_345 + at..][..len], "{at} {len}");
        }
        let cache = part.disk.cache.lock();
        assert!((cache.new.len() + cache.old.len()) * PIECE_BYTES <= CACHE_BYTES);
        drop(cache);
        part.bytes(39 << 20, 0).expect("nothing");
        part.bytes((39 << 20) - 1, 2).expect_err("beyond the end");
        part.bytes(u64::MAX, 2).expect_err("beyond the end");
    }
}
