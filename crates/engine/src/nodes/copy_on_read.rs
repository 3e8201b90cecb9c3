//! [`CopyOnRead`]: what is read from a backing file is written to the image, so
//! that it is read from there the next time (`copy-on-read`).
//!
//! Invariant: what is copied never undoes a write. A qcow2 image sees to that itself
//! ([`BlockDevice::copy_up`]), whoever writes to it. For other formats a copy holds the clusters it copies,
//! and every changing request that comes this way those that it touches; what others write to such a
//! device meanwhile may be undone.

use crate::qcow2::AsQcow2;
use std::ops::Range;
use std::sync::Arc;

use vellum_io::spawn;
use vellum_storage::{Event, EventListener};

use crate::qcow2::Qcow2;
use crate::{
    BlockDevice, Buffer, ErrorKind, ExtentKind, Io, RequestFlags, Result, ZeroRequest, delegate,
};
use vellum_io::range_lock::{Mode, RangeLock};

/// Copies are made in pieces of at most this size.
const MAX_COPY_BYTES: u64 = 1 << 20;

/// A device that keeps what is read through it.
#[derive(Debug)]
pub struct CopyOnRead {
    core: Arc<Core>,
}

#[derive(Debug)]
struct Core {
    device: Arc<dyn BlockDevice>,
    /// Copies are made of whole units of this.
    unit_bytes: u64,
    /// How many layers down from the device are copied from; `None` is all.
    layers: Option<u32>,
    /// What is read is kept; otherwise only what is fetched.
    keeps_reads: bool,
    ranges: Arc<RangeLock>,
    /// Who wants to be told of events.
    listener: Option<Arc<dyn EventListener>>,
}

impl CopyOnRead {
    /// Keeps in `device` what is read through the result. Data from deeper than
    /// `layers` layers below the device is passed through and not copied.
    pub fn new(device: Arc<dyn BlockDevice>, layers: Option<u32>) -> Arc<Self> {
        Self::with(device, layers, true)
    }

    /// Keeps in `device` only what is asked for by [`CopyOnRead::fetch`], and keeps these
    /// copies and what is written through the result apart.
    pub fn fetching(device: Arc<dyn BlockDevice>) -> Arc<Self> {
        Self::with(device, None, false)
    }

    fn with(device: Arc<dyn BlockDevice>, layers: Option<u32>, keeps_reads: bool) -> Arc<Self> {
        let subcluster = |image: &Qcow2| image.header().geometry().subcluster_size_bytes();
        let unit_bytes = device
            .as_qcow2()
            .map(subcluster)
            .or(device.info().cluster_size_bytes)
            .unwrap_or(4096);
        let listener = device.storage().and_then(|file| file.event_listener());
        Arc::new(CopyOnRead {
            core: Arc::new(Core {
                device,
                unit_bytes,
                layers,
                keeps_reads,
                ranges: Arc::default(),
                listener,
            }),
        })
    }

    /// Copies what of a range the device does not hold itself into it, in whole clusters.
    ///
    /// # Errors
    /// As [`BlockDevice::read`] and [`BlockDevice::write`] of the device.
    pub fn fetch(&self, range: Range<u64>) -> Io<()> {
        self.start(|core| async move { core.copy(range).await })
    }

    fn start<T: 'static, F>(&self, work: impl FnOnce(Arc<Core>) -> F) -> Io<T>
    where
        F: Future<Output = Result<T>> + 'static,
    {
        Io::task(spawn(work(self.core.clone())))
    }
}

impl Core {
    fn around(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start - range.start % self.unit_bytes;
        start..range.end.next_multiple_of(self.unit_bytes)
    }

    /// Reads a range in order: what lies in a layer below is copied into the device
    /// first, but not before all in front of it was read, so that a copy's events
    /// and failures meet only requests behind it.
    async fn read(&self, offset_bytes: u64, mut buffer: Buffer) -> Result<Buffer> {
        let end = offset_bytes.saturating_add(buffer.len() as u64);
        let mut pieces = Vec::new();
        let mut unread = offset_bytes;
        let mut at = offset_bytes;
        // What lies beyond the end is refused by the read itself.
        let copies = end <= self.device.size_bytes() && !self.device.info().read_only;
        while copies && at < end {
            let extent = self.device.block_status(at, end - at, 0).await?;
            let extent_end = end.min(at + extent.len_bytes.max(1));
            if !extent.kind.is_present() {
                if unread < at {
                    let front = buffer.split_to((at - unread) as usize);
                    pieces.push(self.device.read(unread, front).await?);
                    unread = at;
                }
                self.copy_if_there_is_room(at..extent_end).await?;
            }
            at = extent_end;
        }
        pieces.push(self.device.read(unread, buffer).await?);
        Ok(Buffer::join_all(pieces))
    }

    /// As [`Core::copy`]. What finds no room is read from where it is: a guest that only reads does not meet a
    /// full host. Who injects an error wants to see it.
    async fn copy_if_there_is_room(&self, range: Range<u64>) -> Result<()> {
        match self.copy(range).await {
            Err(error) if error.kind() == ErrorKind::NoSpace && self.listener.is_none() => Ok(()),
            copied => copied,
        }
    }

    async fn copy(&self, range: Range<u64>) -> Result<()> {
        let whole = self.around(&range);
        let whole = whole.start..whole.end.min(self.device.size_bytes());
        let mut at = whole.start;
        while at < whole.end {
            let piece = at..whole.end.min(at + MAX_COPY_BYTES.max(self.unit_bytes));
            at = piece.end;
            let _held = self.ranges.acquire(piece.clone(), Mode::Exclusive).await;
            self.copy_piece(piece).await?;
        }
        Ok(())
    }

    async fn copy_piece(&self, piece: Range<u64>) -> Result<()> {
        let mut at = piece.start;
        while at < piece.end {
            // Somebody may have written it while the range was waited for.
            let own = self.device.block_status(at, piece.end - at, 0).await?;
            let end = at + own.len_bytes.max(1);
            if !own.kind.is_present() {
                self.copy_run(at..end).await?;
            }
            at = end;
        }
        Ok(())
    }

    async fn copy_run(&self, run: Range<u64>) -> Result<()> {
        let mut at = run.start;
        while at < run.end {
            let below = self.device.block_status(at, run.end - at, u32::MAX).await?;
            let len_bytes = below.len_bytes.max(1);
            let within = |layers| below.kind.is_present() && below.depth <= layers;
            if self.layers.is_none_or(within) {
                if let Some(listener) = &self.listener {
                    listener.emit(Event::CorWrite).await;
                }
                match self.device.copy_up(at, len_bytes).await {
                    Err(error) if error.kind() == ErrorKind::Unsupported => {
                        self.copy_over(at, len_bytes, below.kind).await?;
                    }
                    copied => copied?,
                }
            }
            at += len_bytes;
        }
        Ok(())
    }

    /// Copies a run into a device that cannot do that itself.
    async fn copy_over(&self, offset_bytes: u64, len_bytes: u64, kind: ExtentKind) -> Result<()> {
        if !kind.needs_reading() {
            let request = ZeroRequest::default();
            let zeroed = self.device.write_zeroes(offset_bytes, len_bytes, request);
            return zeroed.await;
        }
        let buffer = Buffer::for_read(len_bytes as usize);
        let buffer = self.device.read(offset_bytes, buffer).await?;
        let flags = RequestFlags::default();
        self.device
            .write(offset_bytes, buffer, flags)
            .await
            .map(drop)
    }

    /// Holds what a changing request touches.
    async fn changing(&self, offset_bytes: u64, len_bytes: u64) -> impl Drop + use<> {
        let range = self.around(&(offset_bytes..offset_bytes.saturating_add(len_bytes)));
        self.ranges.acquire(range, Mode::Shared).await
    }
}

impl BlockDevice for CopyOnRead {
    delegate!(
        core.device: info, size_bytes, flush, block_status, truncate, resize, clear, close,
        backing, storage, format_device, identity, allocated_bytes,
    );

    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        if !self.core.keeps_reads {
            return self.core.device.read(offset_bytes, buffer);
        }
        self.start(|core| async move { core.read(offset_bytes, buffer).await })
    }

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        self.start(|core| async move {
            let _held = core.changing(offset_bytes, buffer.len() as u64).await;
            core.device.write(offset_bytes, buffer, flags).await
        })
    }

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Io<Buffer> {
        self.start(|core| async move {
            let _held = core.changing(offset_bytes, buffer.len() as u64).await;
            core.device
                .write_compressed(offset_bytes, buffer, flags)
                .await
        })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.start(|core| async move {
            let _held = core.changing(offset_bytes, len_bytes).await;
            core.device
                .write_zeroes(offset_bytes, len_bytes, request)
                .await
        })
    }

    fn copy_up(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.start(|core| async move {
            let _held = core.changing(offset_bytes, len_bytes).await;
            core.device.copy_up(offset_bytes, len_bytes).await
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.start(|core| async move {
            let _held = core.changing(offset_bytes, len_bytes).await;
            core.device.discard(offset_bytes, len_bytes).await
        })
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::lane::{block_on, yield_now};
    use vellum_io::sync::Event as GoAhead;
    use vellum_storage::MemStorage;

    use super::*;
    use crate::gate::DenyAll;
    use crate::nodes::Link;
    use crate::qcow2::Backing;
    use crate::qcow2::OpenOptions;
    use crate::qcow2::create::{CreateOptions, create};
    use crate::{Raw, RawOptions};

    async fn overlay() -> Arc<Qcow2> {
        let base = Arc::new(MemStorage::with_bytes(vec![7; 1 << 20]));
        overlay_of(Raw::open(base, RawOptions::default()).unwrap()).await
    }

    async fn overlay_of(base: Arc<dyn BlockDevice>) -> Arc<Qcow2> {
        overlay_with(base, CreateOptions::default()).await
    }

    async fn overlay_with(base: Arc<dyn BlockDevice>, options: CreateOptions) -> Arc<Qcow2> {
        let storage = Arc::new(MemStorage::new());
        let options = CreateOptions {
            size_bytes: 2 << 20,
            ..options
        };
        create(storage.clone(), None, &options).await.unwrap();
        let options = OpenOptions {
            backing: Backing::Given(base),
            ..OpenOptions::default()
        };
        Qcow2::open(storage, Arc::new(DenyAll), options)
            .await
            .unwrap()
    }

    #[test]
    fn what_was_read_is_held_afterwards_and_nothing_else() {
        block_on(async {
            let image = overlay().await;
            let device = CopyOnRead::new(image.clone(), None);
            let read = device.read(70_000, Buffer::zeroed(10)).await.unwrap();
            assert!(read.iter().all(|&byte| byte == 7));
            let own = |at: u64| {
                let image = image.clone();
                async move {
                    image
                        .block_status(at, 65536, 0)
                        .await
                        .unwrap()
                        .kind
                        .is_present()
                }
            };
            assert!(own(65536).await);
            assert!(!own(0).await && !own(131_072).await);
            // The zeroes beyond the end of the base are kept as such.
            device.read(1 << 20, Buffer::zeroed(65536)).await.unwrap();
            assert!(own(1 << 20).await);
        });
    }

    /// QEMU's test 197: nothing else of a cluster is copied, whichever of its subclusters are held.
    #[test]
    fn only_the_subclusters_that_were_read_are_held_afterwards() {
        block_on(async {
            let base = Arc::new(MemStorage::with_bytes(vec![7; 1 << 20]));
            let base = Raw::open(base, RawOptions::default()).unwrap();
            let options = CreateOptions::default().extended_l2(true);
            let image = overlay_with(base, options).await;
            let device = CopyOnRead::new(image.clone(), None);
            let mut own = Vec::new();
            for (at, len) in [(30 << 10, 4096), (1 << 10, 100), (63 << 10, 4096)] {
                let read = device.read(at, Buffer::zeroed(len)).await.unwrap();
                assert!(read.iter().all(|&byte| byte == 7));
                own.push((at & !2047)..(at + len as u64).next_multiple_of(2048));
                for place in (0..128 << 10).step_by(2048) {
                    let status = image.block_status(place, 2048, 0).await.unwrap();
                    let was_read = own.iter().any(|range| range.contains(&place));
                    assert_eq!(status.kind.is_present(), was_read, "{place:#x}: {own:?}");
                }
            }
            let all = image.read(0, Buffer::zeroed(1 << 20)).await.unwrap();
            assert!(all.iter().all(|&byte| byte == 7));
        });
    }

    #[test]
    fn copies_never_undo_writes() {
        block_on(async {
            let image = overlay().await;
            let device = CopyOnRead::new(image.clone(), None);
            let flags = RequestFlags::default();
            let mut requests = Vec::new();
            for at in 0..16_u64 {
                requests.push(device.write(at * 4096, Buffer::copy_of(&[1; 4096]), flags));
                requests.push(device.read(at * 65536, Buffer::zeroed(65536)));
                requests.push(device.read(0, Buffer::zeroed(65536)));
            }
            for request in requests {
                request.await.unwrap();
            }
            let read = image.read(0, Buffer::zeroed(65536)).await.unwrap();
            assert!(read.iter().all(|&byte| byte == 1));
            let status = image.block_status(0, 1 << 20, 0).await.unwrap();
            assert!(status.kind.is_present());
        });
    }

    /// A base whose reads end when they are told to.
    #[derive(Debug)]
    struct Slow(Arc<dyn BlockDevice>, Arc<GoAhead>);
    impl BlockDevice for Slow {
        delegate!(
            0: info, size_bytes, write, write_zeroes, discard, flush, block_status, truncate, close,
        );
        fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
            let (device, go) = (self.0.clone(), self.1.listen());
            Io::task(spawn(async move {
                go.await;
                device.read(offset_bytes, buffer).await
            }))
        }
    }

    #[test]
    fn what_others_write_to_the_image_while_it_is_copied_stays() {
        for is_zero in [false, true] {
            block_on(async {
                let go = Arc::new(GoAhead::new());
                let base = Arc::new(MemStorage::with_bytes(vec![7; 1 << 20]));
                let base = Raw::open(base, RawOptions::default()).unwrap();
                let image = overlay_of(Arc::new(Slow(base, go.clone()))).await;
                let device = CopyOnRead::new(Link::new(image.clone()), None);
                let read = device.read(0, Buffer::zeroed(512));
                for _ in 0..100 {
                    yield_now().await;
                }
                let changed = match is_zero {
                    true => image.write_zeroes(0, 1 << 16, ZeroRequest::default()),
                    false => {
                        let ones = Buffer::copy_of(&[1; 1 << 16]);
                        let write = image.write(0, ones, RequestFlags::default());
                        Io::start(async move { write.await.map(drop) })
                    }
                };
                let changed = spawn(changed);
                for _ in 0..100 {
                    yield_now().await;
                    go.notify(usize::MAX);
                }
                read.await.unwrap();
                changed.await.unwrap();
                let shown = image.read(0, Buffer::zeroed(1 << 16)).await.unwrap();
                let wanted = u8::from(!is_zero);
                assert!(shown.iter().all(|&byte| byte == wanted), "{is_zero}");
            });
        }
    }
}
