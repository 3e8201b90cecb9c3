//! [`SharingStorage`]: files in memory that share blocks, as those of XFS and btrfs do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{MemStorage, Storage, WriteFlags, delegate};
use vellum_io::buffer::total_len;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io};

const BLOCK_BYTES: u64 = 4096;

/// What all files of a file system did, and may do.
#[derive(Debug)]
pub struct ReflinkFileSystem {
    read_bytes: AtomicU64,
    shared_bytes: AtomicU64,
    granted: AtomicU64,
}

impl ReflinkFileSystem {
    /// A file system that grants so many requests to share blocks, and refuses the
    /// others.
    pub fn granting(requests: u64) -> Arc<Self> {
        Arc::new(ReflinkFileSystem {
            read_bytes: AtomicU64::new(0),
            shared_bytes: AtomicU64::new(0),
            granted: AtomicU64::new(requests),
        })
    }

    /// A new file with these bytes.
    pub fn file(self: &Arc<Self>, bytes: Vec<u8>) -> Arc<ReflinkStorage> {
        Arc::new(ReflinkStorage {
            memory: Arc::new(MemStorage::with_bytes(bytes)),
            system: self.clone(),
        })
    }

    /// How many bytes of its files have been read.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// How many bytes have been shared.
    pub fn shared_bytes(&self) -> u64 {
        self.shared_bytes.load(Ordering::Relaxed)
    }
}

/// A file of a [`ReflinkFileSystem`].
#[derive(Debug)]
pub struct ReflinkStorage {
    memory: Arc<MemStorage>,
    system: Arc<ReflinkFileSystem>,
}

impl Storage for ReflinkStorage {
    delegate!(
        memory: capabilities, name, len_bytes, write, write_zeroes, discard, allocate, flush,
        truncate, block_status,
    );

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let len_bytes = total_len(&buffers);
        self.system
            .read_bytes
            .fetch_add(len_bytes, Ordering::Relaxed);
        self.memory.read(offset_bytes, buffers)
    }

    fn may_clone_from(&self, _source: &dyn Storage) -> bool {
        self.system.granted.load(Ordering::Relaxed) > 0
    }

    fn clone_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        let in_blocks = (from_bytes | to_bytes | len_bytes).is_multiple_of(BLOCK_BYTES);
        let inside = source
            .len_bytes()
            .is_ok_and(|end| from_bytes + len_bytes <= end);
        let order = Ordering::Relaxed;
        let take = |granted: u64| granted.checked_sub(1);
        let taken = self.system.granted.fetch_update(order, order, take);
        if !in_blocks || !inside || len_bytes == 0 || taken.is_err() {
            let message = "these blocks are not shared";
            let error = Error::new(ErrorKind::Unsupported, "clone range", message);
            return Io::ready(Err(error.target(self.name())));
        }
        self.system.shared_bytes.fetch_add(len_bytes, order);
        let buffers = Buffers::from_iter([Buffer::zeroed(len_bytes as usize)]);
        let bytes = source.read(from_bytes, buffers);
        let (memory, system) = (self.memory.clone(), self.system.clone());
        Io::boxed(async move {
            let bytes = bytes.await?;
            // That was no read of the program's.
            system.read_bytes.fetch_sub(len_bytes, order);
            let written = memory.write(to_bytes, bytes, WriteFlags::default());
            written.await.map(drop)
        })
    }
}
