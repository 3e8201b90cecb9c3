//! [`RbdStorage`]: an image of a Ceph cluster as a storage.
//!
//! Invariant: `len_bytes` is at most `size_bytes`. What lies between them was never written, so it
//! reads as zeroes: an image that grows with its writes is made longer in large steps, each of
//! which all clients of the image are told of, and is as long as it should be when it is closed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_channel::oneshot;
use parking_lot::Mutex;
use vellum_io::buffer::total_len;
use vellum_io::{Buffers, Error, ErrorKind, Io, Result};
use vellum_storage::{
    BlockStatus, Capabilities, SourceVersion, Storage, StorageExtent, WriteFlags, ZeroFlags,
};

use super::completion::{Answer, Ask, submit};
use super::handle::{Image, Pool};
use super::known_runs::KnownRuns;
use super::options::RbdOptions;
use crate::beyond_end::BeyondEnd;
use crate::blocking;
use crate::failed_flush::FailedFlush;

/// How long opening, making and removing an image may take, the connection included.
const OPEN_LIMIT: Duration = Duration::from_secs(60);
/// An image that grows with its writes grows by so much at least, and by an eighth.
const GROWTH_BYTES: u64 = 64 << 20;
const MOST_GROWTH_BYTES: u64 = 1 << 30;
/// So many units of an image are asked for at once, as to which have data: a MiB of answers at most.
const WINDOW_UNITS: u64 = 1 << 16;

/// An image of a Ceph cluster.
#[derive(Debug)]
pub struct RbdStorage {
    shared: Arc<Shared>,
}

/// What requests hold.
#[derive(Debug)]
struct Shared {
    name: String,
    /// Of a snapshot: which one it is.
    version: Option<String>,
    writable: bool,
    image: Mutex<Option<Arc<Image>>>,
    closed: Mutex<Option<oneshot::Receiver<Result<()>>>>,
    /// How long it is for its users.
    len_bytes: AtomicU64,
    /// How long it is for Ceph.
    size_bytes: AtomicU64,
    /// One at a time changes the length.
    resizing: async_lock::Mutex<()>,
    /// The units of which it can be told whether they are there, if it can.
    diff_unit_bytes: Option<u64>,
    known: Mutex<KnownRuns>,
    /// Why a flush has failed: none succeeds after it (rule 11). librbd tells a loss once.
    failed_flush: FailedFlush,
}

impl RbdStorage {
    /// Connects to the cluster and opens the image.
    ///
    /// # Errors
    /// If there is no librbd here; if the cluster, the pool or the image cannot be had; if nobody
    /// answers in time.
    pub async fn open(options: RbdOptions) -> Result<Arc<Self>> {
        let name = options.name.clone();
        let writable = options.writable;
        let opened = blocking::run_within(OPEN_LIMIT, move || {
            let (image, closed) = Image::open(Pool::open(&options)?, &options)?;
            let size_bytes = image.size_bytes()?;
            let unit_bytes = match options.encryption {
                // Its objects have other offsets.
                Some(_) => None,
                None => image.diff_unit_bytes()?,
            };
            let snapshot = options.snapshot.as_deref();
            let version = snapshot.and_then(|snapshot| image.snapshot_id(snapshot));
            Ok((image, closed, size_bytes, unit_bytes, version))
        });
        let opened = opened.await.map_err(|error| error.target(&name));
        let (image, closed, size_bytes, diff_unit_bytes, version) = opened?;
        Ok(Arc::new(RbdStorage {
            shared: Arc::new(Shared {
                name,
                version,
                writable,
                image: Mutex::new(Some(image)),
                closed: Mutex::new(Some(closed)),
                len_bytes: AtomicU64::new(size_bytes),
                size_bytes: AtomicU64::new(size_bytes),
                resizing: async_lock::Mutex::new(()),
                diff_unit_bytes,
                known: Mutex::default(),
                failed_flush: FailedFlush::default(),
            }),
        }))
    }

    /// Begins a change of a range, or refuses it. The image grows first where it has to.
    fn change(
        &self,
        ask: Ask,
        operation: &'static str,
        end_bytes: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Io<Buffers> {
        let shared = self.shared.clone();
        if !shared.writable {
            return Io::ready(Err(shared.refuse(operation)));
        }
        if ask.is_empty(&buffers) {
            return Io::ready(Ok(buffers));
        }
        if end_bytes <= shared.size_bytes.load(Ordering::Acquire) && !fua {
            shared.len_bytes.fetch_max(end_bytes, Ordering::AcqRel);
            return waiting(shared.submit(ask, buffers));
        }
        Io::start(async move {
            shared.grow(end_bytes).await?;
            let buffers = shared.submit(ask, buffers)?.wait().await?;
            if fua {
                shared.clone().flush().await?;
            }
            Ok(buffers)
        })
    }
}

/// The image runs a request by itself: whoever waits for it needs no task.
fn waiting(answer: Result<Answer>) -> Io<Buffers> {
    match answer {
        Ok(answer) => Io::boxed(answer.wait()),
        Err(error) => Io::ready(Err(error)),
    }
}

fn nothing(_: Buffers) {}

/// Makes an image; `object_bytes`: its objects' size, a power of two.
///
/// # Errors
/// As [`RbdStorage::open`]; if there is one already.
pub async fn create_image(
    options: RbdOptions,
    size_bytes: u64,
    object_bytes: Option<u64>,
) -> Result<()> {
    let order = match object_bytes {
        Some(bytes) if !bytes.is_power_of_two() || bytes < 4096 => {
            let message = "the objects' size is a power of two, and 4 KiB at least";
            return Err(Error::new(ErrorKind::InvalidArgument, "create", message));
        }
        Some(bytes) => Some(bytes.trailing_zeros()),
        None => None,
    };
    let name = options.name.clone();
    let created = blocking::run_within(OPEN_LIMIT, move || {
        let pool = Pool::open(&options)?;
        pool.create(&options.image, size_bytes, order)
    });
    created.await.map_err(|error| error.target(name))
}

/// Removes an image.
///
/// # Errors
/// As [`RbdStorage::open`].
pub async fn remove_image(options: RbdOptions) -> Result<()> {
    blocking::run_within(OPEN_LIMIT, move || {
        Pool::open(&options)?.remove(&options.image)
    })
    .await
}

impl Shared {
    fn refuse(&self, operation: &'static str) -> Error {
        Error::new(ErrorKind::ReadOnly, operation, "the image is read-only").target(&self.name)
    }

    fn image(&self) -> Result<Arc<Image>> {
        let image = self.image.lock().clone();
        image.ok_or_else(|| {
            Error::new(ErrorKind::Io, "use", "the image is closed").target(&self.name)
        })
    }

    fn submit(&self, ask: Ask, buffers: Buffers) -> Result<Answer> {
        Ok(submit(self.image()?, ask, buffers))
    }

    /// Begins a flush.
    fn flush(self: Arc<Self>) -> Io<()> {
        if let Err(error) = self.failed_flush.check() {
            return Io::ready(Err(error));
        }
        let answer = self.submit(Ask::Flush, Buffers::new());
        Io::boxed(async move {
            let flushed = match answer {
                Ok(answer) => answer.wait().await.map(nothing),
                Err(error) => Err(error),
            };
            self.failed_flush.note(flushed)
        })
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Acquire)
    }

    /// Makes the image long enough for a write that ends at `end_bytes`.
    async fn grow(&self, end_bytes: u64) -> Result<()> {
        if end_bytes > self.size_bytes.load(Ordering::Acquire) {
            let turn = self.resizing.lock().await;
            let size_bytes = self.size_bytes.load(Ordering::Acquire);
            if end_bytes > size_bytes {
                let step = (end_bytes / 8).clamp(GROWTH_BYTES, MOST_GROWTH_BYTES);
                let wanted = end_bytes.saturating_add(step) / GROWTH_BYTES * GROWTH_BYTES;
                self.resize(wanted.max(end_bytes)).await?;
            }
            drop(turn);
        }
        self.len_bytes.fetch_max(end_bytes, Ordering::AcqRel);
        Ok(())
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        let image = self.image()?;
        image.note_change();
        let resized = image.clone();
        let result = blocking::run(move || resized.resize(size_bytes)).await;
        image.note_change();
        if result.is_ok() {
            self.size_bytes.store(size_bytes, Ordering::Release);
        }
        result
    }

    async fn truncate(&self, len_bytes: u64) -> Result<()> {
        let turn = self.resizing.lock().await;
        if self.len_bytes() != len_bytes || self.size_bytes.load(Ordering::Acquire) != len_bytes {
            self.resize(len_bytes).await?;
            self.len_bytes.store(len_bytes, Ordering::Release);
        }
        drop(turn);
        Ok(())
    }

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<StorageExtent> {
        let data = |end_bytes: u64| StorageExtent {
            status: BlockStatus::Data,
            len_bytes: end_bytes - offset_bytes,
        };
        let end_bytes = offset_bytes.saturating_add(len_bytes).min(self.len_bytes());
        if end_bytes <= offset_bytes {
            return Ok(StorageExtent {
                status: BlockStatus::Hole,
                len_bytes,
            });
        }
        let Some(unit_bytes) = self.diff_unit_bytes else {
            return Ok(data(end_bytes));
        };
        let image = self.image()?;
        let wanted = offset_bytes..end_bytes;
        let changes = image.changes();
        if let Some(found) = self.known.lock().find(&wanted, changes) {
            return Ok(found);
        }
        // Windows lie at fixed places, so that neighbours are found in one.
        let window_bytes = unit_bytes.saturating_mul(WINDOW_UNITS);
        let from = offset_bytes / window_bytes * window_bytes;
        let to = from
            .saturating_add(window_bytes)
            .min(self.size_bytes.load(Ordering::Acquire));
        let asked = image.clone();
        let Ok(runs) = blocking::run(move || asked.runs(from..to.max(from))).await else {
            // What cannot be told is data.
            return Ok(data(end_bytes));
        };
        let known = KnownRuns::new(from..to, runs, changes);
        let found = known.find(&wanted, changes);
        *self.known.lock() = known;
        Ok(found.unwrap_or(data(end_bytes)))
    }

    async fn close(&self) -> Result<()> {
        let len_bytes = self.len_bytes();
        let is_too_long = self.size_bytes.load(Ordering::Acquire) > len_bytes;
        let shortened = match is_too_long && self.image.lock().is_some() {
            true => self.truncate(len_bytes).await,
            false => Ok(()),
        };
        let image = self.image.lock().take();
        drop(image);
        let closed = self.closed.lock().take();
        let closed = match closed {
            // Requests that run end first.
            Some(closed) => closed.await.unwrap_or(Ok(())),
            None => Ok(()),
        };
        shortened
            .and(closed)
            .map_err(|error| error.target(&self.name))
    }
}

impl Storage for RbdStorage {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            can_punch: true,
            can_zero: true,
            has_zero_init: true,
            read_only: !self.shared.writable,
            growable: true,
            ..Capabilities::default()
        }
    }

    fn name(&self) -> &str {
        &self.shared.name
    }

    fn version(&self) -> SourceVersion {
        self.shared.version.clone().into()
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.shared.len_bytes())
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let len_bytes = self.shared.len_bytes();
        let end_bytes = offset_bytes.saturating_add(total_len(&buffers));
        if end_bytes == offset_bytes {
            return Io::ready(Ok(buffers));
        }
        if end_bytes <= len_bytes {
            return waiting(self.shared.submit(Ask::Read(offset_bytes), buffers));
        }
        let inside_bytes = len_bytes.saturating_sub(offset_bytes);
        let (inside, beyond) = BeyondEnd::split(buffers, inside_bytes);
        if inside_bytes == 0 {
            return Io::ready(Ok(beyond.join(inside)));
        }
        let answer = self.shared.submit(Ask::Read(offset_bytes), inside);
        Io::boxed(async move { Ok(beyond.join(answer?.wait().await?)) })
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let end_bytes = offset_bytes.saturating_add(total_len(&buffers));
        let ask = Ask::Write(offset_bytes);
        self.change(ask, "write", end_bytes, buffers, flags.fua)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        if flags.no_fallback && !flags.may_unmap {
            let message = "librbd writes zeroes out that must take space";
            let error = Error::new(ErrorKind::Unsupported, "write zeroes", message);
            return Io::ready(Err(error.target(self.name()).at(offset_bytes)));
        }
        let ask = Ask::Zero {
            offset_bytes,
            len_bytes,
            may_unmap: flags.may_unmap,
        };
        let end_bytes = offset_bytes.saturating_add(len_bytes);
        let begun = self.change(ask, "write zeroes", end_bytes, Buffers::new(), flags.fua);
        begun.map_buffers(nothing)
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let end_bytes = offset_bytes
            .saturating_add(len_bytes)
            .min(self.shared.len_bytes());
        if !self.shared.writable {
            return Io::ready(Err(self.shared.refuse("discard")));
        }
        let Some(len_bytes) = end_bytes.checked_sub(offset_bytes).filter(|&len| len > 0) else {
            return Io::ready(Ok(()));
        };
        let ask = Ask::Discard(offset_bytes, len_bytes);
        self.change(ask, "discard", end_bytes, Buffers::new(), false)
            .map_buffers(nothing)
    }

    fn flush(&self) -> Io<()> {
        let shared = self.shared.clone();
        match shared.writable {
            true => shared.flush(),
            false => Io::ready(Ok(())),
        }
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        let shared = self.shared.clone();
        if !shared.writable {
            return Io::ready(Err(shared.refuse("truncate")));
        }
        Io::start(async move { shared.truncate(len_bytes).await })
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        let shared = self.shared.clone();
        Io::start(async move { shared.status(offset_bytes, len_bytes).await })
    }

    fn close(&self) -> Io<()> {
        let shared = self.shared.clone();
        Io::start(async move { shared.close().await })
    }
}
