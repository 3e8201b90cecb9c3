//! [`Recorder`]: tells bitmaps in memory what is written to a node, whoever writes it.
//!
//! A node is used as a device or as a storage, often as both; so there is a wrapper for each,
//! and both tell one recorder. Without a bitmap they cost a look at a flag before and behind each
//! change.
//!
//! Invariant: a change is noted before it is begun, and again when it has ended, before whoever
//! asked for it hears of that. So it is in a bitmap that was added or cleared while it ran, be that
//! the first one of the node, and also if nobody waits for it any more.

use std::any::Any;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use parking_lot::Mutex;
use vellum_io::shared_memory::SharedBuffer;
use vellum_io::{Buffers, Result, buffer, executor, spawn};
use vellum_storage::{WriteFlags, ZeroFlags};

use crate::qcow2::MemoryBitmap;
use crate::{BlockDevice, Buffer, Io, Preallocation, RequestFlags, Storage, ZeroRequest, delegate};

/// The bitmaps in memory of one node.
#[derive(Debug, Default)]
pub struct Recorder {
    /// Whether there is a bitmap.
    is_used: AtomicBool,
    bitmaps: Mutex<Vec<Arc<MemoryBitmap>>>,
}

impl Recorder {
    /// Without bitmaps.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// The bitmaps in the order in which they were added.
    pub fn bitmaps(&self) -> Vec<Arc<MemoryBitmap>> {
        self.bitmaps.lock().clone()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.bitmaps.lock().is_empty()
    }

    /// The bitmap of a name.
    pub fn find(&self, name: &str) -> Option<Arc<MemoryBitmap>> {
        let bitmaps = self.bitmaps.lock();
        let mut found = bitmaps.iter().filter(|one| one.name() == name);
        found.next().cloned()
    }

    /// Adds a bitmap, of a name that none of them has.
    pub fn add(&self, bitmap: Arc<MemoryBitmap>) {
        self.bitmaps.lock().push(bitmap);
        self.is_used.store(true, Ordering::Release);
    }

    /// Removes a bitmap.
    pub fn remove(&self, name: &str) {
        let mut bitmaps = self.bitmaps.lock();
        bitmaps.retain(|one| one.name() != name);
        self.is_used.store(!bitmaps.is_empty(), Ordering::Release);
    }

    /// Whether a request that begins now is to be noted.
    fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Acquire)
    }

    fn note(&self, range: &Range<u64>, size_bytes: u64) {
        for bitmap in &*self.bitmaps.lock() {
            bitmap.note(range, size_bytes);
        }
    }

    fn note_size(&self, size_bytes: u64) {
        for bitmap in &*self.bitmaps.lock() {
            bitmap.set_size(size_bytes);
        }
    }
}

/// The range of a request.
fn range(offset_bytes: u64, len_bytes: u64) -> Range<u64> {
    offset_bytes..offset_bytes.saturating_add(len_bytes)
}

/// Notes a change when it has ended.
fn ended<T: 'static>(change: Io<T>, note: impl FnOnce(bool) + 'static) -> Io<T> {
    if change.is_ready() {
        note(true);
        return change;
    }
    Io::start(async move {
        let changed = change.await;
        note(changed.is_ok());
        changed
    })
}

/// A change that was begun while there was no bitmap: noted when it has ended, without a task of its
/// own, as most end without a bitmap too.
struct Unrecorded<T: 'static, N: FnOnce() + 'static> {
    /// What runs, and what notes it.
    running: Option<(Io<T>, N)>,
}

impl<T: 'static, N: FnOnce() + 'static> Unrecorded<T, N> {
    fn watch(change: Io<T>, note: N) -> Io<T> {
        if change.is_ready() {
            note();
            return change;
        }
        let running = Some((change, note));
        Io::boxed(Unrecorded { running })
    }
}

impl<T: 'static, N: FnOnce() + 'static> Unpin for Unrecorded<T, N> {}

impl<T: 'static, N: FnOnce() + 'static> Future for Unrecorded<T, N> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        let Some((change, _)) = &mut self.running else {
            return Poll::Pending;
        };
        let changed = ready!(Pin::new(change).poll(context));
        if let Some((_, note)) = self.running.take() {
            note();
        }
        Poll::Ready(changed)
    }
}

impl<T: 'static, N: FnOnce() + 'static> Drop for Unrecorded<T, N> {
    fn drop(&mut self) {
        // Rule 10: it runs on. Where the executor goes as well nobody could tell when it has ended.
        if let Some((change, note)) = self.running.take()
            && executor::is_entered()
        {
            drop(spawn(async move {
                drop(change.await);
                note();
            }));
        }
    }
}

/// A device, changes of which are told to a recorder.
#[derive(Debug)]
pub struct RecordedDevice {
    device: Arc<dyn BlockDevice>,
    recorder: Arc<Recorder>,
}

impl RecordedDevice {
    /// Tells `recorder` what is changed through the result.
    pub fn new(device: Arc<dyn BlockDevice>, recorder: Arc<Recorder>) -> Arc<Self> {
        Arc::new(RecordedDevice { device, recorder })
    }

    fn change<T: 'static>(&self, range: Range<u64>, begin: impl FnOnce() -> Io<T>) -> Io<T> {
        if !self.recorder.is_used() {
            return self.watch(range, begin());
        }
        let (device, recorder) = (self.device.clone(), self.recorder.clone());
        recorder.note(&range, device.size_bytes());
        ended(begin(), move |_| {
            recorder.note(&range, device.size_bytes());
        })
    }

    /// Has a change noted that was begun without a bitmap, if there is one by its end.
    fn watch<T: 'static>(&self, range: Range<u64>, change: Io<T>) -> Io<T> {
        let (device, recorder) = (self.device.clone(), self.recorder.clone());
        Unrecorded::watch(change, move || {
            if recorder.is_used() {
                recorder.note(&range, device.size_bytes());
            }
        })
    }

    fn change_size(&self, begin: impl FnOnce() -> Io<()>) -> Io<()> {
        let (device, recorder) = (self.device.clone(), self.recorder.clone());
        ended(begin(), move |_| recorder.note_size(device.size_bytes()))
    }
}

impl BlockDevice for RecordedDevice {
    delegate!(
        device: info, size_bytes, read, read_into, copy_up, flush, block_status, close, backing, storage,
        format_device, identity, allocated_bytes,
    );

    fn stands_for(&self) -> Option<Arc<dyn BlockDevice>> {
        self.device.stands_for()
    }

    fn transparent_device(&self) -> Option<&dyn Any> {
        self.device.transparent_device()
    }

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        let range = range(offset_bytes, buffer.len() as u64);
        self.change(range, || self.device.write(offset_bytes, buffer, flags))
    }

    fn write_from(
        &self,
        offset_bytes: u64,
        from: &[SharedBuffer],
        flags: RequestFlags,
    ) -> Option<Io<()>> {
        if !self.recorder.is_used() {
            let begun = self.device.write_from(offset_bytes, from, flags)?;
            let len_bytes = from.iter().map(|buffer| buffer.len() as u64).sum();
            return Some(self.watch(range(offset_bytes, len_bytes), begun));
        }
        // Whoever asks copies the bytes, and comes again.
        None
    }

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Io<Buffer> {
        let range = range(offset_bytes, buffer.len() as u64);
        self.change(range, || {
            self.device.write_compressed(offset_bytes, buffer, flags)
        })
    }

    fn write_in_order(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        let range = range(offset_bytes, buffer.len() as u64);
        self.change(range, || self.device.write_in_order(offset_bytes, buffer))
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.change(range(offset_bytes, len_bytes), || {
            self.device.write_zeroes(offset_bytes, len_bytes, request)
        })
    }

    fn write_zeroes_in_order(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        request: ZeroRequest,
    ) -> Io<()> {
        self.change(range(offset_bytes, len_bytes), || {
            self.device
                .write_zeroes_in_order(offset_bytes, len_bytes, request)
        })
    }

    fn write_shared(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        source: Arc<dyn Storage>,
        from_bytes: u64,
    ) -> Io<()> {
        self.change(range(offset_bytes, len_bytes), || {
            self.device
                .write_shared(offset_bytes, len_bytes, source, from_bytes)
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.change(range(offset_bytes, len_bytes), || {
            self.device.discard(offset_bytes, len_bytes)
        })
    }

    fn clear(&self) -> Io<()> {
        self.change(0..self.device.size_bytes(), || self.device.clear())
    }

    fn truncate(&self, size_bytes: u64) -> Io<()> {
        self.change_size(|| self.device.truncate(size_bytes))
    }

    fn resize(&self, size_bytes: u64, preallocation: Preallocation) -> Io<()> {
        self.change_size(|| self.device.resize(size_bytes, preallocation))
    }
}

/// A storage, changes of which are told to a recorder.
#[derive(Debug)]
pub struct RecordedStorage {
    storage: Arc<dyn Storage>,
    recorder: Arc<Recorder>,
}

impl RecordedStorage {
    /// Tells `recorder` what is changed through the result.
    pub fn new(storage: Arc<dyn Storage>, recorder: Arc<Recorder>) -> Arc<Self> {
        Arc::new(RecordedStorage { storage, recorder })
    }

    fn change<T: 'static>(&self, range: Range<u64>, begin: impl FnOnce() -> Io<T>) -> Io<T> {
        if !self.recorder.is_used() {
            return self.watch(range, begin());
        }
        let (storage, recorder) = (self.storage.clone(), self.recorder.clone());
        recorder.note(&range, size_of(&*storage));
        ended(begin(), move |_| {
            recorder.note(&range, size_of(&*storage));
        })
    }

    /// Has a change noted that was begun without a bitmap, if there is one by its end.
    fn watch<T: 'static>(&self, range: Range<u64>, change: Io<T>) -> Io<T> {
        let (storage, recorder) = (self.storage.clone(), self.recorder.clone());
        Unrecorded::watch(change, move || {
            if recorder.is_used() {
                recorder.note(&range, size_of(&*storage));
            }
        })
    }

    fn change_size(&self, begin: impl FnOnce() -> Io<()>) -> Io<()> {
        let (storage, recorder) = (self.storage.clone(), self.recorder.clone());
        ended(begin(), move |changed| match size_of(&*storage) {
            size_bytes if changed && size_bytes > 0 => recorder.note_size(size_bytes),
            _ => {}
        })
    }
}

/// Its size as that of a device: whole sectors. 0 if it cannot tell, which changes no bitmap.
fn size_of(storage: &dyn Storage) -> u64 {
    storage
        .len_bytes()
        .map_or(0, |len| len.next_multiple_of(512))
}

impl Storage for RecordedStorage {
    vellum_storage::delegate!(
        storage: capabilities, name, version, len_bytes, modified_at, read, read_into, flush, block_status,
        allocated_bytes, free_bytes, disk, may_clone_from, close, event_listener, transparent_storage,
    );

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let range = range(offset_bytes, buffer::total_len(&buffers));
        self.change(range, || self.storage.write(offset_bytes, buffers, flags))
    }

    fn write_from(
        &self,
        offset_bytes: u64,
        from: &[SharedBuffer],
        flags: WriteFlags,
    ) -> Option<Io<()>> {
        if !self.recorder.is_used() {
            let begun = self.storage.write_from(offset_bytes, from, flags)?;
            let len_bytes = from.iter().map(|buffer| buffer.len() as u64).sum();
            return Some(self.watch(range(offset_bytes, len_bytes), begun));
        }
        None
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        self.change(range(offset_bytes, len_bytes), || {
            self.storage.write_zeroes(offset_bytes, len_bytes, flags)
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.change(range(offset_bytes, len_bytes), || {
            self.storage.discard(offset_bytes, len_bytes)
        })
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.change_size(|| self.storage.allocate(offset_bytes, len_bytes))
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        self.change_size(|| self.storage.truncate(len_bytes))
    }

    fn copy_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        self.change(range(to_bytes, len_bytes), || {
            self.storage
                .copy_range(source, from_bytes, to_bytes, len_bytes)
        })
    }

    fn clone_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        self.change(range(to_bytes, len_bytes), || {
            self.storage
                .clone_range(source, from_bytes, to_bytes, len_bytes)
        })
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::lane::block_on;
    use vellum_storage::MemStorage;

    use super::*;
    use crate::{Raw, RawOptions};

    #[test]
    fn whoever_writes_is_noted() {
        block_on(async {
            let memory = Arc::new(MemStorage::new());
            memory.truncate(1 << 20).await.unwrap();
            let recorder = Recorder::new();
            let storage = RecordedStorage::new(memory, recorder.clone());
            let device = Raw::open(storage.clone(), RawOptions::default()).unwrap();
            let bitmap = MemoryBitmap::new("b", 1 << 20, 4096, true);
            let ones = || Buffer::copy_of(&[1; 512]);
            device
                .write(0, ones(), RequestFlags::default())
                .await
                .unwrap();
            recorder.add(bitmap.clone());
            device
                .write(8192, ones(), RequestFlags::default())
                .await
                .unwrap();
            let all = Buffers::from_iter([ones(), ones()]);
            storage
                .write(65_024, all, WriteFlags::default())
                .await
                .unwrap();
            device.discard(1 << 19, 4096).await.unwrap();
            let zeroes = ZeroRequest::default();
            device.write_zeroes(1 << 18, 1, zeroes).await.unwrap();
            let dirty: Vec<_> = bitmap.read().ranges().collect();
            assert_eq!(
                dirty,
                [
                    8192..12_288,
                    61_440..69_632,
                    1 << 18..(1 << 18) + 4096,
                    1 << 19..(1 << 19) + 4096
                ]
            );
            storage.truncate(8192 + 512).await.unwrap();
            assert_eq!(bitmap.read().dirty_bytes(), 512);
            recorder.remove("b");
            device
                .write(0, ones(), RequestFlags::default())
                .await
                .unwrap();
            assert_eq!(bitmap.read().dirty_bytes(), 512);
        });
    }
}
