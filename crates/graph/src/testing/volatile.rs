//! A file that forgets what was not flushed when the power fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::{Error, Io};
use vellum_io::lane::yield_now;
use vellum_io::{Buffers, spawn};
use vellum_storage::{MemStorage, Storage, WriteFlags, ZeroFlags, delegate};

use super::world::SIZE_BYTES;

/// A file whose requests take their time, so that others come between. What was written is
/// durable once it is flushed.
#[derive(Debug, Clone)]
pub struct Volatile(pub Arc<Core>);

#[derive(Debug)]
pub struct Core {
    /// What is left when the program ends.
    memory: MemStorage,
    /// What is left when the power fails.
    durable: Mutex<Vec<u8>>,
    pub fails_reads: AtomicBool,
    pub fails_flushes: AtomicBool,
    pub fails_writes: AtomicBool,
    /// Writes that have begun do not land yet.
    pub holds_writes: AtomicBool,
    /// It was closed, and refuses what it is asked then.
    closed: AtomicBool,
}

impl Core {
    /// Makes a range durable, as a write with FUA does.
    fn keep(&self, range: std::ops::Range<u64>) {
        let bytes = self.memory.snapshot();
        let mut durable = self.durable.lock();
        let range = range.start as usize..range.end as usize;
        let len = durable.len().max(range.end);
        durable.resize(len, 0);
        durable[range.clone()].copy_from_slice(&bytes[range]);
    }
}

impl Volatile {
    /// A file that holds `bytes`, all of them durable.
    pub fn new(bytes: Vec<u8>) -> Volatile {
        Volatile(Arc::new(Core {
            memory: MemStorage::with_bytes(bytes.clone()),
            durable: Mutex::new(bytes),
            fails_reads: AtomicBool::new(false),
            fails_flushes: AtomicBool::new(false),
            fails_writes: AtomicBool::new(false),
            holds_writes: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }))
    }

    /// A file that holds an empty qcow2 image of [`SIZE_BYTES`].
    ///
    /// # Panics
    ///
    /// If the image cannot be made.
    pub async fn image() -> Volatile {
        let file = Arc::new(MemStorage::new());
        let options = CreateOptions::default().size_bytes(SIZE_BYTES);
        create(file.clone(), None, &options).await.unwrap();
        Volatile::new(file.snapshot())
    }

    fn late<T: 'static>(&self, begin: impl FnOnce(&Core) -> Io<T> + 'static) -> Io<T> {
        let core = self.0.clone();
        Io::task(spawn(async move {
            for _ in 0..2 {
                yield_now().await;
            }
            if core.closed.load(Ordering::SeqCst) {
                return Err(Error::from_errno("use", libc::ESHUTDOWN));
            }
            begin(&core).await
        }))
    }

    /// What is left of it: when the power fails, and when only the program ends.
    pub fn left(&self) -> [Vec<u8>; 2] {
        let durable = self.0.durable.lock().clone();
        [durable, self.0.memory.snapshot()]
    }
}

impl Storage for Volatile {
    delegate!(0.memory: capabilities, name, len_bytes, block_status);

    fn read(&self, at: u64, buffers: Buffers) -> Io<Buffers> {
        self.late(move |core| match core.fails_reads.load(Ordering::SeqCst) {
            true => Io::ready(Err(Error::from_errno("read", libc::EIO))),
            false => core.memory.read(at, buffers),
        })
    }

    fn write(&self, at: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let len_bytes = buffers.iter().map(|buffer| buffer.len() as u64);
        let end = at + len_bytes.sum::<u64>();
        let file = self.clone();
        let landed = move |core: &Core| {
            if core.fails_writes.load(Ordering::SeqCst) {
                return Io::ready(Err(Error::from_errno("write", libc::EIO)));
            }
            let written = core.memory.write(at, buffers, flags);
            if flags.fua {
                core.keep(at..end);
            }
            written
        };
        Io::task(spawn(async move {
            while file.0.holds_writes.load(Ordering::SeqCst) {
                yield_now().await;
            }
            file.late(landed).await
        }))
    }

    fn write_zeroes(&self, at: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        self.late(move |core| {
            let written = core.memory.write_zeroes(at, len_bytes, flags);
            if flags.fua {
                core.keep(at..at + len_bytes);
            }
            written
        })
    }

    fn discard(&self, at: u64, len_bytes: u64) -> Io<()> {
        self.late(move |core| core.memory.discard(at, len_bytes))
    }

    fn allocate(&self, at: u64, len_bytes: u64) -> Io<()> {
        self.late(move |core| core.memory.allocate(at, len_bytes))
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        self.late(move |core| core.memory.truncate(len_bytes))
    }

    fn flush(&self) -> Io<()> {
        self.late(|core| {
            if core.fails_flushes.load(Ordering::SeqCst) {
                return Io::ready(Err(Error::from_errno("flush", libc::EIO)));
            }
            *core.durable.lock() = core.memory.snapshot();
            Io::ready(Ok(()))
        })
    }

    fn close(&self) -> Io<()> {
        self.late(|core| {
            core.closed.store(true, Ordering::SeqCst);
            Io::ready(Ok(()))
        })
    }
}
