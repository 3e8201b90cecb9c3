//! One connection in its transmission phase: any number of requests at once, from
//! any lane.
//!
//! No task belongs to the connection, so it needs no lane of its own. Of those who
//! wait for an answer one *leads*: it receives, and hands each answer to its
//! request, until its own is there; then another one leads. Likewise one of those
//! who have something to send sends for all.
//!
//! Invariants:
//! - Every request that was let in ends once: answered, or lost with the connection.
//! - A payload belongs to the sender from the moment it is taken out of its request
//!   until the send has ended, and a read's buffers to the leader while it fills
//!   them; a request ends only when it has its buffers back.
//! - A leader or sender that is dropped halfway leaves bytes in an unknown state: the
//!   connection is over.
//! - The lock is never held across an await.

#[cfg(all(test, shuttle))]
mod interleavings;
mod receiving;
mod sending;

use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::net::Shutdown;
use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use event_listener::IntoNotification;

use super::super::channel::Channel;
use super::super::proto;
use super::super::receive_buffer::ReceiveBuffer;
use super::super::reply_decode::{Coverage, StatusExtent};
use super::super::request::{Framing, RequestHeader};
use super::handshake::Session;
use vellum_io::Buffers;
use vellum_io::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use vellum_io::sync::{Event, Mutex, MutexGuard};

/// Most requests in flight; others wait for their turn.
const MAX_REQUESTS: usize = if cfg!(shuttle) { 3 } else { 64 };

/// A request.
#[derive(Debug)]
pub struct Request {
    /// `CMD_*`.
    pub command: u16,
    /// `CMD_FLAG_*`.
    pub flags: u16,
    /// Offset in bytes.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// What a write carries, or a read fills: as long as the request.
    pub buffers: Buffers,
}

/// The success of a request.
#[derive(Debug)]
pub struct Reply {
    /// The request's buffers.
    pub buffers: Buffers,
    /// What a block status request was told.
    pub status: Option<StatusExtent>,
}

/// How a request has ended.
#[derive(Debug)]
pub enum Outcome {
    /// Done.
    Done(Reply),
    /// The server says that it has failed, with one of the protocol's numbers.
    Failed(u32),
    /// The connection is gone, and the request may or may not have been carried out.
    /// A write gets its buffers back.
    Lost(Option<Buffers>),
}

/// A connection in use.
#[derive(Debug)]
pub struct Connection {
    channel: Channel,
    session: Session,
    state: Mutex<State>,
    /// As [`State::broken`], for those who only ask.
    broken: AtomicBool,
    /// How often something has gone out or come in.
    transfers: AtomicU64,
    /// A request has left, or the connection is over.
    left: Event,
}

#[derive(Debug)]
struct State {
    next_cookie: u64,
    /// In the order in which they came in.
    waiting: BTreeMap<u64, InFlight>,
    outbox: VecDeque<Outgoing>,
    /// Somebody is sending.
    sending: bool,
    /// What was received; not here while somebody leads.
    input: Option<ReceiveBuffer>,
    broken: bool,
}

/// A request's header on its way out.
#[derive(Debug)]
struct Outgoing {
    cookie: u64,
    header: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sending {
    Queued,
    /// The sender has the payload.
    Running,
    Done,
}

/// A request in flight.
#[derive(Debug)]
struct InFlight {
    command: u16,
    range: Range<u64>,
    buffers: Option<Buffers>,
    coverage: Coverage,
    status: Option<StatusExtent>,
    error: Option<u32>,
    sending: Sending,
    answered: bool,
    /// Nobody waits for it any more.
    abandoned: bool,
    waker: Option<Waker>,
}

/// What one who waits does next.
enum NextStep {
    End(Outcome),
    Lead(ReceiveBuffer),
}

/// What the end of a request brings about.
#[must_use = "others may wait for it"]
enum Notification {
    /// Not yet.
    Nothing,
    Wake(Waker),
    /// Nobody waited for it: there is a slot for another one.
    Left,
}

impl Connection {
    /// A connection after its handshake.
    pub fn new(channel: Channel, input: ReceiveBuffer, session: Session) -> Arc<Self> {
        Arc::new(Connection {
            channel,
            session,
            state: Mutex::new(State {
                next_cookie: 1,
                waiting: BTreeMap::new(),
                outbox: VecDeque::new(),
                sending: false,
                input: Some(input),
                broken: false,
            }),
            broken: AtomicBool::new(false),
            transfers: AtomicU64::new(0),
            left: Event::new(),
        })
    }

    /// What was agreed on.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Whether the connection is gone.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    /// How often something has gone out or come in, if somebody waits for an answer.
    pub fn progress(&self) -> Option<u64> {
        let is_waited_for = !self.lock().waiting.is_empty();
        is_waited_for.then(|| self.transfers.load(Ordering::Relaxed))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Makes a request and waits for its end.
    pub async fn ask(&self, question: Request) -> Outcome {
        let cookie = match self.enter(question).await {
            Ok(cookie) => cookie,
            Err(buffers) => return Outcome::Lost(Some(buffers)),
        };
        let _ticket = RequestGuard {
            connection: self,
            cookie,
        };
        self.send_queued().await;
        loop {
            match poll_fn(|context| self.turn(cookie, context)).await {
                NextStep::End(outcome) => return outcome,
                NextStep::Lead(input) => self.lead(cookie, input).await,
            }
        }
    }

    /// Takes leave, and ends the connection. Nothing may be in flight.
    pub async fn close(&self) {
        let header = RequestHeader {
            flags: 0,
            command: proto::CMD_DISC,
            cookie: 0,
            offset_bytes: 0,
            len_bytes: 0,
        };
        let mut bytes = Vec::new();
        header.encode(self.session.framing, &mut bytes);
        if !self.is_broken() {
            // A server that is gone already needs no farewell.
            let _ = self.channel.send_bytes(&bytes).await;
            self.channel.finish().await;
        }
        self.fail();
    }

    /// Waits for a free slot and takes it; gives the buffers back if the connection is gone.
    async fn enter(&self, question: Request) -> Result<u64, Buffers> {
        loop {
            let left = {
                let mut state = self.lock();
                if state.broken {
                    return Err(question.buffers);
                }
                if state.waiting.len() < MAX_REQUESTS {
                    return Ok(state.admit(question, self.session.framing));
                }
                self.left.listen()
            };
            left.await;
        }
    }

    /// Tells those whom the end of a request concerns; call it without the lock.
    fn announce(&self, settled: Notification) {
        match settled {
            Notification::Nothing => {}
            Notification::Wake(waker) => waker.wake(),
            Notification::Left => drop(self.left.notify(1.additional())),
        }
    }

    /// Ends the connection: everybody learns of it.
    pub fn fail(&self) {
        let mut state = self.lock();
        state.broken = true;
        self.broken.store(true, Ordering::SeqCst);
        let wakers: Vec<Waker> = state
            .waiting
            .values_mut()
            .filter_map(|waiting| waiting.waker.take())
            .collect();
        drop(state);
        // A send or receive that waits for a silent peer ends with this.
        let _ = self.channel.shutdown(Shutdown::Both);
        wakers.into_iter().for_each(Waker::wake);
        self.left.notify(usize::MAX);
    }

    fn turn(&self, cookie: u64, context: &mut Context<'_>) -> Poll<NextStep> {
        let mut state = self.lock();
        let broken = state.broken;
        let Some(waiting) = state.waiting.get_mut(&cookie) else {
            // It cannot be gone while it is asked for.
            return Poll::Ready(NextStep::End(Outcome::Lost(None)));
        };
        let has_buffers = waiting.sending != Sending::Running;
        if has_buffers && (waiting.answered && waiting.sending == Sending::Done || broken) {
            let outcome = state.waiting.remove(&cookie).map(InFlight::end);
            let next = state.next_leader();
            drop(state);
            next.into_iter().for_each(Waker::wake);
            self.left.notify(1.additional());
            return Poll::Ready(NextStep::End(outcome.unwrap_or(Outcome::Lost(None))));
        }
        if !broken
            && !waiting.answered
            && let Some(input) = state.input.take()
        {
            return Poll::Ready(NextStep::Lead(input));
        }
        if let Some(waiting) = state.waiting.get_mut(&cookie) {
            waiting.waker = Some(context.waker().clone());
        }
        Poll::Pending
    }
}

impl State {
    /// Lets a request in.
    fn admit(&mut self, question: Request, framing: Framing) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut header = Vec::with_capacity(framing.request_header_bytes());
        let head = RequestHeader {
            flags: question.flags,
            command: question.command,
            cookie,
            offset_bytes: question.offset_bytes,
            len_bytes: question.len_bytes,
        };
        head.encode(framing, &mut header);
        self.outbox.push_back(Outgoing { cookie, header });
        let range = question.offset_bytes..question.offset_bytes + question.len_bytes;
        let waiting = InFlight {
            command: question.command,
            coverage: Coverage::new(range.clone()),
            range,
            buffers: Some(question.buffers),
            status: None,
            error: None,
            sending: Sending::Queued,
            answered: false,
            abandoned: false,
            waker: None,
        };
        self.waiting.insert(cookie, waiting);
        cookie
    }

    /// Who should receive, if nobody does: the one that has waited longest.
    fn next_leader(&mut self) -> Option<Waker> {
        if self.input.is_none() || self.broken {
            return None;
        }
        self.waiting
            .values_mut()
            .filter(|waiting| !waiting.answered)
            .find_map(|waiting| waiting.waker.take())
    }

    /// Forgets a request that has ended and that nobody waits for; finds the one who
    /// waits otherwise.
    fn complete(&mut self, cookie: u64) -> Notification {
        let ended = |waiting: &&mut InFlight| waiting.answered && waiting.sending == Sending::Done;
        let Some(waiting) = self.waiting.get_mut(&cookie).filter(ended) else {
            return Notification::Nothing;
        };
        if waiting.abandoned {
            self.waiting.remove(&cookie);
            return Notification::Left;
        }
        waiting
            .waker
            .take()
            .map_or(Notification::Nothing, Notification::Wake)
    }
}

impl InFlight {
    fn end(self) -> Outcome {
        if !self.answered || self.sending != Sending::Done {
            return Outcome::Lost(self.buffers);
        }
        match (self.error, self.buffers) {
            (Some(error), _) => Outcome::Failed(error),
            (None, Some(buffers)) => Outcome::Done(Reply {
                buffers,
                status: self.status,
            }),
            // A send that failed kept them.
            (None, None) => Outcome::Lost(None),
        }
    }
}

/// A request's place, given up when nobody waits any more.
struct RequestGuard<'a> {
    connection: &'a Connection,
    cookie: u64,
}

impl Drop for RequestGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.connection.lock();
        let Some(waiting) = state.waiting.get_mut(&self.cookie) else {
            return;
        };
        waiting.abandoned = true;
        waiting.waker = None;
        let settled = state.complete(self.cookie);
        let next = state.next_leader();
        drop(state);
        self.connection.announce(settled);
        next.into_iter().for_each(Waker::wake);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;
    use vellum_io::lane::net::Stream;
    use vellum_io::lane::{block_on, yield_now};

    fn flush() -> Request {
        Request {
            command: proto::CMD_FLUSH,
            flags: 0,
            offset_bytes: 0,
            len_bytes: 0,
            buffers: Buffers::new(),
        }
    }

    fn take(peer: &mut UnixStream) -> [u8; 8] {
        let mut head = [0; 28];
        peer.read_exact(&mut head).expect("a request");
        head[8..16].try_into().expect("eight bytes")
    }

    fn answer(peer: &mut UnixStream, cookie: [u8; 8]) {
        let magic = proto::SIMPLE_REPLY_MAGIC.to_be_bytes();
        let reply = [&magic[..], &[0; 4], &cookie].concat();
        peer.write_all(&reply).expect("somebody listens");
    }

    #[test]
    fn the_room_of_requests_that_nobody_waits_for_is_taken_by_others() {
        let (ours, mut peer) = UnixStream::pair().expect("sockets");
        peer.set_read_timeout(Some(Duration::from_secs(10)))
            .expect("a socket");
        // Answers the second request last, after one for which there was no slot at first.
        let server = std::thread::spawn(move || {
            let mut others: Vec<_> = (0..MAX_REQUESTS).map(|_| take(&mut peer)).collect();
            let second = others.remove(1);
            others
                .into_iter()
                .for_each(|cookie| answer(&mut peer, cookie));
            let late = take(&mut peer);
            answer(&mut peer, late);
            answer(&mut peer, second);
        });
        let session = Session {
            framing: Framing::Simple,
            size_bytes: 512,
            flags: proto::FLAG_HAS_FLAGS | proto::FLAG_SEND_FLUSH,
            block_sizes: None,
            context: None,
        };
        block_on(async {
            let channel = Channel::from(Stream::from_fd(ours.into()));
            let connection = Connection::new(channel, ReceiveBuffer::new(), session);
            let mut asked: Vec<_> = (0..MAX_REQUESTS)
                .map(|_| Box::pin(connection.ask(flush())))
                .collect();
            // The first one sends for all, the second one receives for all.
            for _ in 0..100 {
                for one in &mut asked {
                    assert!(one.now_or_never().is_none());
                }
                let sent = |waiting: &InFlight| waiting.sending == Sending::Done;
                if connection.lock().waiting.values().all(sent) {
                    break;
                }
                yield_now().await;
            }
            let mut second = asked.swap_remove(1);
            let mut late = Box::pin(connection.ask(flush()));
            assert!(
                (&mut late).now_or_never().is_none(),
                "there is no free slot"
            );
            drop(asked);
            let both = futures_util::future::join(&mut late, &mut second);
            let (late, second) = both.await;
            assert!(matches!(late, Outcome::Done(_)), "{late:?}");
            assert!(matches!(second, Outcome::Done(_)), "{second:?}");
        });
        server.join().expect("all was asked");
    }
}
