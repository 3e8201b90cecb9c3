//! The connections to one export: as many as the server allows and lanes ask for,
//! and made anew when they are lost.
//!
//! Invariants:
//! - Every connection sees the same export: one that has another size or other rights
//!   after a reconnect is not used.
//! - Where users do not ask to outlive a reconnect (`reconnect_delay` is 0), no flush
//!   succeeds after writes that were answered but not flushed before one ([`FlushTracker`]):
//!   nobody knows whether the server still has them.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use event_listener::Event;
use parking_lot::{Mutex, MutexGuard};
use tracing::trace;

use super::super::channel::Channel;
use super::super::proto;
use super::ClientOptions;
use super::connection::{Connection, Outcome, Reply, Request};
use super::flush_tracker::{ConnectionWrites, FlushScope, FlushTracker};
use super::handshake::{Handshake, Session};
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result, lane};

/// How long a second connection may take, before one is taken to be all that can be had:
/// a server lets those beyond its limit wait for ever.
const EXTRA_CONNECT_LIMIT: Duration = Duration::from_millis(1000);
/// How long an attempt to connect anew may take at least, whatever `reconnect_delay` says.
const RECONNECT_LIMIT: Duration = Duration::from_secs(5);
/// The pause after the first failed attempt; it doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// While a server is away requests fail at once, but for one attempt in this time.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(500);

/// All connections to an export.
#[derive(Debug)]
pub(super) struct ConnectionPool {
    options: ClientOptions,
    session: Session,
    slots: Vec<Slot>,
    flush_tracker: FlushTracker,
    closed: AtomicBool,
    given_up: AtomicBool,
    /// How many requests wait for a connection.
    waiting: AtomicUsize,
    /// Told when nobody is to wait for one any more.
    over: Event,
}

/// A place for one connection.
#[derive(Debug)]
struct Slot {
    state: Mutex<SlotState>,
    changed: Event,
}

#[derive(Debug, Clone)]
enum SlotState {
    /// Not used yet.
    Fresh,
    Connected(Arc<ConnectionWrites>),
    /// Somebody connects.
    Connecting,
    Disconnected(Disconnect),
    /// The server accepts no more: the first connection serves.
    Shared,
}

/// Since when a slot has no connection, and when one was last tried.
#[derive(Debug, Clone, Copy)]
struct Disconnect {
    since: Instant,
    last_attempt: Option<Instant>,
}

impl Slot {
    fn new(state: SlotState) -> Self {
        Slot {
            state: Mutex::new(state),
            changed: Event::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock()
    }

    fn set(&self, state: SlotState) {
        *self.lock() = state;
        self.changed.notify(usize::MAX);
    }
}

/// What a slot offers to one who asks.
enum Availability {
    Connection(Arc<ConnectionWrites>),
    /// Wait for the one who connects.
    Wait(event_listener::EventListener),
    /// Connect; [`ConnectGuard`] stands for the right to.
    Connect(Option<Disconnect>),
    /// Not now.
    Refused(Disconnect),
    UseFirst,
}

/// How often, and for how long, connections were lost under one request: a server may take
/// leave of whoever asks it something, time and again.
#[derive(Default)]
struct Losses {
    first: Option<Instant>,
    pause: Duration,
}

impl Losses {
    /// Waits a little longer each time; `false` once that is as long as users wait for a server
    /// that is away.
    async fn may_try_again(&mut self, options: &ClientOptions) -> bool {
        let first = *self.first.get_or_insert_with(lane::now);
        if lane::now() + self.pause >= first + options.reconnect_delay {
            return false;
        }
        if !self.pause.is_zero() {
            lane::sleep(self.pause).await;
        }
        self.pause = (2 * self.pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        true
    }
}

/// The right to connect, given back if it is dropped.
struct ConnectGuard<'a> {
    slot: &'a Slot,
    otherwise: Option<SlotState>,
}

impl ConnectGuard<'_> {
    fn finish(mut self, state: SlotState) {
        self.otherwise = None;
        self.slot.set(state);
    }
}

impl Drop for ConnectGuard<'_> {
    fn drop(&mut self) {
        if let Some(state) = self.otherwise.take() {
            self.slot.set(state);
        }
    }
}

/// A request that waits for a connection, counted as long as it does.
struct Waits<'a>(&'a AtomicUsize);

impl<'a> Waits<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Waits(count)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Connects and negotiates once.
async fn dial(options: &ClientOptions) -> Result<Arc<Connection>> {
    trace!(name: "nbd_client_handshake", export = options.export);
    let dialled = shake_hands(options).await;
    match &dialled {
        Ok(_) => trace!(name: "nbd_client_handshake_success", export = options.export),
        Err(error) => {
            trace!(name: "nbd_client_handshake_failed", export = options.export, error = %error);
        }
    }
    dialled
}

async fn shake_hands(options: &ClientOptions) -> Result<Arc<Connection>> {
    let channel = match &options.dial {
        Some(dial) => Channel::from(dial.clone().dial(&options.address).await?),
        None => super::connect(&options.address).await?,
    };
    let context = options.dirty_bitmap.as_deref();
    let context = context.unwrap_or(proto::CONTEXT_ALLOCATION);
    let handshake = Handshake::new(channel).with_tls(options.tls.clone());
    let (channel, input, session) = handshake.agree(&options.export, context).await?;
    if let (Some(bitmap), None) = (&options.dirty_bitmap, session.context) {
        let message = format!("requested x-dirty-bitmap {bitmap} not found");
        return Err(Error::new(ErrorKind::InvalidArgument, "connect", message));
    }
    Ok(Connection::new(channel, input, session))
}

fn took_too_long() -> Error {
    let message = "Connection attempt cancelled by timeout";
    Error::new(ErrorKind::Io, "connect", message).with_errno(libc::ETIMEDOUT)
}

/// The first connection, tried until the time is over.
async fn dial_patiently(options: &ClientOptions) -> Result<Arc<Connection>> {
    let deadline = lane::now() + options.open_timeout;
    let mut pause = FIRST_PAUSE;
    loop {
        let left = deadline.saturating_duration_since(lane::now());
        let dialled = match options.open_timeout.is_zero() {
            true => dial(options).await,
            // A server that says nothing takes up the time as one that is not there.
            false => within(left, pin!(dial(options)))
                .await
                .unwrap_or_else(|| Err(took_too_long())),
        };
        let error = match dialled {
            Ok(connection) => return Ok(connection),
            Err(error) => error,
        };
        lane::sleep_until(deadline.min(lane::now() + pause)).await;
        if lane::now() >= deadline {
            return Err(error);
        }
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

impl ConnectionPool {
    /// Connects for the first time.
    pub(super) async fn open(options: ClientOptions) -> Result<ConnectionPool> {
        let first = dial_patiently(&options).await?;
        let session = first.session().clone();
        let several = session.flags & proto::FLAG_CAN_MULTI_CONN != 0;
        let count = if several {
            options.max_connections.max(1)
        } else {
            1
        };
        let flush_tracker = FlushTracker::default();
        let mut slots = vec![Slot::new(SlotState::Connected(flush_tracker.track(first)))];
        slots.extend((1..count).map(|_| Slot::new(SlotState::Fresh)));
        Ok(ConnectionPool {
            options,
            session,
            slots,
            flush_tracker,
            closed: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            over: Event::new(),
        })
    }

    pub(super) fn session(&self) -> &Session {
        &self.session
    }

    pub(super) fn options(&self) -> &ClientOptions {
        &self.options
    }

    /// Makes a request, again after a reconnect if there is time for that. Not for flushes.
    pub(super) async fn ask(&self, mut question: Request) -> Result<Reply> {
        debug_assert_ne!(question.command, proto::CMD_FLUSH);
        let index = lane::number() % self.slots.len();
        let shape: Vec<usize> = question.buffers.iter().map(|piece| piece.len()).collect();
        let again = Request {
            buffers: Buffers::new(),
            ..question
        };
        let mut losses = Losses::default();
        loop {
            let tracked = self.wait_for_connection(index).await?;
            let command = question.command;
            let newest = self.flush_tracker.newest();
            let buffers = match tracked.connection.ask(question).await {
                Outcome::Done(answer) => {
                    if self.must_be_flushed(command, again.flags) {
                        self.flush_tracker.note_change(&tracked, newest);
                    }
                    return Ok(answer);
                }
                Outcome::Failed(error) => return Err(self.failure(error)),
                Outcome::Lost(buffers) => buffers,
            };
            if !losses.may_try_again(&self.options).await {
                return Err(self.unreachable_server());
            }
            let buffers = match buffers {
                Some(buffers) => buffers,
                None if command == proto::CMD_WRITE => {
                    return Err(self.unreachable_server());
                }
                None => shape.iter().map(|len| Buffer::for_read(*len)).collect(),
            };
            question = Request { buffers, ..again };
        }
    }

    fn failure(&self, error: u32) -> Error {
        Error::from_errno("request", proto::system_errno(error)).target(&*self.options.name)
    }

    /// Whether a change that was answered may be lost until the next flush.
    fn must_be_flushed(&self, command: u16, flags: u16) -> bool {
        use proto::{CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES};
        matches!(command, CMD_WRITE | CMD_WRITE_ZEROES | CMD_TRIM)
            && flags & proto::CMD_FLAG_FUA == 0
            && self.session.flags & proto::FLAG_SEND_FLUSH != 0
    }

    /// Makes durable what was answered before.
    pub(super) async fn flush(&self) -> Result<()> {
        // Connections that are found gone make nothing fail where they have lost nothing.
        let mut attempts = 0..=self.slots.len();
        let mut losses = Losses::default();
        loop {
            self.flush_tracker.check()?;
            let first = self
                .wait_for_connection(lane::number() % self.slots.len())
                .await?;
            let due = self.flush_tracker.due(first, self.connections());
            if due.lost && !self.outlives_reconnects() {
                return Err(self.lost_writes());
            }
            if self.flush_through(&due).await? {
                self.flush_tracker.complete(due);
                // Another one may have failed meanwhile, of the same writes.
                return self.flush_tracker.check();
            }
            if attempts.next().is_none() && !losses.may_try_again(&self.options).await {
                return Err(self.unreachable_server());
            }
        }
    }

    /// Flushes each connection that is needed; `false`: one of them is gone.
    async fn flush_through(&self, due: &FlushScope) -> Result<bool> {
        for (index, tracked) in due.through.iter().enumerate() {
            let question = Request {
                command: proto::CMD_FLUSH,
                flags: 0,
                offset_bytes: 0,
                len_bytes: 0,
                buffers: Buffers::new(),
            };
            match tracked.connection.ask(question).await {
                Outcome::Done(_) => {}
                Outcome::Failed(error) => return Err(self.flush_tracker.fail(self.failure(error))),
                // It was needed for what was written through it, or another that is gone.
                Outcome::Lost(_) if index > 0 && !self.outlives_reconnects() => {
                    return Err(self.lost_writes());
                }
                Outcome::Lost(_) => return Ok(false),
            }
        }
        Ok(true)
    }

    fn outlives_reconnects(&self) -> bool {
        !self.options.reconnect_delay.is_zero()
    }

    fn unreachable_server(&self) -> Error {
        let error = match self.given_up.load(Ordering::Acquire) {
            true => {
                let message = "the server did not answer, and was given up";
                Error::new(ErrorKind::Io, "request", message).with_errno(libc::EIO)
            }
            false => Error::from_errno("connect", libc::EIO),
        };
        error.target(&*self.options.name)
    }

    fn lost_writes(&self) -> Error {
        let message = "the connection was lost with writes that were not flushed";
        let error = Error::new(ErrorKind::Io, "flush", message).with_errno(libc::EIO);
        self.flush_tracker.fail(error.target(&*self.options.name))
    }

    /// The connections in use, also those that are broken and nobody has noticed.
    fn connections(&self) -> Vec<Arc<ConnectionWrites>> {
        let up = |slot: &Slot| match &*slot.lock() {
            SlotState::Connected(tracked) => Some(tracked.clone()),
            _ => None,
        };
        self.slots.iter().filter_map(up).collect()
    }

    /// A connection that is up, waited for if there is time for that.
    async fn wait_for_connection(&self, index: usize) -> Result<Arc<ConnectionWrites>> {
        let _waits = Waits::new(&self.waiting);
        let mut pause = FIRST_PAUSE;
        loop {
            let over = self.over.listen();
            let connected = pin!(self.connection(index));
            let disconnect = match before(over, connected).await {
                Some(Ok(tracked)) => return Ok(tracked),
                Some(Err(disconnect)) => disconnect,
                None => return Err(self.unreachable_server()),
            };
            let over = self.over.listen();
            let until = disconnect.since + self.options.reconnect_delay;
            if self.closed.load(Ordering::Acquire) || lane::now() + pause > until {
                return Err(self.unreachable_server());
            }
            before(over, pin!(lane::sleep(pause))).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Whether requests wait for a connection, and there is none.
    pub(super) fn is_away(&self) -> bool {
        let is_up = |tracked: &Arc<ConnectionWrites>| !tracked.connection.is_broken();
        self.waiting.load(Ordering::Relaxed) > 0 && !self.connections().iter().any(is_up)
    }

    /// A connection that is up, made if need be.
    async fn connection(&self, index: usize) -> Result<Arc<ConnectionWrites>, Disconnect> {
        let mut index = index;
        loop {
            let slot = &self.slots[index];
            match self.offer(slot) {
                Availability::Connection(connection) => return Ok(connection),
                Availability::Refused(disconnect) => return Err(disconnect),
                Availability::Wait(changed) => changed.await,
                Availability::UseFirst => index = 0,
                Availability::Connect(Some(disconnect)) => {
                    return self.reconnect(slot, disconnect).await;
                }
                Availability::Connect(None) => self.connect_extra(slot).await,
            }
        }
    }

    fn offer(&self, slot: &Slot) -> Availability {
        let mut state = slot.lock();
        let disconnect = match &*state {
            SlotState::Connected(tracked) if !tracked.connection.is_broken() => {
                return Availability::Connection(tracked.clone());
            }
            SlotState::Connecting => return Availability::Wait(slot.changed.listen()),
            SlotState::Shared => return Availability::UseFirst,
            SlotState::Fresh => {
                *state = SlotState::Connecting;
                return Availability::Connect(None);
            }
            SlotState::Disconnected(disconnect) => *disconnect,
            SlotState::Connected(tracked) => {
                self.flush_tracker.note_end(tracked);
                Disconnect {
                    since: lane::now(),
                    last_attempt: None,
                }
            }
        };
        let tried = disconnect
            .last_attempt
            .map(|attempt| lane::now().duration_since(attempt));
        let waiting = lane::now().duration_since(disconnect.since) < self.options.reconnect_delay;
        if self.closed.load(Ordering::Acquire)
            || !waiting && tried.is_some_and(|tried| tried < ATTEMPT_INTERVAL)
        {
            *state = SlotState::Disconnected(disconnect);
            return Availability::Refused(disconnect);
        }
        *state = SlotState::Connecting;
        Availability::Connect(Some(disconnect))
    }

    /// Connects once more after a disconnect; the slot is claimed.
    async fn reconnect(
        &self,
        slot: &Slot,
        disconnect: Disconnect,
    ) -> Result<Arc<ConnectionWrites>, Disconnect> {
        trace!(name: "nbd_reconnect_attempt", export = self.options.export);
        let disconnect = Disconnect {
            last_attempt: Some(lane::now()),
            ..disconnect
        };
        let guard = ConnectGuard {
            slot,
            otherwise: Some(SlotState::Disconnected(disconnect)),
        };
        // Requests wait for this: for as long as they would for a server that is away.
        let left = (disconnect.since + self.options.reconnect_delay)
            .saturating_duration_since(lane::now());
        match within(left.max(RECONNECT_LIMIT), pin!(self.dial_again())).await {
            Some(Ok(connection)) => {
                let tracked = self.flush_tracker.track(connection);
                guard.finish(SlotState::Connected(tracked.clone()));
                Ok(tracked)
            }
            Some(Err(_)) | None => Err(disconnect),
        }
    }

    /// Connects once more; the export must be the same.
    async fn dial_again(&self) -> Result<Arc<Connection>> {
        let connection = dial(&self.options).await?;
        let (new, old) = (connection.session(), &self.session);
        let lost = old.flags & !new.flags;
        let same = new.size_bytes == old.size_bytes
            && new.block_sizes == old.block_sizes
            && new.context.is_some() == old.context.is_some()
            && new.framing >= old.framing
            && lost == 0
            && (new.flags & !old.flags) & proto::FLAG_READ_ONLY == 0;
        if same {
            return Ok(connection);
        }
        connection.close().await;
        let message = "the server's export is not the one that was opened";
        Err(Error::new(ErrorKind::Protocol, "connect", message).target(&*self.options.name))
    }

    /// Makes a connection beside the first; the slot is claimed. Without one the first
    /// must do.
    async fn connect_extra(&self, slot: &Slot) {
        let guard = ConnectGuard {
            slot,
            otherwise: Some(SlotState::Shared),
        };
        let dialled = pin!(self.dial_again());
        match within(EXTRA_CONNECT_LIMIT, dialled).await {
            Some(Ok(connection)) => {
                guard.finish(SlotState::Connected(self.flush_tracker.track(connection)))
            }
            Some(Err(_)) | None => guard.finish(SlotState::Shared),
        }
    }

    /// How often something has gone over the connections, if somebody waits for an answer.
    pub(super) fn progress(&self) -> Option<u64> {
        let connections = self.connections();
        let waited_for = connections
            .iter()
            .filter_map(|tracked| tracked.connection.progress());
        waited_for.reduce(|sum, one| sum.wrapping_add(one))
    }

    /// Ends all connections, now: what waits for an answer or a connection fails, and so does
    /// what comes.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
        self.closed.store(true, Ordering::Release);
        self.over.notify(usize::MAX);
        for tracked in self.connections() {
            tracked.connection.fail();
        }
    }

    /// Takes leave on all connections.
    pub(super) async fn close(&self) {
        self.closed.store(true, Ordering::Release);
        for slot in &self.slots {
            let state = slot.lock().clone();
            if let SlotState::Connected(tracked) = state {
                tracked.connection.close().await;
            }
        }
    }
}

/// What a future gives within a time.
async fn within<T>(limit: Duration, future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    before(lane::sleep(limit), future).await
}

/// What a future gives before another one ends.
async fn before<T>(
    end: impl Future<Output = ()>,
    mut future: Pin<&mut impl Future<Output = T>>,
) -> Option<T> {
    let mut end = pin!(end);
    poll_fn(|context| {
        if let Poll::Ready(value) = future.as_mut().poll(context) {
            return Poll::Ready(Some(value));
        }
        end.as_mut().poll(context).map(|()| None)
    })
    .await
}
