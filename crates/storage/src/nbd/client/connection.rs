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

use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::net::Shutdown;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use event_listener::Event;

use super::super::answer::{
    Chunk, Coverage, DATA_OFFSET_BYTES, MAGIC_BYTES, MAX_CHUNK_BYTES, ReplyHead, StatusExtent,
    data_range,
};
use super::super::channel::Channel;
use super::super::input::{Gone, Input};
use super::super::proto;
use super::super::request::{Framing, RequestHeader};
use super::handshake::Session;
use super::pieces::cut;
use crate::{Buffer, Buffers, lane};

/// Most requests in flight; others wait for their turn.
const MAX_REQUESTS: usize = 64;
/// A batch to send is closed once it holds so many bytes, or pieces.
const MAX_BATCH_BYTES: usize = 1 << 20;
const MAX_BATCH_PIECES: usize = 256;

/// A request.
#[derive(Debug)]
pub struct Question {
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
pub struct Answer {
    /// The request's buffers.
    pub buffers: Buffers,
    /// What a block status request was told.
    pub status: Option<StatusExtent>,
}

/// How a request has ended.
#[derive(Debug)]
pub enum Outcome {
    /// Done.
    Done(Answer),
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
    /// A request has left, or the connection is over.
    left: Event,
}

#[derive(Debug)]
struct State {
    next_cookie: u64,
    /// In the order in which they came in.
    waiting: BTreeMap<u64, Waiting>,
    outbox: VecDeque<Outgoing>,
    /// Somebody is sending.
    sending: bool,
    /// What was received; not here while somebody leads.
    input: Option<Input>,
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
struct Waiting {
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
enum Turn {
    End(Outcome),
    Lead(Input),
}

impl Connection {
    /// A connection after its handshake.
    pub fn new(channel: Channel, input: Input, session: Session) -> Arc<Self> {
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
            left: Event::new(),
        })
    }

    /// What was agreed on.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Whether the connection is gone.
    pub fn is_broken(&self) -> bool {
        self.lock().broken
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a request and waits for its end.
    pub async fn ask(&self, question: Question) -> Outcome {
        let cookie = match self.enter(question).await {
            Ok(cookie) => cookie,
            Err(buffers) => return Outcome::Lost(Some(buffers)),
        };
        let _ticket = Ticket {
            connection: self,
            cookie,
        };
        self.send_queued().await;
        loop {
            match poll_fn(|context| self.turn(cookie, context)).await {
                Turn::End(outcome) => return outcome,
                Turn::Lead(input) => self.lead(cookie, input).await,
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

    /// Waits for room and takes it; gives the buffers back if the connection is gone.
    async fn enter(&self, question: Question) -> Result<u64, Buffers> {
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

    /// Ends the connection: everybody learns of it.
    fn fail(&self) {
        let mut state = self.lock();
        state.broken = true;
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

    fn turn(&self, cookie: u64, context: &mut Context<'_>) -> Poll<Turn> {
        let mut state = self.lock();
        let broken = state.broken;
        let Some(waiting) = state.waiting.get_mut(&cookie) else {
            // It cannot be gone while it is asked for.
            return Poll::Ready(Turn::End(Outcome::Lost(None)));
        };
        let has_buffers = waiting.sending != Sending::Running;
        if has_buffers && (waiting.answered && waiting.sending == Sending::Done || broken) {
            let outcome = state.waiting.remove(&cookie).map(Waiting::end);
            let next = state.next_leader();
            drop(state);
            next.into_iter().for_each(Waker::wake);
            self.left.notify(1);
            return Poll::Ready(Turn::End(outcome.unwrap_or(Outcome::Lost(None))));
        }
        if !broken
            && !waiting.answered
            && let Some(input) = state.input.take()
        {
            return Poll::Ready(Turn::Lead(input));
        }
        if let Some(waiting) = state.waiting.get_mut(&cookie) {
            waiting.waker = Some(context.waker().clone());
        }
        Poll::Pending
    }
}

impl State {
    /// Lets a request in.
    fn admit(&mut self, question: Question, framing: Framing) -> u64 {
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
        let waiting = Waiting {
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

    /// Forgets a request that has ended and that nobody waits for; wakes the one who
    /// waits otherwise.
    fn settle(&mut self, cookie: u64) -> Option<Waker> {
        let waiting = self.waiting.get_mut(&cookie)?;
        if !waiting.answered || waiting.sending != Sending::Done {
            return None;
        }
        if waiting.abandoned {
            self.waiting.remove(&cookie);
            return None;
        }
        waiting.waker.take()
    }
}

impl Waiting {
    fn end(self) -> Outcome {
        if !self.answered || self.sending != Sending::Done {
            return Outcome::Lost(self.buffers);
        }
        match (self.error, self.buffers) {
            (Some(error), _) => Outcome::Failed(error),
            (None, Some(buffers)) => Outcome::Done(Answer {
                buffers,
                status: self.status,
            }),
            // A send that failed kept them.
            (None, None) => Outcome::Lost(None),
        }
    }
}

/// A request's place, given up when nobody waits any more.
struct Ticket<'a> {
    connection: &'a Connection,
    cookie: u64,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut state = self.connection.lock();
        let Some(waiting) = state.waiting.get_mut(&self.cookie) else {
            return;
        };
        waiting.abandoned = true;
        waiting.waker = None;
        state.settle(self.cookie);
        let next = state.next_leader();
        drop(state);
        next.into_iter().for_each(Waker::wake);
        self.connection.left.notify(1);
    }
}

// Sending.

/// One who sends for all; dropped halfway, it ends the connection.
struct Sender<'a> {
    connection: &'a Connection,
    done: bool,
}

impl Drop for Sender<'_> {
    fn drop(&mut self) {
        if !self.done {
            let mut state = self.connection.lock();
            state.sending = false;
            let running = state.waiting.values_mut();
            for waiting in running.filter(|waiting| waiting.sending == Sending::Running) {
                waiting.sending = Sending::Done;
            }
            drop(state);
            self.connection.fail();
        }
    }
}

impl Connection {
    /// Sends what is to be sent, unless somebody does that already.
    async fn send_queued(&self) {
        {
            let mut state = self.lock();
            if state.sending || state.outbox.is_empty() {
                return;
            }
            state.sending = true;
        }
        let mut sender = Sender {
            connection: self,
            done: false,
        };
        // Requests that others make at this moment go along.
        lane::yield_now().await;
        let mut batch = Vec::new();
        while let Some(pieces) = self.next_batch(&mut batch) {
            let (pieces, result) = self.channel.send(pieces).await;
            self.give_back(&mut batch, pieces);
            if result.is_err() {
                self.fail();
            }
        }
        sender.done = true;
    }

    /// The next pieces to send, and how many belong to each request; `None` when
    /// there are none, and the caller sends no longer.
    fn next_batch(&self, batch: &mut Vec<(u64, usize)>) -> Option<Buffers> {
        let mut state = self.lock();
        let state = &mut *state;
        if state.broken || state.outbox.is_empty() {
            state.sending = false;
            return None;
        }
        let mut heads = Vec::new();
        let mut payloads = Vec::new();
        let (mut bytes, mut count) = (0, 0);
        while bytes < MAX_BATCH_BYTES && count < MAX_BATCH_PIECES {
            let Some(outgoing) = state.outbox.pop_front() else {
                break;
            };
            let mut payload = Buffers::new();
            if let Some(waiting) = state.waiting.get_mut(&outgoing.cookie) {
                waiting.sending = Sending::Running;
                if waiting.command == proto::CMD_WRITE {
                    payload = waiting.buffers.take().unwrap_or_default();
                }
            }
            bytes += payload.iter().map(|piece| piece.len()).sum::<usize>();
            count += 1 + payload.len();
            batch.push((outgoing.cookie, payload.len()));
            heads.push(outgoing.header);
            payloads.push(payload);
        }
        Some(gather(&heads, payloads))
    }

    /// Gives the payloads that were sent back to their requests.
    fn give_back(&self, batch: &mut Vec<(u64, usize)>, pieces: Buffers) {
        let mut pieces = pieces.into_iter();
        let mut wakers = Vec::new();
        let mut state = self.lock();
        let broken = state.broken;
        for (cookie, count) in batch.drain(..) {
            pieces.next();
            let payload: Buffers = pieces.by_ref().take(count).collect();
            if let Some(waiting) = state.waiting.get_mut(&cookie) {
                waiting.sending = Sending::Done;
                if waiting.command == proto::CMD_WRITE && payload.len() == count {
                    waiting.buffers = Some(payload);
                }
                // Whoever met the end of the connection waits only for its buffers.
                wakers.extend(waiting.waker.take_if(|_| broken));
            }
            wakers.extend(state.settle(cookie));
        }
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// Headers and payloads in turns, the headers in one block of memory.
fn gather(heads: &[Vec<u8>], payloads: Vec<Buffers>) -> Buffers {
    let mut block = Buffer::copy_of(&heads.concat());
    let mut pieces = Buffers::new();
    for (head, payload) in heads.iter().zip(payloads) {
        pieces.push(block.split_to(head.len()));
        pieces.extend(payload);
    }
    pieces
}

// Receiving.

/// One who receives for all; dropped halfway, it ends the connection.
struct Leader<'a> {
    connection: &'a Connection,
    done: bool,
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.connection.fail();
        }
    }
}

impl Connection {
    /// Receives until the request `cookie` is answered, or the connection is gone.
    async fn lead(&self, cookie: u64, mut input: Input) {
        let mut leader = Leader {
            connection: self,
            done: false,
        };
        while !self.is_answered(cookie) {
            if self.take_message(&mut input).await.is_err() {
                // Dropping the leader ends the connection.
                return;
            }
        }
        leader.done = true;
        let mut state = self.lock();
        state.input = Some(input);
        let next = state.next_leader();
        drop(state);
        next.into_iter().for_each(Waker::wake);
    }

    fn is_answered(&self, cookie: u64) -> bool {
        let state = self.lock();
        let waiting = state.waiting.get(&cookie);
        waiting.is_none_or(|waiting| waiting.answered)
    }

    async fn take_message(&self, input: &mut Input) -> Result<(), Gone> {
        let framing = self.session.framing;
        let unknown = Gone::Broken("a reply with a wrong magic number");
        input.need(&self.channel, MAGIC_BYTES).await?;
        let magic = *input.available().first_chunk().ok_or(unknown.clone())?;
        let head_bytes = ReplyHead::len_bytes(framing, magic).ok_or(unknown.clone())?;
        input.need(&self.channel, head_bytes).await?;
        let head = ReplyHead::decode(framing, input.available()).ok_or(unknown)?;
        input.consume(head_bytes);
        match head {
            ReplyHead::Simple { error, cookie } => self.take_simple(input, error, cookie).await,
            ReplyHead::Chunk {
                last,
                kind: proto::REPLY_TYPE_OFFSET_DATA,
                cookie,
                len_bytes,
            } => {
                input
                    .need(&self.channel, DATA_OFFSET_BYTES as usize)
                    .await?;
                let range = data_range(input.available(), len_bytes)
                    .ok_or(Gone::Broken("a malformed chunk of data"))?;
                input.consume(DATA_OFFSET_BYTES as usize);
                self.fill(input, cookie, range).await?;
                self.end_of_chunk(cookie, last)
            }
            ReplyHead::Chunk {
                last,
                kind,
                cookie,
                len_bytes,
            } => {
                if len_bytes > MAX_CHUNK_BYTES {
                    return Err(Gone::Broken("a chunk that is too long"));
                }
                let len_bytes = len_bytes as usize;
                input.need(&self.channel, len_bytes).await?;
                let chunk = Chunk::decode(kind, &input.available()[..len_bytes])
                    .ok_or(Gone::Broken("a malformed chunk"))?;
                input.consume(len_bytes);
                self.take_chunk(cookie, chunk)?;
                self.end_of_chunk(cookie, last)
            }
        }
    }

    async fn take_simple(&self, input: &mut Input, error: u32, cookie: u64) -> Result<(), Gone> {
        let (command, range) =
            self.with(cookie, |waiting| (waiting.command, waiting.range.clone()))?;
        match command {
            _ if error != 0 => self.with(cookie, |waiting| waiting.error = Some(error))?,
            proto::CMD_READ if self.session.framing == Framing::Simple => {
                self.fill(input, cookie, range).await?;
            }
            proto::CMD_READ | proto::CMD_BLOCK_STATUS => {
                return Err(Gone::Broken("a simple reply where chunks were agreed on"));
            }
            _ => {}
        }
        self.end_of_chunk(cookie, true)
    }

    /// Looks at a request that an answer names.
    fn with<T>(&self, cookie: u64, look: impl FnOnce(&mut Waiting) -> T) -> Result<T, Gone> {
        let mut state = self.lock();
        match state.waiting.get_mut(&cookie) {
            Some(waiting) if !waiting.answered => Ok(look(waiting)),
            _ => Err(Gone::Broken("an answer to nothing")),
        }
    }

    fn take_chunk(&self, cookie: u64, chunk: Chunk) -> Result<(), Gone> {
        let context = self.session.context;
        self.with(cookie, |waiting| match chunk {
            Chunk::Nothing => Ok(()),
            Chunk::Hole(range) => waiting.zero(range),
            Chunk::Status { context: id, first }
                if waiting.command == proto::CMD_BLOCK_STATUS && context == Some(id) =>
            {
                waiting.status.get_or_insert(first);
                Ok(())
            }
            Chunk::Status { .. } => Err(Gone::Broken("a status that nobody asked for")),
            Chunk::Failed { error, .. } => {
                waiting.error.get_or_insert(error);
                Ok(())
            }
        })?
    }

    /// Takes the last chunk of an answer for its end.
    fn end_of_chunk(&self, cookie: u64, last: bool) -> Result<(), Gone> {
        if !last {
            return Ok(());
        }
        self.with(cookie, Waiting::finish)??;
        let waker = self.lock().settle(cookie);
        waker.into_iter().for_each(Waker::wake);
        Ok(())
    }

    /// Receives a part of what a read has asked for.
    async fn fill(&self, input: &mut Input, cookie: u64, range: Range<u64>) -> Result<(), Gone> {
        let (buffers, at) = self.with(cookie, |waiting| waiting.take_for(&range))??;
        let mut cut = cut(buffers, at, (range.end - range.start) as usize);
        for piece in &mut cut.part {
            let empty = std::mem::replace(piece, Buffer::zeroed(0));
            *piece = input.fill(&self.channel, empty).await?;
        }
        self.with(cookie, |waiting| waiting.buffers = Some(cut.rejoin()))
    }
}

impl Waiting {
    /// The buffers, and where in them `range` begins, for a part of a read that comes now.
    fn take_for(&mut self, range: &Range<u64>) -> Result<(Buffers, usize), Gone> {
        if self.command != proto::CMD_READ || self.coverage.add(range.clone()).is_none() {
            return Err(Gone::Broken("data that was not asked for"));
        }
        let buffers = self
            .buffers
            .take()
            .ok_or(Gone::Broken("data for nothing"))?;
        Ok((buffers, (range.start - self.range.start) as usize))
    }

    fn zero(&mut self, range: Range<u64>) -> Result<(), Gone> {
        let (buffers, at) = self.take_for(&range)?;
        let mut cut = cut(buffers, at, (range.end - range.start) as usize);
        cut.part.iter_mut().for_each(|piece| piece.fill(0));
        self.buffers = Some(cut.rejoin());
        Ok(())
    }

    /// Ends the request: what it needs must have come.
    fn finish(&mut self) -> Result<(), Gone> {
        if self.error.is_none() {
            match self.command {
                proto::CMD_READ if !self.coverage.is_whole() => {
                    return Err(Gone::Broken("a read that was answered in part"));
                }
                proto::CMD_BLOCK_STATUS if self.status.is_none() => {
                    self.error = Some(proto::EIO);
                }
                _ => {}
            }
        }
        self.answered = true;
        Ok(())
    }
}
