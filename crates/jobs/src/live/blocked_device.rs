//! A device for tests, of which requests can be held up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_listener::Event;
use vellum::{BlockDevice, Buffer, Io, Raw, RawOptions, RequestFlags, ZeroRequest, delegate};
use vellum_io::spawn;
use vellum_storage::MemStorage;

/// A device that is closed until somebody opens it: requests wait.
#[derive(Debug)]
pub(super) struct BlockedDevice {
    device: Arc<dyn BlockDevice>,
    is_open: AtomicBool,
    opened: Event,
}

impl BlockedDevice {
    pub(super) fn new(byte: u8, is_open: bool) -> Arc<BlockedDevice> {
        let file = Arc::new(MemStorage::with_bytes(vec![byte; 4096]));
        Arc::new(BlockedDevice {
            device: Raw::open(file, RawOptions::default()).expect("a device"),
            is_open: AtomicBool::new(is_open),
            opened: Event::new(),
        })
    }

    pub(super) fn open(&self) {
        self.is_open.store(true, Ordering::SeqCst);
        self.opened.notify(usize::MAX);
    }

    fn pass<T: 'static>(&self, begin: impl FnOnce(&dyn BlockDevice) -> Io<T> + 'static) -> Io<T> {
        if self.is_open.load(Ordering::SeqCst) {
            return begin(&*self.device);
        }
        let (device, opened) = (self.device.clone(), self.opened.listen());
        Io::task(spawn(async move {
            opened.await;
            begin(&*device).await
        }))
    }

    pub(super) async fn first_byte(&self) -> u8 {
        let read = self.device.read(0, Buffer::for_read(1));
        read.await.expect("a byte")[0]
    }
}

impl BlockDevice for BlockedDevice {
    delegate!(device: info, size_bytes, flush, block_status, truncate, close);
    fn read(&self, at: u64, buffer: Buffer) -> Io<Buffer> {
        self.pass(move |device| device.read(at, buffer))
    }
    fn write(&self, at: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        self.pass(move |device| device.write(at, buffer, flags))
    }
    fn write_zeroes(&self, at: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.pass(move |device| device.write_zeroes(at, len_bytes, request))
    }
    fn discard(&self, at: u64, len_bytes: u64) -> Io<()> {
        self.pass(move |device| device.discard(at, len_bytes))
    }
}
