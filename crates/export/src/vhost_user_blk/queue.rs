//! A queue on its lane: takes requests from the ring, has them carried out, and tells the guest.
//!
//! Invariants:
//! - All that a queue has is its lane's own; what the client's session wants of it goes through
//!   [`QueueControl`].
//! - A queue that has stopped has no requests in flight, and its ring is not touched any more.
//! - What is wrong with a ring or chain stops the queue, and nothing else; the client is told.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use vellum::BlockDevice;
use vellum_io::lane::{self, Descriptor, Op};
use vellum_io::{Buffers, Error, Io, Result};

use super::chain::walk;
use super::channel::Peer;
use super::control::QueueControl;
use super::dirty_log::{DirtyLog, QueueDirtyLog};
use super::disk::Disk;
use super::in_flight::QueueInFlight;
use super::memory::GuestMemory;
use super::message::broken;
use super::perform;
use super::poll_window::PollWindow;
use super::request::{StatusPlace, parse};
use super::ring::{Ring, RingPlace};
use super::signals::take_count;
use super::unflushed::{Log, Unflushed};
use crate::fair_depth::StreamDepth;
use crate::nbd::Stop;

/// Bytes that the requests of a queue may move at a time, and may have copies of; more wait in the ring.
const MAX_COPIED_BYTES: usize = 64 << 20;
/// So many requests are begun before others on the lane have their turn.
const REQUESTS_A_TURN: usize = 256;

/// What a queue is made of.
#[derive(Debug)]
pub(super) struct QueueSetup {
    pub(super) number: u16,
    pub(super) disk: Arc<Disk>,
    /// Who waits for its requests, and whether the export ends.
    pub(super) peer: Peer,
    pub(super) ending: Stop,
    pub(super) memory: GuestMemory,
    pub(super) ring: RingPlace,
    pub(super) notes: Option<QueueInFlight>,
    /// Where writes are kept until they are flushed.
    pub(super) log: Option<(Log, Arc<Unflushed>)>,
    /// The client's memory has no room for the log that this disk needs.
    pub(super) lacks_log: bool,
    /// Where the client is told of memory that was written.
    pub(super) dirty: Option<Arc<DirtyLog>>,
    /// Tells that there are requests.
    pub(super) kick: OwnedFd,
    /// Tells the guest that requests are done.
    pub(super) call: Option<OwnedFd>,
    /// Tells the client that the queue has stopped.
    pub(super) error: Option<OwnedFd>,
    /// Indirect descriptors were agreed upon.
    pub(super) indirect: bool,
    /// The guest flushes, or switches the cache.
    pub(super) guest_flushes: bool,
}

/// A queue, on its lane.
pub(super) struct Queue {
    pub(super) disk: Arc<Disk>,
    /// The disk's, as its guest uses it.
    pub(super) device: Arc<dyn BlockDevice>,
    number: u16,
    memory: GuestMemory,
    ring: RefCell<Ring>,
    notes: RefCell<Option<QueueInFlight>>,
    pub(super) log: Option<(RefCell<Log>, Arc<Unflushed>)>,
    lacks_log: bool,
    dirty: Option<QueueDirtyLog>,
    control: Arc<QueueControl>,
    waited_for: WaitedFor,
    pub(super) in_flight: StreamDepth,
    copied_bytes: Cell<usize>,
    /// Requests that a server before this one has left, as far as they are not begun: noted already.
    left: RefCell<VecDeque<u16>>,
    /// Something was used that the guest was not told of.
    unsignalled: Cell<bool>,
    call: RefCell<Option<Arc<OwnedFd>>>,
    error: RefCell<Option<Arc<OwnedFd>>>,
    /// The loop, while it sleeps.
    sleeper: RefCell<Option<Waker>>,
    indirect: bool,
    guest_flushes: bool,
}

/// Tells whether anybody waits for requests.
#[derive(Debug, Clone)]
struct WaitedFor {
    control: Arc<QueueControl>,
    peer: Peer,
    ending: Stop,
}

impl WaitedFor {
    /// A session that waits for the queue to stop does not hear that its client is gone, so whoever asks looks.
    fn is_so(&self) -> bool {
        let is_over = self.control.abandon.load(Ordering::Acquire) || self.ending.is_requested();
        !(is_over || self.peer.has_left())
    }
}

/// Why the loop has something to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Woken {
    /// The guest has kicked.
    Kick,
    /// Requests are done, or the session wants something.
    Other,
}

/// A queue's life, on its lane.
pub(super) async fn run(mut setup: QueueSetup, control: Arc<QueueControl>) -> Result<u16> {
    let first = setup.ring.next_available;
    let (disk, number) = (setup.disk.clone(), setup.number);
    let error = setup.error.take().map(Arc::new);
    let kick = setup.kick.try_clone();
    let kick = kick.map(|fd| Arc::new(Descriptor::new(fd, "kick")));
    let made = Queue::new(setup, error.clone(), control.clone());
    let (queue, kick) = match (made, kick) {
        (Ok(queue), Ok(kick)) => (Rc::new(queue), kick),
        (made, kick) => {
            let kick = kick.map_err(|error| Error::from_io("use queue", &error));
            if let Some(failure) = made.err().or(kick.err()) {
                control.signals.use_counters(error.iter());
                report(&disk, number, error.as_deref(), &control, &failure);
            }
            wait_for_stop(&control).await;
            return Ok(first);
        }
    };
    if let Err(failure) = queue.serve(&kick).await {
        report(
            &queue.disk,
            queue.number,
            queue.error.borrow().as_deref(),
            &control,
            &failure,
        );
        queue.drain().await;
        wait_for_stop(&control).await;
    }
    let next = queue.ring.borrow().next_available();
    Ok(next)
}

/// Tells of a queue that cannot go on.
fn report(
    disk: &Disk,
    number: u16,
    error: Option<&OwnedFd>,
    control: &QueueControl,
    failure: &Error,
) {
    disk.log(&format!(
        "queue {number} has stopped: {}",
        failure.message()
    ));
    if let Some(error) = error {
        control.signals.add_one(error);
    }
}

async fn wait_for_stop(control: &QueueControl) {
    std::future::poll_fn(|context| {
        control.waker.register(context.waker());
        match control.stop.load(Ordering::Acquire) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}

impl Queue {
    fn new(
        setup: QueueSetup,
        error: Option<Arc<OwnedFd>>,
        control: Arc<QueueControl>,
    ) -> Result<Queue> {
        let mut ring = Ring::find(&setup.ring, &setup.memory)?;
        let mut notes = setup.notes;
        let mut pending = VecDeque::new();
        if let Some(notes) = &mut notes
            && let Some(left) = notes.recover(ring.next_used())
        {
            // Whatever the client believes: it cannot know what was taken.
            ring.skip_in_flight(left.len() as u16);
            pending = left.into();
        }
        let in_flight = StreamDepth::new(&setup.disk.accounting);
        let disk = setup.disk;
        let waited_for = WaitedFor {
            control: control.clone(),
            peer: setup.peer,
            ending: setup.ending,
        };
        let device = {
            let waited_for = waited_for.clone();
            let room = &disk.accounting.room;
            let goes_on = move || waited_for.is_so();
            disk.when_full.around(&disk.device, room, goes_on)
        };
        let queue = Queue {
            disk,
            device,
            number: setup.number,
            memory: setup.memory,
            ring: RefCell::new(ring),
            notes: RefCell::new(notes),
            log: setup.log.map(|(log, all)| (RefCell::new(log), all)),
            lacks_log: setup.lacks_log,
            dirty: setup
                .dirty
                .map(|log| QueueDirtyLog::new(log, setup.ring.addresses.used_for_log)),
            control,
            waited_for,
            in_flight,
            copied_bytes: Cell::new(0),
            left: RefCell::new(pending),
            // A server that died may have used requests and told nobody.
            unsignalled: Cell::new(true),
            call: RefCell::new(setup.call.map(Arc::new)),
            error: RefCell::new(error),
            sleeper: RefCell::new(None),
            indirect: setup.indirect,
            guest_flushes: setup.guest_flushes,
        };
        queue.use_counters();
        Ok(queue)
    }

    /// Serves until it is told to stop; then everything that was begun is done.
    async fn serve(self: &Rc<Self>, kick: &Arc<Descriptor>) -> Result<()> {
        // The disk takes its time, and the guest takes another.
        let limit = self.disk.poll_limit;
        let (mut for_disk, mut for_guest) = (PollWindow::new(limit), PollWindow::new(limit));
        let mut kicked = None;
        while !self.control.stop.load(Ordering::Acquire) {
            self.take_news();
            self.ring.borrow_mut().refuse_kicks();
            self.take_requests().await?;
            self.signal();
            let poll = match self.in_flight.get() {
                0 => &mut for_guest,
                _ => &mut for_disk,
            };
            if self.poll(poll.window).await {
                continue;
            }
            if self.ring.borrow_mut().ask_for_kick() && self.has_room() {
                continue;
            }
            let asleep = Instant::now();
            if self.sleep(kick, &mut kicked).await? == Woken::Kick {
                drain_kick(kick)?;
            }
            poll.adapt(asleep.elapsed());
        }
        while self.begin_left()? {
            self.wait_for_end().await;
        }
        self.drain().await;
        Ok(())
    }

    /// Begins what was left, as far as there is room; whether there is more to come.
    fn begin_left(self: &Rc<Self>) -> Result<bool> {
        while self.has_room() {
            let Some(head) = self.left.borrow_mut().pop_front() else {
                return Ok(false);
            };
            self.begin(head)?;
        }
        // What nobody waits for is left to the next server.
        Ok(!self.left.borrow().is_empty() && !self.is_abandoned())
    }

    /// The next request: what was left comes before what is in the ring.
    fn next_head(&self) -> Result<Option<u16>> {
        if let Some(head) = self.left.borrow_mut().pop_front() {
            return Ok(Some(head));
        }
        let head = self.ring.borrow_mut().next_head()?;
        if let (Some(head), Some(notes)) = (head, &mut *self.notes.borrow_mut()) {
            notes.begin(head);
        }
        Ok(head)
    }

    /// Begins the requests that are in the ring. A guest that has new ones ready all the time keeps
    /// neither others on the lane from their turn nor the queue from its end.
    async fn take_requests(self: &Rc<Self>) -> Result<()> {
        let mut begun = 0_usize;
        while self.has_room() {
            if begun == REQUESTS_A_TURN {
                begun = 0;
                self.signal();
                lane::yield_now().await;
                if self.control.stop.load(Ordering::Acquire) {
                    break;
                }
            }
            begun += 1;
            let Some(head) = self.next_head()? else { break };
            self.begin(head)?;
        }
        Ok(())
    }

    /// Begins a request.
    fn begin(self: &Rc<Self>, head: u16) -> Result<()> {
        let mut chain = walk(&self.ring.borrow(), &self.memory, head, self.indirect)?;
        if let Some(dirty) = &self.dirty {
            dirty.begin(head, std::mem::take(&mut chain.written));
        }
        let request = parse(chain, &self.disk.geometry())?;
        self.in_flight.enter();
        perform::start(self.clone(), head, request);
        Ok(())
    }

    /// Ends a request that [`Queue::begin`] has begun.
    pub(super) fn end(&self, head: u16, written_bytes: u32) {
        let mut ring = self.ring.borrow_mut();
        let mut push = || {
            let used = ring.push_used(head, written_bytes);
            if let Some(dirty) = &self.dirty {
                dirty.end(head, used);
            }
            ring.next_used()
        };
        match &mut *self.notes.borrow_mut() {
            Some(notes) => notes.end(head, push),
            None => drop(push()),
        }
        self.unsignalled.set(true);
        self.leave();
    }

    /// Ends a request that is not answered: nobody is there, and whoever comes may do it again.
    pub(super) fn leave(&self) {
        self.in_flight.leave();
        if let Some(sleeper) = self.sleeper.borrow_mut().take() {
            sleeper.wake();
        }
    }

    /// Whether a write is durable before it is answered. Where the client's memory has no log, the next
    /// server could not write it again.
    pub(super) fn writes_through(&self) -> bool {
        self.lacks_log || self.disk.writes_through(self.guest_flushes)
    }

    /// Whether nobody waits for what is in flight.
    pub(super) fn is_abandoned(&self) -> bool {
        !self.waited_for.is_so()
    }

    /// Counts memory that a request takes, until it is given back.
    pub(super) fn take_memory(&self, len_bytes: usize) {
        self.copied_bytes.set(self.copied_bytes.get() + len_bytes);
    }

    /// Gives it back.
    pub(super) fn give_memory(&self, len_bytes: usize) {
        let left = self.copied_bytes.get().saturating_sub(len_bytes);
        self.copied_bytes.set(left);
    }

    fn has_room(&self) -> bool {
        self.copied_bytes.get() < MAX_COPIED_BYTES
            && self.in_flight.get() < usize::from(u16::MAX)
            && self.in_flight.has_room()
    }

    fn take_news(&self) {
        if !self.control.take_news() {
            return;
        }
        if let Some(call) = self.control.call.lock().take() {
            *self.call.borrow_mut() = call.map(Arc::new);
            // The guest may have missed what the one before was told.
            self.unsignalled.set(true);
        }
        if let Some(error) = self.control.error.lock().take() {
            *self.error.borrow_mut() = error.map(Arc::new);
        }
        self.use_counters();
    }

    fn use_counters(&self) {
        let (call, error) = (self.call.borrow(), self.error.borrow());
        let signals = &self.control.signals;
        signals.use_counters(call.iter().chain(error.iter()));
    }

    /// Tells the guest of what is done, if it wants to be told.
    fn signal(&self) {
        if self.unsignalled.take()
            && self.ring.borrow_mut().wants_signal()
            && let Some(call) = &*self.call.borrow()
        {
            self.control.signals.add_one(call);
        }
    }

    /// Whether there is something to do.
    fn has_work(&self) -> bool {
        self.unsignalled.get()
            || self.control.has_something()
            || self.has_room() && (!self.left.borrow().is_empty() || self.ring.borrow().has_more())
    }

    /// Looks for something to do, for a time, while the lane goes on; whether there is any.
    async fn poll(&self, window: Duration) -> bool {
        if window.is_zero() {
            return false;
        }
        let begin = Instant::now();
        loop {
            lane::hand_over();
            lane::yield_now().await;
            if self.has_work() {
                return true;
            }
            if begin.elapsed() >= window {
                return false;
            }
        }
    }

    /// Sleeps until there is something to do.
    async fn sleep(&self, kick: &Arc<Descriptor>, kicked: &mut Option<Io<()>>) -> Result<Woken> {
        std::future::poll_fn(|context| self.poll_sleep(context, kick, kicked)).await
    }

    fn poll_sleep(
        &self,
        context: &mut Context<'_>,
        kick: &Arc<Descriptor>,
        kicked: &mut Option<Io<()>>,
    ) -> Poll<Result<Woken>> {
        self.control.waker.register(context.waker());
        if self.unsignalled.get() || self.control.has_something() {
            return Poll::Ready(Ok(Woken::Other));
        }
        let waiting = kicked.get_or_insert_with(|| wait_readable(kick));
        match Pin::new(waiting).poll(context) {
            Poll::Ready(done) => {
                *kicked = None;
                Poll::Ready(done.map(|()| Woken::Kick))
            }
            Poll::Pending => {
                *self.sleeper.borrow_mut() = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Waits until nothing is in flight.
    async fn drain(&self) {
        while self.in_flight.get() > 0 {
            self.wait_for_end().await;
        }
        self.signal();
    }

    /// Waits until something that is in flight is done, and tells the guest.
    async fn wait_for_end(&self) {
        std::future::poll_fn(|context| {
            self.take_news();
            if self.in_flight.get() == 0 || self.unsignalled.get() {
                return Poll::Ready(());
            }
            self.control.waker.register(context.waker());
            *self.sleeper.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        self.signal();
    }

    /// Says that a request was not understood.
    pub(super) fn refuse(&self, head: u16, status: &StatusPlace, with: super::request::Status) {
        status.write(with);
        self.end(head, 1);
    }
}

/// Waits until the guest kicks.
fn wait_readable(kick: &Arc<Descriptor>) -> Io<()> {
    let events = libc::POLLIN;
    let request = lane::Request::new(kick.clone(), Op::Poll { events }, Buffers::new());
    lane::submit(request, lane::finish_unit)
}

/// Takes the count of kicks.
fn drain_kick(kick: &Descriptor) -> Result<()> {
    match take_count(kick) {
        Ok(8) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(()),
        Ok(_) => Err(broken("the descriptor for kicks counts none")),
        Err(errno) => Err(Error::from_errno("read kicks", errno.raw_os_error())),
    }
}
