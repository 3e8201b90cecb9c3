//! What becomes of requests for which a disk has no room: they fail ([`WhenFull::Fail`]), or wait
//! until there is some ([`WhenFull::Wait`]) and go on by themselves, as a machine does that its
//! monitor has stopped. [`PatientDevice`] stands between an export's client and the device.
//!
//! Invariants:
//! - Only what failed for want of room ([`ErrorKind::NoSpace`]) is tried again: a flush whose sync
//!   has failed is not ([`vellum::Error::of_failed_sync`]), nor is anything of an image that takes
//!   no more changes.
//! - Nothing is tried again for a client that is gone, whose next connection may have sent the same
//!   request once more, and written something else since.
//! - What waits holds nothing in the device: jobs, snapshots and other requests go on beside it.
//! - One of those that wait looks now and then whether there is room, so many cost no more than
//!   one.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use event_listener::Event;
use futures_util::future::select;
use parking_lot::Mutex;
use tracing::trace;
use vellum::{
    BlockDevice, Buffer, Error, ErrorKind, Io, RequestFlags, Result, SharedBuffer, ZeroRequest,
    delegate,
};
use vellum_io::lane;
use vellum_io::shared_memory::total_len;

use crate::accounting::{FailedRequest, Operation};

/// How soon somebody looks whether there is room; then less often.
const FIRST_LOOK: Duration = Duration::from_millis(20);
/// No less often, so that a client that is gone is noticed, too.
const LOOK: Duration = Duration::from_millis(500);

/// What becomes of a request for which the disk has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhenFull {
    /// It fails.
    #[default]
    Fail,
    /// It waits until there is room.
    Wait {
        /// Whatever is written is durable when it is answered.
        write_through: bool,
    },
}

impl WhenFull {
    /// What a client is to use in the place of `device`; `room` is its export's, and `goes_on`
    /// says whether it is still there.
    pub(crate) fn around(
        self,
        device: &Arc<dyn BlockDevice>,
        room: &Arc<Room>,
        goes_on: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Arc<dyn BlockDevice> {
        match self {
            WhenFull::Fail => device.clone(),
            WhenFull::Wait { write_through } => Arc::new(PatientDevice {
                device: device.clone(),
                write_through,
                client: Waiting {
                    room: room.clone(),
                    goes_on: Arc::new(goes_on),
                },
            }),
        }
    }
}

/// What is told of an export whose requests wait for room.
#[derive(Debug)]
pub enum RoomNotice<'a> {
    /// A request waits, and none did before.
    Full(FailedRequest<'a>),
    /// None waits any more.
    Again {
        /// Since the first has waited.
        waited: Duration,
    },
}

type Sink = dyn Fn(&RoomNotice<'_>) + Send + Sync;

/// Where the requests of an export wait for room.
#[derive(Default)]
pub(crate) struct Room {
    /// Since when somebody waits, and how many do.
    waiting: Mutex<Option<(Instant, u64)>>,
    waits: AtomicU64,
    /// One of them looks.
    looking: AtomicBool,
    found: Event,
    sink: OnceLock<Box<Sink>>,
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Room")
            .field("waiting", &self.waiting())
            .finish_non_exhaustive()
    }
}

impl Room {
    /// Has `sink` hear of it when requests wait, and when none does any more. The first one stays.
    pub(crate) fn on_notice(&self, sink: impl Fn(&RoomNotice<'_>) + Send + Sync + 'static) {
        let _ = self.sink.set(Box::new(sink));
    }

    /// How many requests wait.
    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.lock().map_or(0, |(_, count)| count)
    }

    /// How many have waited, those that wait still included.
    pub(crate) fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    fn tell(&self, notice: &RoomNotice<'_>) {
        if let Some(sink) = self.sink.get() {
            sink(notice);
        }
    }

    /// Counts a request that waits, until the result is dropped.
    fn enter(self: &Arc<Self>, operation: Operation, error: &Error) -> Place {
        self.waits.fetch_add(1, Ordering::Relaxed);
        let mut waiting = self.waiting.lock();
        let is_first = waiting.is_none();
        waiting.get_or_insert((lane::now(), 0)).1 += 1;
        drop(waiting);
        if is_first {
            let reason = error.to_string();
            trace!(name: "export_waits_for_room", room = ?Arc::as_ptr(self), reason);
            self.tell(&RoomNotice::Full(FailedRequest {
                operation,
                errno: error.errno(),
                reason: &reason,
            }));
        }
        Place(self.clone())
    }
}

/// A request that waits.
struct Place(Arc<Room>);

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiting = self.0.waiting.lock();
        let Some((since, count)) = &mut *waiting else {
            return;
        };
        let since = *since;
        *count -= 1;
        if *count > 0 {
            return;
        }
        *waiting = None;
        drop(waiting);
        let waited = lane::now().saturating_duration_since(since);
        trace!(
            name: "export_has_room",
            room = ?Arc::as_ptr(&self.0),
            waited_ms = waited.as_secs_f64() * 1e3
        );
        self.0.tell(&RoomNotice::Again { waited });
    }
}

/// The one who looks whether there is room.
struct Look<'a>(&'a Room);

impl<'a> Look<'a> {
    fn begin(room: &'a Room) -> Option<Self> {
        let is_free = !room.looking.swap(true, Ordering::AcqRel);
        is_free.then_some(Look(room))
    }
}

impl Drop for Look<'_> {
    fn drop(&mut self) {
        self.0.looking.store(false, Ordering::Release);
    }
}

/// A client whose requests may wait.
#[derive(Clone)]
struct Waiting {
    room: Arc<Room>,
    goes_on: Arc<dyn Fn() -> bool + Send + Sync>,
}

/// Whether a request was given up since its client is gone, and is not to be answered.
pub(crate) fn is_given_up(error: &Error) -> bool {
    error.operation() == GIVEN_UP
}

const GIVEN_UP: &str = "wait for room";

fn given_up(last: Error) -> Error {
    let message = "the client or the export went away";
    last.of_failed_sync().context(GIVEN_UP, message)
}

fn is_full<T>(done: &Result<T>) -> bool {
    matches!(done, Err(error) if error.kind() == ErrorKind::NoSpace)
}

impl Waiting {
    /// What a request comes to whose first try was `first`, and the next ones are `again`.
    async fn finish<T>(
        &self,
        operation: Operation,
        first: Io<T>,
        again: impl Fn() -> Io<T>,
    ) -> Result<T> {
        let mut last = match first.await {
            Err(error) if error.kind() == ErrorKind::NoSpace => error,
            done => return done,
        };
        let _place = self.room.enter(operation, &last);
        let mut pause = FIRST_LOOK;
        let mut found = self.room.found.listen();
        loop {
            select(pin!(lane::sleep(pause)), found).await;
            // What is found while somebody else looks is not missed.
            found = self.room.found.listen();
            pause = (pause * 2).min(LOOK);
            if !(self.goes_on)() {
                return Err(given_up(last));
            }
            let Some(look) = Look::begin(&self.room) else {
                continue;
            };
            let done = again().await;
            drop(look);
            if !is_full(&done) {
                // There is for others, too: they look one after the other, each at once.
                self.room.found.notify(usize::MAX);
                return done;
            }
            if let Err(error) = done {
                last = error;
            }
        }
    }
}

/// A device whose requests wait for room.
struct PatientDevice {
    device: Arc<dyn BlockDevice>,
    write_through: bool,
    client: Waiting,
}

impl fmt::Debug for PatientDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PatientDevice").field(&self.device).finish()
    }
}

impl PatientDevice {
    /// Finishes a change, and makes it durable if that is wanted: apart from it, since nobody could
    /// tell which of the two has failed in one that is both.
    fn change<T: 'static>(
        &self,
        operation: Operation,
        fua: bool,
        first: Io<T>,
        again: impl Fn(&dyn BlockDevice) -> Io<T> + 'static,
    ) -> Io<T> {
        let (client, device) = (self.client.clone(), self.device.clone());
        let fua = fua || self.write_through && operation == Operation::Write;
        Io::start(async move {
            let done = client.finish(operation, first, || again(&*device)).await?;
            if fua {
                let first = device.flush();
                let flushed = client.finish(Operation::Flush, first, || device.flush());
                flushed.await?;
            }
            Ok(done)
        })
    }
}

impl BlockDevice for PatientDevice {
    delegate!(
        device: info, size_bytes, read, read_into, block_status, truncate, resize, clear, close,
        backing, storage, format_device, identity, allocated_bytes,
    );

    fn stands_for(&self) -> Option<Arc<dyn BlockDevice>> {
        Some(self.device.clone())
    }

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        // A write that fails takes its buffer along.
        let kept = Box::<[u8]>::from(&buffer[..]);
        let first = self
            .device
            .write(offset_bytes, buffer, RequestFlags::default());
        self.change(Operation::Write, flags.fua, first, move |device| {
            device.write(
                offset_bytes,
                Buffer::copy_of(&kept),
                RequestFlags::default(),
            )
        })
    }

    fn write_from(
        &self,
        offset_bytes: u64,
        from: &[SharedBuffer],
        flags: RequestFlags,
    ) -> Option<Io<()>> {
        let first = self
            .device
            .write_from(offset_bytes, from, RequestFlags::default())?;
        let from = from.to_vec();
        let again = move |device: &dyn BlockDevice| write_shared(device, offset_bytes, &from);
        Some(self.change(Operation::Write, flags.fua, first, again))
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        let plain = request.fua(false);
        let zero =
            move |device: &dyn BlockDevice| device.write_zeroes(offset_bytes, len_bytes, plain);
        let first = zero(&*self.device);
        self.change(Operation::Write, request.fua, first, zero)
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let discard = move |device: &dyn BlockDevice| device.discard(offset_bytes, len_bytes);
        let first = discard(&*self.device);
        self.change(Operation::Discard, false, first, discard)
    }

    fn flush(&self) -> Io<()> {
        let first = self.device.flush();
        self.change(Operation::Flush, false, first, |device| device.flush())
    }
}

/// Writes from memory that others change, also where the device wants a copy by now.
fn write_shared(device: &dyn BlockDevice, offset_bytes: u64, from: &[SharedBuffer]) -> Io<()> {
    let flags = RequestFlags::default();
    if let Some(io) = device.write_from(offset_bytes, from, flags) {
        return io;
    }
    let mut data = Buffer::for_read(total_len(from));
    let mut at = 0;
    for piece in from {
        piece.copy_to(0, &mut data[at..at + piece.len()]);
        at += piece.len();
    }
    let written = device.write(offset_bytes, data, flags);
    Io::start(async move { written.await.map(drop) })
}

#[cfg(test)]
mod tests;
