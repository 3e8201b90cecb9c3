//! [`WatchedStorage`]: notes how far into a storage its users write, and tells when a write
//! reaches beyond a threshold, so that whoever gives the storage its space can do so in time.
//!
//! Invariants:
//! - A threshold is told of once, before the write that reaches beyond it begins; then there is
//!   none until another one is set.
//! - Bytes pass as they are: the storage below is found through this one.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Storage, WriteFlags, ZeroFlags, delegate};
use vellum_io::buffer::total_len;
use vellum_io::shared_memory::SharedBuffer;
use vellum_io::{Buffers, Io};

/// A write that reaches beyond a threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThresholdExceeded {
    /// The offset that was set, in bytes.
    pub threshold_bytes: u64,
    /// How far beyond it the write ends, in bytes.
    pub exceeded_bytes: u64,
}

type Sink = dyn Fn(ThresholdExceeded) + Send + Sync;

/// What is noted of the changes of a storage. Plain numbers: no request waits for another one.
pub struct WriteWatch {
    highest_written: AtomicU64,
    /// Zero: none is set.
    threshold: AtomicU64,
    discards: AtomicU64,
    discarded_bytes: AtomicU64,
    sink: Box<Sink>,
}

impl fmt::Debug for WriteWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteWatch")
            .field("highest_written_bytes", &self.highest_written_bytes())
            .field("threshold_bytes", &self.threshold_bytes())
            .finish_non_exhaustive()
    }
}

impl WriteWatch {
    /// Nothing was written yet. `sink` hears of a threshold that is exceeded, on the lane of the
    /// write, which waits for it.
    pub fn new(sink: impl Fn(ThresholdExceeded) + Send + Sync + 'static) -> Arc<WriteWatch> {
        Arc::new(WriteWatch {
            highest_written: AtomicU64::new(0),
            threshold: AtomicU64::new(0),
            discards: AtomicU64::new(0),
            discarded_bytes: AtomicU64::new(0),
            sink: Box::new(sink),
        })
    }

    /// The offset in bytes behind which nothing was written.
    pub fn highest_written_bytes(&self) -> u64 {
        self.highest_written.load(Ordering::Relaxed)
    }

    /// How many ranges were given back, and how many bytes these are.
    pub fn discarded(&self) -> (u64, u64) {
        (
            self.discards.load(Ordering::Relaxed),
            self.discarded_bytes.load(Ordering::Relaxed),
        )
    }

    /// The threshold that is set, in bytes; 0 if there is none.
    pub fn threshold_bytes(&self) -> u64 {
        self.threshold.load(Ordering::Relaxed)
    }

    /// Sets a threshold in bytes in the place of the one that there is; 0 sets none.
    pub fn set_threshold_bytes(&self, threshold_bytes: u64) {
        self.threshold.store(threshold_bytes, Ordering::Relaxed);
    }

    fn write(&self, offset_bytes: u64, len_bytes: u64) {
        let end = offset_bytes.saturating_add(len_bytes);
        // Mostly it is only read, so that lanes do not take the line from each other.
        if end > self.highest_written.load(Ordering::Relaxed) {
            self.highest_written.fetch_max(end, Ordering::Relaxed);
        }
        let threshold_bytes = self.threshold.load(Ordering::Relaxed);
        if threshold_bytes != 0 && end > threshold_bytes {
            self.exceed(threshold_bytes, end);
        }
    }

    fn exceed(&self, threshold_bytes: u64, end: u64) {
        // Of those who are beyond it at the same time one tells.
        let taken = self.threshold.compare_exchange(
            threshold_bytes,
            0,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        if taken.is_ok() {
            (self.sink)(ThresholdExceeded {
                threshold_bytes,
                exceeded_bytes: end - threshold_bytes,
            });
        }
    }
}

/// A storage whose changes are noted in a [`WriteWatch`].
#[derive(Debug)]
pub struct WatchedStorage {
    inner: Arc<dyn Storage>,
    watch: Arc<WriteWatch>,
}

impl WatchedStorage {
    /// Has changes of `inner` that come this way be noted in `watch`.
    pub fn new(inner: Arc<dyn Storage>, watch: Arc<WriteWatch>) -> Arc<WatchedStorage> {
        Arc::new(WatchedStorage { inner, watch })
    }
}

impl Storage for WatchedStorage {
    delegate!(
        inner: capabilities, name, version, len_bytes, modified_at, read, read_into, allocate, flush, truncate,
        block_status, allocated_bytes, free_bytes, disk, may_clone_from, close, event_listener, transparent_storage,
    );

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        self.watch.write(offset_bytes, total_len(&buffers));
        self.inner.write(offset_bytes, buffers, flags)
    }

    fn write_from(
        &self,
        offset_bytes: u64,
        from: &[SharedBuffer],
        flags: WriteFlags,
    ) -> Option<Io<()>> {
        let io = self.inner.write_from(offset_bytes, from, flags)?;
        let len_bytes = from.iter().map(|piece| piece.len() as u64).sum();
        self.watch.write(offset_bytes, len_bytes);
        Some(io)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        self.watch.write(offset_bytes, len_bytes);
        self.inner.write_zeroes(offset_bytes, len_bytes, flags)
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.watch.discards.fetch_add(1, Ordering::Relaxed);
        self.watch
            .discarded_bytes
            .fetch_add(len_bytes, Ordering::Relaxed);
        self.inner.discard(offset_bytes, len_bytes)
    }

    fn copy_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        self.watch.write(to_bytes, len_bytes);
        self.inner
            .copy_range(source, from_bytes, to_bytes, len_bytes)
    }

    fn clone_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        self.watch.write(to_bytes, len_bytes);
        self.inner
            .clone_range(source, from_bytes, to_bytes, len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use vellum_io::Buffer;
    use vellum_io::lane::block_on;

    use super::*;
    use crate::MemStorage;

    fn write(storage: &WatchedStorage, offset_bytes: u64, len: usize) {
        let buffers = Buffers::from_iter([Buffer::zeroed(len)]);
        let io = storage.write(offset_bytes, buffers, WriteFlags::default());
        block_on(io).unwrap();
    }

    #[test]
    fn a_threshold_is_told_of_once_and_may_be_set_again() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let sink = told.clone();
        let watch = WriteWatch::new(move |exceeded| sink.lock().push(exceeded));
        let storage = WatchedStorage::new(Arc::new(MemStorage::new()), watch.clone());
        write(&storage, 0, 4096);
        assert_eq!(watch.highest_written_bytes(), 4096);
        watch.set_threshold_bytes(6000);
        write(&storage, 4096, 1904);
        assert!(told.lock().is_empty(), "it ends at the threshold");
        write(&storage, 5000, 1001);
        write(&storage, 9000, 1000);
        let first = ThresholdExceeded {
            threshold_bytes: 6000,
            exceeded_bytes: 1,
        };
        assert_eq!(*told.lock(), [first]);
        assert_eq!(watch.threshold_bytes(), 0);
        watch.set_threshold_bytes(512);
        let zeroes = storage.write_zeroes(0, 1024, ZeroFlags::default());
        block_on(zeroes).unwrap();
        assert_eq!(told.lock().len(), 2);
        assert_eq!(watch.highest_written_bytes(), 10000);
        block_on(storage.discard(0, 300)).unwrap();
        assert_eq!(watch.discarded(), (1, 300));
    }
}
