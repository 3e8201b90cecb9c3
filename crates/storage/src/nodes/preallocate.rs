//! [`PreallocateStorage`]: makes a file longer by large steps, so that the file
//! system is asked seldom (`preallocate`).
//!
//! Invariant: what lies beyond [`Storage::len_bytes`] was never written by anybody
//! and reads as zeroes; [`Storage::close`] gives it back.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::{BlockStatus, Storage, StorageExtent, WriteFlags, ZeroFlags, delegate};
use vellum_io::align::RangeLocks;
use vellum_io::buffer::total_len;
use vellum_io::{Buffers, Io, Result, spawn};

/// How much is made ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreallocateOptions {
    /// The file's length becomes a multiple of this.
    pub align_bytes: u64,
    /// So much is made beyond the end of a write.
    pub size_bytes: u64,
}

impl Default for PreallocateOptions {
    fn default() -> Self {
        PreallocateOptions {
            align_bytes: 1 << 20,
            size_bytes: 128 << 20,
        }
    }
}

#[derive(Debug)]
struct Ends {
    /// Where the data ends: the length that users see.
    data_bytes: u64,
    /// Where the file ends.
    file_bytes: u64,
    /// Nothing is made ahead any more: the storage could not.
    failed: bool,
}

#[derive(Debug)]
struct Core {
    inner: Arc<dyn Storage>,
    options: PreallocateOptions,
    ends: Mutex<Ends>,
    /// Held by the one who makes the file longer: what is made ahead is zeroed, and nobody may
    /// have data there meanwhile.
    growing: RangeLocks,
    /// Held by all whose data may lie beyond where it ends so far, who may wait for `growing` then.
    writing: Arc<RangeLocks>,
}

/// A storage whose file is made longer ahead of the writes.
#[derive(Debug)]
pub struct PreallocateStorage {
    inner: Arc<dyn Storage>,
    core: Arc<Core>,
}

impl PreallocateStorage {
    /// Makes the file of `inner` longer ahead of the writes.
    ///
    /// # Errors
    /// If `inner` cannot tell its length.
    pub fn new(inner: Arc<dyn Storage>, options: PreallocateOptions) -> Result<Self> {
        let len_bytes = inner.len_bytes()?;
        let core = Core {
            inner: inner.clone(),
            options,
            ends: Mutex::new(Ends {
                data_bytes: len_bytes,
                file_bytes: len_bytes,
                failed: !inner.capabilities().growable,
            }),
            growing: RangeLocks::default(),
            writing: Arc::default(),
        };
        Ok(PreallocateStorage {
            inner,
            core: Arc::new(core),
        })
    }
}

impl Core {
    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock()
    }

    /// Whether a request that ends at `end_bytes` makes the file longer.
    fn is_beyond(&self, end_bytes: u64) -> bool {
        end_bytes > self.ends().file_bytes
    }

    /// What must be made before a write that ends at `end_bytes`: from where to where.
    fn wanted(&self, end_bytes: u64) -> Option<(u64, u64)> {
        let mut ends = self.ends();
        if ends.failed || end_bytes <= ends.file_bytes {
            return None;
        }
        let to_bytes = end_bytes
            .saturating_add(self.options.size_bytes)
            .checked_next_multiple_of(self.options.align_bytes)
            .filter(|to_bytes| *to_bytes <= i64::MAX as u64);
        // Without room for it the write makes the file longer itself, and must meet nobody else
        // who does.
        ends.failed = to_bytes.is_none();
        Some((ends.file_bytes, to_bytes?))
    }

    /// Makes the file long enough for a write and for more.
    async fn make_room(&self, end_bytes: u64) {
        if !self.is_beyond(end_bytes) {
            return;
        }
        let _one = self.growing.lock_exclusive(0..1).await;
        let Some((from_bytes, to_bytes)) = self.wanted(end_bytes) else {
            return;
        };
        let flags = ZeroFlags {
            no_fallback: true,
            ..ZeroFlags::default()
        };
        let made = self
            .inner
            .write_zeroes(from_bytes, to_bytes - from_bytes, flags)
            .await;
        match made {
            Ok(()) => self.ends().file_bytes = to_bytes,
            // It was only for speed; the write itself tells what is wrong.
            Err(_) => self.ends().failed = true,
        }
    }

    /// Notes that a write has ended at `end_bytes`.
    fn written(&self, end_bytes: u64) {
        let mut ends = self.ends();
        ends.data_bytes = ends.data_bytes.max(end_bytes);
        ends.file_bytes = ends.file_bytes.max(end_bytes);
    }

    async fn give_back(&self) -> Result<()> {
        let _one = self.growing.lock_exclusive(0..1).await;
        let data_bytes = {
            let ends = self.ends();
            if ends.data_bytes == ends.file_bytes {
                return Ok(());
            }
            ends.data_bytes
        };
        self.inner.truncate(data_bytes).await?;
        self.ends().file_bytes = data_bytes;
        Ok(())
    }

    async fn truncate(&self, len_bytes: u64) -> Result<()> {
        let _alone = self.writing.lock_exclusive(0..1).await;
        let _one = self.growing.lock_exclusive(0..1).await;
        let Ends {
            data_bytes,
            file_bytes,
            ..
        } = *self.ends();
        if data_bytes < len_bytes.min(file_bytes) {
            // What was made ahead would stay, as a part of the data that takes space.
            self.inner.truncate(data_bytes).await?;
            self.ends().file_bytes = data_bytes;
        }
        self.inner.truncate(len_bytes).await?;
        let mut ends = self.ends();
        ends.data_bytes = len_bytes;
        ends.file_bytes = len_bytes;
        Ok(())
    }
}

impl Storage for PreallocateStorage {
    delegate!(inner: capabilities, name, discard, flush, allocated_bytes, free_bytes, disk);

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.core.ends().data_bytes)
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        self.inner.read(offset_bytes, buffers)
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let core = self.core.clone();
        Io::task(spawn(async move {
            let _writing = core.writing.lock_shared(0..1).await;
            let end_bytes = offset_bytes + total_len(&buffers);
            core.make_room(end_bytes).await;
            let buffers = core.inner.write(offset_bytes, buffers, flags).await?;
            core.written(end_bytes);
            Ok(buffers)
        }))
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        let core = self.core.clone();
        Io::task(spawn(async move {
            let _writing = core.writing.lock_shared(0..1).await;
            let end_bytes = offset_bytes + len_bytes;
            core.make_room(end_bytes).await;
            core.inner
                .write_zeroes(offset_bytes, len_bytes, flags)
                .await?;
            core.written(end_bytes);
            Ok(())
        }))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let core = self.core.clone();
        Io::task(spawn(async move {
            let _writing = core.writing.lock_shared(0..1).await;
            let end_bytes = offset_bytes + len_bytes;
            let _one = match core.is_beyond(end_bytes) {
                true => Some(core.growing.lock_exclusive(0..1).await),
                false => None,
            };
            core.inner.allocate(offset_bytes, len_bytes).await?;
            core.written(end_bytes);
            Ok(())
        }))
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        let core = self.core.clone();
        Io::task(spawn(async move { core.truncate(len_bytes).await }))
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        let inside = self.core.ends().data_bytes.saturating_sub(offset_bytes);
        match inside {
            0 => Io::ready(Ok(StorageExtent {
                status: BlockStatus::Hole,
                len_bytes,
            })),
            inside => self.inner.block_status(offset_bytes, len_bytes.min(inside)),
        }
    }

    fn close(&self) -> Io<()> {
        let core = self.core.clone();
        Io::task(spawn(async move {
            let given_back = core.give_back().await;
            core.inner.close().await.and(given_back)
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::wrap::{DelayStorage, Matching, Operation};
    use crate::{FileOptions, FileStorage, MemStorage};
    use vellum_io::Buffer;
    use vellum_io::lane::{self, block_on};

    fn bytes(value: u8) -> Buffers {
        Buffers::from_iter([Buffer::copy_of(&[value; 100])])
    }

    #[test]
    fn the_file_is_longer_than_its_data_until_it_is_closed() {
        let memory = Arc::new(MemStorage::new());
        let options = PreallocateOptions {
            align_bytes: 4096,
            size_bytes: 8192,
        };
        let storage = PreallocateStorage::new(memory.clone(), options).unwrap();
        let write = |offset: u64| {
            let buffers = Buffers::from_iter([Buffer::copy_of(&[1; 100])]);
            block_on(async { storage.write(offset, buffers, WriteFlags::default()).await })
                .unwrap();
        };
        write(0);
        assert_eq!(storage.len_bytes().unwrap(), 100);
        assert_eq!(memory.len_bytes().unwrap(), 12288);
        write(12000);
        assert_eq!(memory.len_bytes().unwrap(), 12288);
        write(12200);
        assert_eq!(memory.len_bytes().unwrap(), 24576);
        block_on(async { storage.truncate(50).await }).unwrap();
        assert_eq!(memory.len_bytes().unwrap(), 50);
        write(0);
        block_on(async { storage.close().await }).unwrap();
        assert_eq!(memory.snapshot(), [1; 100]);
    }

    #[test]
    fn what_is_allocated_while_the_file_grows_is_not_zeroed_later() {
        let memory = Arc::new(MemStorage::new());
        let delays = DelayStorage::new(memory.clone());
        let options = PreallocateOptions {
            align_bytes: 4096,
            size_bytes: 8192,
        };
        let storage = Arc::new(PreallocateStorage::new(delays.clone(), options).unwrap());
        block_on(async {
            let grown = delays.hold(Matching::operation(Operation::WriteZeroes));
            let first = storage.write(0, bytes(1), WriteFlags::default());
            grown.arrived().await;
            let beside = storage.clone();
            let second = spawn(async move {
                beside.allocate(0, 1 << 20).await.unwrap();
                let flags = WriteFlags::default();
                beside.write(4096, bytes(2), flags).await.unwrap();
            });
            // So long that the second one would be done if it did not wait.
            lane::sleep(Duration::from_millis(20)).await;
            grown.release();
            first.await.unwrap();
            second.await;
        });
        let file = memory.snapshot();
        assert_eq!(
            (&file[..100], &file[4096..4196]),
            (&[1; 100][..], &[2; 100][..])
        );
        assert_eq!(storage.len_bytes().unwrap(), 1 << 20);
    }

    #[test]
    fn what_was_made_ahead_does_not_stay_in_a_file_that_is_made_longer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "").unwrap();
        let options = FileOptions::default();
        let file: Arc<dyn Storage> = FileStorage::open(&path, &options).unwrap();
        let options = PreallocateOptions {
            align_bytes: 1 << 20,
            size_bytes: 8 << 20,
        };
        let storage = PreallocateStorage::new(file, options).unwrap();
        let taken = || storage.allocated_bytes().unwrap().unwrap();
        block_on(async {
            let one = Buffers::from_iter([Buffer::copy_of(&[1; 4096])]);
            storage.write(0, one, WriteFlags::default()).await.unwrap();
            assert!(taken() >= 8 << 20, "{}", taken());
            for len_bytes in [4 << 20, 32 << 20_u64] {
                storage.truncate(len_bytes).await.unwrap();
                assert!(taken() <= 1 << 20, "{}", taken());
                assert_eq!(std::fs::metadata(&path).unwrap().len(), len_bytes);
            }
            storage.close().await.unwrap();
        });
        assert_eq!(
            std::fs::read(&path).unwrap()[..4097],
            [&[1; 4096][..], &[0]].concat()
        );
    }
}
