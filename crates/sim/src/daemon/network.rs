//! Connections between simulated machines: bytes arrive in pieces, when the seed says so.
//!
//! A connection is two pipes. What is sent is under way until a step of the network lets some
//! of it arrive; a sender waits while more than the pipe's space has not been received. Either
//! end may be closed, or a connection reset, at any moment.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::net::Shutdown;
use std::sync::Arc;
use std::task::{Poll, Waker};

use parking_lot::{Mutex, MutexGuard};
use vellum_daemon::{Failure, ServerEnvironment};
use vellum_export::nbd::Listener;
use vellum_io::executor::Remote;
use vellum_io::lane::net::{ListenerBackend, Stream, StreamBackend};
use vellum_io::{Buffer, Buffers, Error, Io, Result};
use vellum_nbd::client::{Address, Dial};

use super::lanes::BackgroundEvents;
use crate::rng::Rng;

const ECONNREFUSED: i32 = 111;
const ECONNRESET: i32 = 104;
const EPIPE: i32 = 32;
const EADDRINUSE: i32 = 98;

/// How a pipe ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Closed,
    Reset,
}

/// One direction of a connection.
#[derive(Debug)]
struct Pipe {
    under_way: VecDeque<u8>,
    arrived: VecDeque<u8>,
    free_bytes: usize,
    sent: u64,
    received: u64,
    /// Behind what is under way.
    end: Option<End>,
    /// The receiver has seen the end, once it has received the rest.
    ended: Option<End>,
    /// Nobody receives any more: what is sent is dropped.
    deaf: bool,
    /// The receiver is gone: senders learn of it.
    gone: bool,
    receiver: Option<Waker>,
    senders: Vec<Waker>,
}

impl Pipe {
    fn new(free_bytes: usize) -> Self {
        Pipe {
            under_way: VecDeque::new(),
            arrived: VecDeque::new(),
            free_bytes,
            sent: 0,
            received: 0,
            end: None,
            ended: None,
            deaf: false,
            gone: false,
            receiver: None,
            senders: Vec::new(),
        }
    }

    fn can_arrive(&self) -> bool {
        match self.under_way.is_empty() {
            true => self.end.is_some() && self.ended.is_none(),
            false => self.arrived.len() < self.free_bytes,
        }
    }

    fn arrive(&mut self, rng: &mut Rng) {
        if self.under_way.is_empty() {
            self.ended = self.end;
        } else {
            let most = (self.free_bytes - self.arrived.len()).min(self.under_way.len());
            let few = *rng.pick(&[40, 600, 10_000, usize::MAX, usize::MAX]);
            let count = rng.between(1, few.min(most) as u64) as usize;
            let count = if few == usize::MAX { most } else { count };
            self.arrived.extend(self.under_way.drain(..count));
        }
        self.wake();
    }

    fn wake(&mut self) {
        self.receiver.take().into_iter().for_each(Waker::wake);
        self.senders.drain(..).for_each(Waker::wake);
    }

    /// The sender ends it; what finds no space is lost.
    fn finish(&mut self, end: End) {
        if self.end.is_none() {
            let space = self.free_bytes.saturating_sub(self.arrived.len());
            self.under_way.truncate(space);
            self.end = Some(end);
        }
        self.wake();
    }

    /// The receiver receives no more than what has arrived.
    fn close_ears(&mut self) {
        self.deaf = true;
        self.under_way.clear();
        self.wake();
    }

    fn reset(&mut self) {
        self.under_way.clear();
        self.arrived.clear();
        self.end = Some(End::Reset);
        self.ended = self.end;
        self.gone = true;
        self.wake();
    }
}

#[derive(Debug, Default)]
struct Listening {
    waiting: VecDeque<Stream>,
    acceptor: Option<Waker>,
}

#[derive(Debug)]
struct State {
    rng: Rng,
    ports: BTreeMap<String, Listening>,
    /// By connection and direction; the client's is the first one.
    pipes: BTreeMap<(u64, bool), Pipe>,
    /// To which port each connection leads.
    led: BTreeMap<u64, String>,
    next: u64,
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Network>>> = const { RefCell::new(None) };
}

/// A program whose sockets are those of a network, and whose clients are served by lanes
/// that there are.
pub(super) fn server_environment(network: &Arc<Network>, lanes: Vec<Remote>) -> ServerEnvironment {
    CURRENT.set(Some(network.clone()));
    ServerEnvironment {
        listen_unix: |path| {
            let network = CURRENT.with_borrow(Clone::clone);
            let network = network.ok_or_else(|| Failure("there is no network".to_owned()))?;
            Ok(Listener::simulated(network.listen(path)?))
        },
        lanes: Some(lanes),
        ..ServerEnvironment::without_sockets()
    }
}

/// The network.
#[derive(Debug)]
pub(super) struct Network(Mutex<State>);

/// One end of a connection.
#[derive(Debug)]
struct Socket {
    network: Arc<Network>,
    connection: u64,
    is_client: bool,
}

/// A port that somebody listens on, until this is dropped.
#[derive(Debug)]
struct Open {
    network: Arc<Network>,
    name: String,
}

impl Network {
    pub(super) fn new(seed: u64) -> Arc<Network> {
        Arc::new(Network(Mutex::new(State {
            rng: Rng::new(seed),
            ports: BTreeMap::new(),
            pipes: BTreeMap::new(),
            led: BTreeMap::new(),
            next: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Listens on a port.
    pub(super) fn listen(self: &Arc<Self>, name: &str) -> Result<Arc<dyn ListenerBackend>> {
        let mut state = self.lock();
        if state.ports.contains_key(name) {
            return Err(Error::from_errno("listen", EADDRINUSE).target(name));
        }
        state.ports.insert(name.to_owned(), Listening::default());
        Ok(Arc::new(Open {
            network: self.clone(),
            name: name.to_owned(),
        }))
    }

    /// Connects to a port.
    pub(super) fn connect(self: &Arc<Self>, name: &str) -> Result<Stream> {
        let mut state = self.lock();
        if !state.ports.contains_key(name) {
            return Err(Error::from_errno("connect", ECONNREFUSED).target(name));
        }
        let connection = state.next;
        state.next += 1;
        for is_client in [true, false] {
            let free_bytes = *state.rng.pick(&[512, 4 << 10, 64 << 10, 256 << 10]);
            state
                .pipes
                .insert((connection, is_client), Pipe::new(free_bytes));
        }
        state.led.insert(connection, name.to_owned());
        let end = |is_client| {
            Stream::simulated(Arc::new(Socket {
                network: self.clone(),
                connection,
                is_client,
            }))
        };
        let (ours, theirs) = (end(true), end(false));
        if let Some(port) = state.ports.get_mut(name) {
            port.waiting.push_back(theirs);
            port.acceptor.take().into_iter().for_each(Waker::wake);
        }
        Ok(ours)
    }

    /// Resets connections that lead to a port: all of them, or one that the seed picks.
    pub(super) fn reset(&self, name: &str, all: bool) {
        let mut state = self.lock();
        let state = &mut *state;
        let mut chosen: Vec<u64> = Vec::new();
        for (connection, port) in &state.led {
            if port == name {
                chosen.push(*connection);
            }
        }
        if !all && !chosen.is_empty() {
            chosen = vec![*state.rng.pick(&chosen)];
        }
        for ((connection, _), pipe) in &mut state.pipes {
            if chosen.contains(connection) {
                pipe.reset();
            }
        }
    }
}

impl BackgroundEvents for Arc<Network> {
    fn in_flight(&self) -> bool {
        self.lock().pipes.values().any(Pipe::can_arrive)
    }

    fn step(&self) {
        let mut state = self.lock();
        let state = &mut *state;
        let pipes = &mut state.pipes;
        let count = pipes.values().filter(|pipe| pipe.can_arrive()).count();
        let chosen = state.rng.below(count as u64) as usize;
        let mut ready = pipes.values_mut().filter(|pipe| pipe.can_arrive());
        if let Some(pipe) = ready.nth(chosen) {
            pipe.arrive(&mut state.rng);
        }
    }
}

impl Dial for Network {
    fn dial(self: Arc<Self>, address: &Address) -> Io<Stream> {
        Io::ready(self.connect(&address.to_string()))
    }
}

impl ListenerBackend for Open {
    fn accept(self: Arc<Self>) -> Io<Stream> {
        Io::boxed(poll_fn(move |context| {
            let mut state = self.network.lock();
            let Some(port) = state.ports.get_mut(&self.name) else {
                return Poll::Ready(Err(Error::from_errno("accept", EPIPE)));
            };
            if let Some(stream) = port.waiting.pop_front() {
                return Poll::Ready(Ok(stream));
            }
            port.acceptor = Some(context.waker().clone());
            Poll::Pending
        }))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let port = self.network.lock().ports.remove(&self.name);
        // Streams that nobody has accepted close with it.
        drop(port);
    }
}

impl Socket {
    fn with<T>(&self, incoming: bool, act: impl FnOnce(&mut Pipe) -> T) -> Option<T> {
        let key = (self.connection, self.is_client != incoming);
        self.network.lock().pipes.get_mut(&key).map(act)
    }
}

impl StreamBackend for Socket {
    fn recv(self: Arc<Self>, buffer: Buffer) -> Io<(Buffer, usize)> {
        let mut buffer = Some(buffer);
        Io::boxed(poll_fn(move |context| {
            let received = self.with(true, |pipe| {
                let Some(bytes) = buffer.as_mut() else {
                    return Poll::Ready(Err(ECONNRESET));
                };
                let count = pipe.arrived.len().min(bytes.len());
                if count > 0 {
                    for (place, byte) in bytes.iter_mut().zip(pipe.arrived.drain(..count)) {
                        *place = byte;
                    }
                    pipe.received += count as u64;
                    pipe.senders.drain(..).for_each(Waker::wake);
                    return Poll::Ready(Ok(count));
                }
                match pipe.ended {
                    Some(End::Reset) => Poll::Ready(Err(ECONNRESET)),
                    Some(End::Closed) => Poll::Ready(Ok(0)),
                    None if pipe.deaf => Poll::Ready(Ok(0)),
                    None => {
                        pipe.receiver = Some(context.waker().clone());
                        Poll::Pending
                    }
                }
            });
            match received.unwrap_or(Poll::Ready(Err(ECONNRESET))) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(Ok(count)) => {
                    let bytes = buffer.take().unwrap_or_else(|| Buffer::zeroed(0));
                    Poll::Ready(Ok((bytes, count)))
                }
                Poll::Ready(Err(errno)) => Poll::Ready(Err(Error::from_errno("receive", errno))),
            }
        }))
    }

    fn send(self: Arc<Self>, buffers: Buffers) -> Io<(Buffers, Option<Error>)> {
        // As with the kernel, it goes on even if nobody waits for its end.
        let target = self.with(false, |pipe| {
            if pipe.end.is_none() && !pipe.gone {
                let bytes: usize = buffers.iter().map(|piece| piece.len()).sum();
                pipe.sent += bytes as u64;
                if !pipe.deaf {
                    buffers
                        .iter()
                        .for_each(|piece| pipe.under_way.extend(piece.iter()));
                }
            }
            pipe.sent
        });
        let target = target.unwrap_or_default();
        let mut buffers = Some(buffers);
        Io::boxed(poll_fn(move |context| {
            let sent = self.with(false, |pipe| {
                if pipe.end.is_some() || pipe.gone {
                    return Poll::Ready(Some(EPIPE));
                }
                let there = target.saturating_sub(pipe.received);
                if pipe.deaf || there <= pipe.free_bytes as u64 {
                    return Poll::Ready(None);
                }
                pipe.senders.push(context.waker().clone());
                Poll::Pending
            });
            sent.unwrap_or(Poll::Ready(Some(EPIPE))).map(|errno| {
                let error = errno.map(|errno| Error::from_errno("send", errno));
                Ok((buffers.take().unwrap_or_default(), error))
            })
        }))
    }

    fn has_peer_left(&self) -> bool {
        // As with the kernel, whatever has not been received yet.
        let ended = self.with(true, |pipe| pipe.ended.is_some() || pipe.gone);
        ended.unwrap_or(true)
    }

    fn shutdown(&self, how: Shutdown) {
        if how != Shutdown::Read {
            self.with(false, |pipe| pipe.finish(End::Closed));
        }
        if how != Shutdown::Write {
            self.with(true, Pipe::close_ears);
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Bytes that nobody received make it a reset, as with TCP.
        let unread = self.with(true, |pipe| !pipe.arrived.is_empty());
        let end = match unread {
            Some(true) => End::Reset,
            _ => End::Closed,
        };
        self.with(false, |pipe| pipe.finish(end));
        let other_is_gone = self.with(false, |pipe| pipe.gone);
        self.with(true, |pipe| {
            pipe.close_ears();
            pipe.arrived.clear();
            pipe.gone = true;
        });
        if other_is_gone == Some(true) {
            let mut state = self.network.lock();
            let connection = self.connection;
            state.pipes.retain(|(other, _), _| *other != connection);
            state.led.remove(&connection);
        }
    }
}
