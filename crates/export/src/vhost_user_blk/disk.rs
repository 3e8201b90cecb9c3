//! What the queues of an export share: the device and what is said of it.
//!
//! Nothing here is locked: what requests need is read from numbers that hardly ever change.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use vellum::{BlockDevice, DiskIdentity, Io, Result, Storage};
use vellum_storage::AsFile;

use super::config::Geometry;
use super::options::Options;
use super::request::ID_BYTES;
use super::unflushed::Unflushed;
use crate::accounting::Accounting;
use crate::room::WhenFull;
use crate::unflushed_logs::{Overtaken, UnflushedLog};

/// Receives a line for each client or guest that breaks the protocol.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// What the client keeps for the next server, if there is a client that does.
#[derive(Debug)]
pub(super) struct Kept {
    /// Without what the disk does for the logs of others.
    device: Arc<dyn BlockDevice>,
    /// As [`Disk::keeps_writes`].
    keeps_writes: bool,
    unflushed: Mutex<Option<Arc<Unflushed>>>,
    pub(super) overtaken: Overtaken,
}

impl Kept {
    pub(super) fn set(&self, unflushed: Option<Arc<Unflushed>>) {
        *self.unflushed.lock() = unflushed;
    }

    /// Makes durable what was acknowledged, so that nobody has to write it again.
    ///
    /// # Errors
    /// As [`BlockDevice::flush`].
    pub(super) async fn flush(&self) -> Result<()> {
        let unflushed = self.unflushed.lock().clone();
        match unflushed.filter(|unflushed| !unflushed.is_flushed()) {
            Some(unflushed) => unflushed.flush(&*self.device).await,
            None => Ok(()),
        }
    }

    /// As [`Kept::flush`], also for writes that no log has: the client keeps no memory for them.
    ///
    /// # Errors
    /// As [`BlockDevice::flush`].
    pub(super) async fn flush_all(&self) -> Result<()> {
        let has_log = self.unflushed.lock().is_some();
        if has_log || !self.keeps_writes {
            return self.flush().await;
        }
        self.device.flush().await
    }
}

impl UnflushedLog for Kept {
    fn disk(&self) -> Option<DiskIdentity> {
        self.device.identity()
    }

    fn flush(self: Arc<Self>) -> Io<()> {
        Io::start(async move { Kept::flush(&self).await })
    }

    fn overtaken(&self) -> &Overtaken {
        &self.overtaken
    }
}

/// The device of an export.
pub(super) struct Disk {
    pub(super) device: Arc<dyn BlockDevice>,
    /// What was said of the device, but for what can change.
    fixed: Geometry,
    /// Every write is durable, whatever the guest says of the cache.
    writes_through: bool,
    pub(super) serial: [u8; ID_BYTES],
    /// How long a queue without requests looks for one before it sleeps.
    pub(super) poll_limit: Duration,
    /// What is written is kept in memory of the process before it is flushed; who the server is.
    pub(super) keeps_writes: bool,
    pub(super) kept: Arc<Kept>,
    pub(super) server: u64,
    pub(super) when_full: WhenFull,
    /// Counts what guests ask for.
    pub(super) accounting: Arc<Accounting>,
    size_bytes: AtomicU64,
    write_back: AtomicBool,
    log: Option<Log>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("geometry", &self.geometry())
            .finish_non_exhaustive()
    }
}

impl Disk {
    pub(super) fn new(device: Arc<dyn BlockDevice>, options: &Options, log: Option<Log>) -> Disk {
        let mut serial = [0; ID_BYTES];
        for (to, from) in serial.iter_mut().zip(options.serial.bytes()) {
            *to = from;
        }
        let fixed = Geometry {
            size_bytes: device.size_bytes(),
            logical_block_bytes: options.logical_block_bytes,
            discard_alignment_bytes: device.info().discard_alignment_bytes,
            queues: options.queues,
            read_only: options.read_only,
            write_back: true,
        };
        // What goes to a file as it is the kernel has at once.
        let is_file = |(storage, _): (Arc<dyn Storage>, u64)| storage.as_file().is_some();
        let keeps_writes =
            !options.read_only && !options.write_through && !device.bytes_in().is_some_and(is_file);
        let kept = Arc::new(Kept {
            device: device.clone(),
            keeps_writes,
            unflushed: Mutex::default(),
            overtaken: match keeps_writes {
                true => options.logs.await_log(),
                false => Overtaken::over(),
            },
        });
        let number = options.logs.new_export();
        if keeps_writes {
            let log: Weak<Kept> = Arc::downgrade(&kept);
            options.logs.add(number, log);
        }
        let device = match options.read_only {
            true => device,
            false => options.logs.others_flushed_with(number, device),
        };
        Disk {
            size_bytes: AtomicU64::new(fixed.size_bytes),
            write_back: AtomicBool::new(true),
            keeps_writes,
            kept,
            // Never that of memory that nobody had.
            server: RandomState::new().hash_one(0) | 1,
            accounting: Arc::new(Accounting::among(&options.fair_depth)),
            when_full: options.when_full,
            device,
            fixed,
            writes_through: options.write_through,
            serial,
            poll_limit: options.poll_limit,
            log,
        }
    }

    /// What the device is now.
    pub(super) fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: self.size_bytes.load(Ordering::Relaxed),
            write_back: self.write_back.load(Ordering::Relaxed),
            ..self.fixed
        }
    }

    /// Takes the device's size in; whether it is another one.
    pub(super) fn update_size(&self) -> bool {
        let size_bytes = self.device.size_bytes();
        self.size_bytes.swap(size_bytes, Ordering::Relaxed) != size_bytes
    }

    /// The guest switches its write cache.
    pub(super) fn set_write_back(&self, write_back: bool) {
        self.write_back.store(write_back, Ordering::Relaxed);
    }

    /// Whether a write is durable before it is answered, for a guest that cannot flush or can.
    pub(super) fn writes_through(&self, guest_flushes: bool) -> bool {
        self.writes_through || !guest_flushes || !self.write_back.load(Ordering::Relaxed)
    }

    /// Tells of what a client or guest has done.
    pub(super) fn log(&self, line: &str) {
        if let Some(log) = &self.log {
            log(line);
        }
    }
}
