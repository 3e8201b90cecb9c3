//! A device that tells what was asked of it, and stalls if it is told to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vellum::{BlockDevice, Buffer, Io, RequestFlags, ZeroRequest, delegate};
use vellum_io::lane;

use super::guest::PATIENCE;

#[derive(Debug)]
pub struct Seen {
    device: Arc<dyn BlockDevice>,
    writes: AtomicUsize,
    durable: AtomicUsize,
    flushes: AtomicUsize,
    stalls: Arc<AtomicBool>,
    /// Flushes stall, too.
    is_dead: AtomicBool,
}

impl Seen {
    pub fn around(device: Arc<dyn BlockDevice>) -> Seen {
        Seen {
            device,
            writes: AtomicUsize::new(0),
            durable: AtomicUsize::new(0),
            flushes: AtomicUsize::new(0),
            stalls: Arc::default(),
            is_dead: AtomicBool::new(false),
        }
    }

    pub fn that_stalls(device: Arc<dyn BlockDevice>) -> Seen {
        let seen = Seen::around(device);
        seen.stalls.store(true, Ordering::SeqCst);
        seen
    }

    pub fn durable_writes(&self) -> usize {
        self.durable.load(Ordering::SeqCst)
    }

    pub fn flushes(&self) -> usize {
        self.flushes.load(Ordering::SeqCst)
    }

    pub fn writes(&self) -> usize {
        self.writes.load(Ordering::SeqCst)
    }

    pub fn wait_for_writes(&self, count: usize) {
        let begin = Instant::now();
        while self.writes() < count {
            assert!(begin.elapsed() < PATIENCE, "no write came");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A request that does nothing, once it may go on.
    fn wait_and<T: 'static>(&self, result: T) -> Io<T> {
        let stalls = self.stalls.clone();
        Io::task(vellum_io::spawn(async move {
            while stalls.load(Ordering::SeqCst) {
                lane::sleep(Duration::from_millis(1)).await;
            }
            Ok(result)
        }))
    }

    /// From now on nothing is done, as after a kill.
    pub fn stall(&self) {
        self.stalls.store(true, Ordering::SeqCst);
        self.is_dead.store(true, Ordering::SeqCst);
    }

    pub fn go_on(&self) {
        self.stalls.store(false, Ordering::SeqCst);
    }
}

impl BlockDevice for Seen {
    delegate!(device: info, size_bytes, read, discard, block_status, truncate, close);

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        self.writes.fetch_add(1, Ordering::SeqCst);
        self.durable
            .fetch_add(usize::from(flags.fua), Ordering::SeqCst);
        if !self.stalls.load(Ordering::SeqCst) {
            return self.device.write(offset_bytes, buffer, flags);
        }
        // A server that is killed writes nothing any more.
        self.wait_and(buffer)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.durable
            .fetch_add(usize::from(request.fua), Ordering::SeqCst);
        self.device.write_zeroes(offset_bytes, len_bytes, request)
    }

    fn flush(&self) -> Io<()> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        match self.is_dead.load(Ordering::SeqCst) {
            true => self.wait_and(()),
            false => self.device.flush(),
        }
    }
}
