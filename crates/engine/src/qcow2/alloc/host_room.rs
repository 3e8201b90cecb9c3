//! [`HostRoom`]: pieces of tables get room in the host's file system before anything in them
//! changes.
//!
//! Where nothing but zeroes was ever written to a table, it may be a hole in the file. If the
//! host is full, what changes there cannot be written: every flush would fail, also one of data
//! that was overwritten in place, and no discard would give room back, since a commit comes
//! before that. So whoever changes a piece that is all zeroes on disk has room set aside first,
//! and fails where there is none, with the commits still able to run.
//!
//! Where the storage cannot set room aside, or needs new room for every write (copy-on-write
//! file systems), a commit may still fail for want of room.
//!
//! Invariants:
//! - Setting room aside changes no byte of the file and no length, so it may run beside a commit.
//! - Who makes a table anew where another one was has that forgotten: its clusters may have been
//!   punched in between.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_format::geometry::Geometry;
use vellum_io::{ErrorKind, Result};
use vellum_storage::Storage;

/// Room is set aside for so many bytes at once, or for a cluster where that is smaller.
const MAX_CHUNK_BYTES: u64 = 64 << 10;
/// Chunks that are remembered. One of an L2 table maps at least 512 MiB of clusters of 64 KiB.
const REMEMBERED: usize = 64;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct HostRoom {
    chunk_bytes: u64,
    /// Where chunks begin that have their room, each in the place of its number; 0, where the
    /// header lies: none does.
    have: [AtomicU64; REMEMBERED],
}

impl HostRoom {
    /// For the tables of an image.
    pub(crate) fn new(geometry: &Geometry) -> HostRoom {
        HostRoom {
            chunk_bytes: geometry.cluster_size_bytes().min(MAX_CHUNK_BYTES),
            have: [const { AtomicU64::new(0) }; REMEMBERED],
        }
    }

    fn chunk_of(&self, offset_bytes: u64) -> u64 {
        offset_bytes / self.chunk_bytes * self.chunk_bytes
    }

    fn place(&self, chunk: u64) -> &AtomicU64 {
        &self.have[(chunk / self.chunk_bytes) as usize % REMEMBERED]
    }

    /// Whether what lies at `offset_bytes` is known to have its room.
    #[inline]
    pub(crate) fn is_there(&self, offset_bytes: u64) -> bool {
        let chunk = self.chunk_of(offset_bytes);
        self.place(chunk).load(Ordering::Relaxed) == chunk
    }

    /// Has room set aside for the chunk of `file` that `offset_bytes` lies in.
    ///
    /// # Errors
    /// As [`set_aside`].
    pub(crate) async fn set_aside(&self, file: &Arc<dyn Storage>, offset_bytes: u64) -> Result<()> {
        let chunk = self.chunk_of(offset_bytes);
        set_aside(file, chunk..chunk + self.chunk_bytes).await?;
        self.place(chunk).store(chunk, Ordering::Relaxed);
        Ok(())
    }

    /// Forgets what is known of a range: it has another use now.
    pub(crate) fn forget(&self, range: Range<u64>) {
        for chunk in (self.chunk_of(range.start)..range.end).step_by(self.chunk_bytes as usize) {
            let place = self.place(chunk);
            if place.load(Ordering::Relaxed) == chunk {
                place.store(0, Ordering::Relaxed);
            }
        }
    }
}

/// What the copy of a cluster of data takes at most, with a piece of a table that leads to it.
pub(crate) fn room_of_copy(geometry: &Geometry) -> u64 {
    let cluster_bytes = geometry.cluster_size_bytes();
    cluster_bytes + cluster_bytes.min(MAX_CHUNK_BYTES)
}

/// Has room set aside for a range of `file`, as far as the file reaches.
///
/// # Errors
/// [`ErrorKind::NoSpace`] where there is none. Whatever else the storage says means that it
/// cannot, and the write will tell.
pub(crate) async fn set_aside(file: &Arc<dyn Storage>, range: Range<u64>) -> Result<()> {
    let end = range.end.min(file.len_bytes()?);
    if range.start >= end {
        return Ok(());
    }
    match file.allocate(range.start, end - range.start).await {
        Err(error) if error.kind() == ErrorKind::NoSpace => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::lane::block_on;
    use vellum_storage::MemStorage;
    use vellum_storage::wrap::SmallStorage;

    use super::*;

    #[test]
    fn room_is_set_aside_once_until_it_is_forgotten() {
        let geometry = Geometry::new(3, 21, false, 4, false).expect("valid");
        let small = SmallStorage::new(Arc::new(MemStorage::with_bytes(vec![0; 164 << 10])));
        small.set_left_bytes(Some(68 << 10));
        let file: Arc<dyn Storage> = small.clone();
        let room = HostRoom::new(&geometry);
        let (first, second) = (64 << 10, 128 << 10);
        assert!(!room.is_there(first + 5000));
        block_on(room.set_aside(&file, first + 5000)).expect("there is room");
        assert!(room.is_there(second - 1) && !room.is_there(second));
        assert_eq!(small.left_bytes(), Some(4096));
        let full = block_on(room.set_aside(&file, second)).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::NoSpace);
        assert!(!room.is_there(second));
        // No further than to the end of the file.
        small.set_left_bytes(Some(36 << 10));
        block_on(room.set_aside(&file, second)).expect("there is room");
        assert_eq!(file.len_bytes().expect("a length"), 164 << 10);
        room.forget(first..first + 4096);
        assert!(!room.is_there(first + 5000) && room.is_there(second));
    }
}
