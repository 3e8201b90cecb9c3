//! [`NullStorage`]: takes every write and forgets it (`null-co`, `null-aio`).

use std::time::Duration;

use crate::{BlockStatus, Capabilities, Storage, StorageExtent, WriteFlags, ZeroFlags};
use vellum_io::buffer::total_len;
use vellum_io::{Buffers, Error, ErrorKind, Io, Result, lane, spawn};

/// How a [`NullStorage`] behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NullOptions {
    /// Its length in bytes.
    pub size_bytes: u64,
    /// How long every request takes.
    pub latency: Duration,
    /// It is told that reads give zeroes. They do in any case.
    pub read_zeroes: bool,
    /// Writes are refused.
    pub read_only: bool,
}

impl Default for NullOptions {
    fn default() -> Self {
        NullOptions {
            size_bytes: 1 << 30,
            latency: Duration::ZERO,
            read_zeroes: false,
            read_only: false,
        }
    }
}

/// A storage of a fixed length that keeps nothing.
#[derive(Debug)]
pub struct NullStorage {
    name: String,
    options: NullOptions,
}

impl NullStorage {
    /// A storage called `name` in messages.
    pub fn new(name: impl Into<String>, options: NullOptions) -> Self {
        NullStorage {
            name: name.into(),
            options,
        }
    }

    fn done<T: 'static>(&self, value: T) -> Io<T> {
        let latency = self.options.latency;
        if latency.is_zero() {
            return Io::ready(Ok(value));
        }
        Io::task(spawn(async move {
            lane::sleep(latency).await;
            Ok(value)
        }))
    }

    fn change<T: 'static>(&self, end_bytes: u64, value: T) -> Io<T> {
        if end_bytes <= self.options.size_bytes {
            return self.done(value);
        }
        let error = Error::new(
            ErrorKind::OutOfRange,
            "write",
            "the range lies beyond the end",
        );
        Io::ready(Err(error.target(self.name.clone())))
    }
}

impl Storage for NullStorage {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            request_alignment_bytes: 1,
            memory_alignment_bytes: 1,
            can_punch: true,
            can_zero: true,
            has_zero_init: self.options.read_zeroes,
            read_only: self.options.read_only,
            growable: false,
        }
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.options.size_bytes)
    }

    fn read(&self, _offset_bytes: u64, mut buffers: Buffers) -> Io<Buffers> {
        // Buffers come from a pool: what is left there may be another disk's.
        buffers.iter_mut().for_each(|buffer| buffer.fill(0));
        self.done(buffers)
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, _flags: WriteFlags) -> Io<Buffers> {
        let end_bytes = offset_bytes.saturating_add(total_len(&buffers));
        self.change(end_bytes, buffers)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, _flags: ZeroFlags) -> Io<()> {
        self.change(offset_bytes.saturating_add(len_bytes), ())
    }

    fn discard(&self, _offset_bytes: u64, _len_bytes: u64) -> Io<()> {
        self.done(())
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.change(offset_bytes.saturating_add(len_bytes), ())
    }

    fn flush(&self) -> Io<()> {
        self.done(())
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        if len_bytes == self.options.size_bytes {
            return Io::ready(Ok(()));
        }
        let message = "Image format driver does not support resize";
        let error = Error::new(ErrorKind::Unsupported, "truncate", message);
        Io::ready(Err(error.target(self.name.clone())))
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        let inside = self.options.size_bytes.saturating_sub(offset_bytes);
        let (status, len_bytes) = match (inside, self.options.read_zeroes) {
            (0, _) => (BlockStatus::Hole, len_bytes),
            (inside, true) => (BlockStatus::Hole, len_bytes.min(inside)),
            (inside, false) => (BlockStatus::Data, len_bytes.min(inside)),
        };
        Io::ready(Ok(StorageExtent { status, len_bytes }))
    }

    fn allocated_bytes(&self) -> Result<Option<u64>> {
        Ok(Some(0))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use vellum_io::lane::block_on;
    use vellum_io::{Buffer, Buffers};

    #[test]
    fn writes_are_forgotten_and_reads_show_nothing_of_what_was_in_memory() {
        let zeroes = NullStorage::new(
            "null-co://",
            NullOptions {
                size_bytes: 4096,
                read_zeroes: true,
                ..NullOptions::default()
            },
        );
        let untold = NullStorage::new("null-co://", NullOptions::default());
        block_on(async {
            let ones = || Buffers::from_iter([Buffer::copy_of(&[1; 512])]);
            let flags = WriteFlags::default();
            zeroes.write(0, ones(), flags).await.unwrap();
            let read = zeroes.read(0, ones()).await.unwrap();
            assert!(read[0].is_zero());
            let read = untold.read(0, ones()).await.unwrap();
            assert!(read[0].is_zero());
            let beyond = zeroes.write(4096, ones(), flags).await.unwrap_err();
            assert_eq!(beyond.kind(), ErrorKind::OutOfRange);
            let extent = zeroes.block_status(0, 9999).await.unwrap();
            assert_eq!((extent.status, extent.len_bytes), (BlockStatus::Hole, 4096));
        });
        assert_eq!(untold.len_bytes().unwrap(), 1 << 30);
    }

    #[test]
    fn requests_take_their_time() {
        let slow = NullStorage::new(
            "null-aio://",
            NullOptions {
                latency: Duration::from_millis(20),
                ..NullOptions::default()
            },
        );
        let started = Instant::now();
        block_on(async { slow.flush().await }).unwrap();
        assert!(started.elapsed() >= Duration::from_millis(20));
    }
}
