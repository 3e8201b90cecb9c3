//! The server: takes clients in, spreads them over lanes, and ends in order.
//!
//! Invariant: clients leave [`RESERVED_DESCRIPTORS`] of the process to others: guests, monitors and disks
//! that are opened.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use event_listener::Event;
use futures_util::future::{Either, select};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use tracing::trace;
use vellum_io::lane::{self, Remote, net::Stream};
use vellum_io::spawn;
use vellum_nbd::client::handshake::TLS_OPERATION;
use vellum_nbd::{Channel, Upgrade};

use super::client_handle::ClientHandle;
use super::connection;
use super::exports::Exports;
use super::lanes::{self, LaneSlot, Lanes};
use super::listener::Listener;
use super::negotiate::negotiate;
use super::sessions::FAREWELL;
use super::stop::Stop;
use vellum_nbd::receive_buffer::{Disconnect, ReceiveBuffer};

/// Pause after a failed accept: the cause (no file descriptors) will not go at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Descriptors that no client gets, as long as that leaves most of them to clients.
const RESERVED_DESCRIPTORS: u64 = 64;

/// When a client was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Before it had chosen an export.
    Negotiation,
    /// While it used one.
    Transmission,
}

/// Where a server tells what it makes of its clients.
pub type Log = Arc<dyn Fn(Phase, &str) + Send + Sync>;

/// How a server treats its clients.
#[derive(Clone)]
pub struct ServerOptions {
    /// Most connections at once; others wait in the socket's queue. 0: no limit.
    pub max_connections: usize,
    /// Keep running when the last client that chose an export has left.
    pub persistent: bool,
    /// How long a client may take to choose an export; `None`: forever.
    pub handshake_limit: Option<Duration>,
    /// Most threads that serve connections, the caller's included.
    pub max_lanes: usize,
    /// Lanes of the caller's that serve connections beside the one it runs on, instead of
    /// threads that are started for that. They must run until the server has ended.
    pub lanes: Option<Vec<Remote>>,
    /// Insists on TLS.
    pub tls: Option<Arc<dyn Upgrade>>,
    /// Receives a line for each client that breaks the protocol.
    pub log: Option<Log>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            max_connections: 1,
            persistent: false,
            handshake_limit: Some(Duration::from_secs(10)),
            max_lanes: std::thread::available_parallelism().map_or(1, usize::from),
            lanes: None,
            tls: None,
            log: None,
        }
    }
}

impl fmt::Debug for ServerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerOptions")
            .field("max_connections", &self.max_connections)
            .field("persistent", &self.persistent)
            .field("handshake_limit", &self.handshake_limit)
            .field("max_lanes", &self.max_lanes)
            .finish_non_exhaustive()
    }
}

/// What the threads of a server share.
struct Shared {
    exports: Exports,
    options: ServerOptions,
    stop: Stop,
    clients: Mutex<Clients>,
    /// A connection has ended.
    ended: Event,
}

/// The open connections, to hang up from outside.
#[derive(Default)]
struct Clients {
    next: u64,
    open: BTreeMap<u64, ClientHandle>,
}

/// Serves `exports` on `listeners` until `stop` is requested, or (unless
/// persistent) the last client has left. Clients then get their last replies;
/// everything that was begun on the devices is complete on return. Must run
/// inside a lane.
pub async fn serve(
    listeners: Vec<Listener>,
    exports: Exports,
    options: ServerOptions,
    stop: &Stop,
) {
    let lanes = match &options.lanes {
        None => Lanes::new(options.max_lanes),
        Some(others) => Lanes::of(others),
    };
    let lanes = Rc::new(RefCell::new(lanes));
    let shared = Arc::new(Shared {
        exports,
        options,
        stop: stop.clone(),
        clients: Mutex::default(),
        ended: Event::new(),
    });
    let acceptors: Vec<_> = listeners
        .into_iter()
        .map(|listener| spawn(accept_clients(listener, shared.clone(), lanes.clone())))
        .collect();
    stop.wait().await;
    for acceptor in acceptors {
        acceptor.await;
    }
    shared.hang_up(Shutdown::Read);
    let farewell = lane::sleep(FAREWELL);
    if let Either::Right(_) = select(pin!(shared.all_gone()), pin!(farewell)).await {
        shared.hang_up(Shutdown::Both);
        shared.all_gone().await;
    }
    lanes::end(&lanes).await;
}

async fn accept_clients(listener: Listener, shared: Arc<Shared>, lanes: Rc<RefCell<Lanes>>) {
    loop {
        let next = pin!(next_client(&listener, &shared));
        let Either::Left((client, _)) = select(next, pin!(shared.stop.wait())).await else {
            return;
        };
        let handle = ClientHandle::new(client.clone());
        let number = shared.register(handle.clone());
        trace!(name: "nbd_client_connected", client = number);
        let (remote, slot) = lanes.borrow_mut().take_slot();
        let shared = shared.clone();
        remote.spawn(move || serve_client(client, handle, shared, number, slot));
    }
}

/// Waits until another client may come in, and for the client.
async fn next_client(listener: &Listener, shared: &Shared) -> Stream {
    loop {
        shared.wait_for_slot().await;
        if !leaves_descriptors() {
            // Whoever has them closes some, which is not told.
            lane::sleep(ACCEPT_PAUSE).await;
            continue;
        }
        match listener.accept().await {
            Ok(client) => return client,
            Err(error) => {
                trace!(name: "nbd_accept_failed", error = %error);
                lane::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Whether enough descriptors are left to others when a client gets one.
fn leaves_descriptors() -> bool {
    let Some(most) = getrlimit(Resource::Nofile).current else {
        return true;
    };
    let reserved = RESERVED_DESCRIPTORS.min(most / 4);
    // A descriptor gets the lowest number that is free.
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    match rustix::fs::open(c"/", flags, Mode::empty()) {
        Ok(next) => next.as_raw_fd() as u64 + reserved < most,
        Err(Errno::MFILE | Errno::NFILE) => false,
        Err(_) => true,
    }
}

async fn serve_client(
    client: Stream,
    handle: ClientHandle,
    shared: Arc<Shared>,
    number: u64,
    slot: LaneSlot,
) {
    let negotiated = converse(client, handle, number, &shared).await;
    drop(slot);
    shared.unregister(number, negotiated);
}

/// The whole life of a connection; returns whether it got to an export.
async fn converse(client: Stream, handle: ClientHandle, number: u64, shared: &Shared) -> bool {
    let mut input = ReceiveBuffer::new();
    let channel = Channel::from(client.clone());
    let tls = shared.options.tls.as_deref();
    let handshake = negotiate(channel, &mut input, &shared.exports, tls);
    let agreement = match select(pin!(handshake), pin!(shared.patience())).await {
        Either::Left((result, _)) => result,
        Either::Right((gone, _)) => {
            // Whatever is being sent would wait for a client that does not read.
            let _ = client.shutdown(Shutdown::Both);
            Err(gone)
        }
    };
    match agreement {
        Ok(Some(agreement)) => {
            trace!(name: "nbd_negotiate_success", client = number, export = agreement.export.name);
            let _session = agreement.export.sessions.enter(number, handle.clone());
            let end = connection::serve(input, agreement, handle).await;
            trace!(name: "nbd_client_disconnected", client = number, reason = %end);
            if !matches!(end, Disconnect::Closed) {
                shared.log(Phase::Transmission, &end.to_string());
            }
            true
        }
        Ok(None) => {
            trace!(name: "nbd_client_left", client = number);
            false
        }
        // Nobody has done anything wrong.
        Err(_) if shared.stop.is_requested() => false,
        Err(gone) => {
            let reason = negotiation_failure(&gone);
            trace!(name: "nbd_negotiate_failed", client = number, reason);
            shared.log(Phase::Negotiation, &reason);
            false
        }
    }
}

/// What has ended a negotiation, in QEMU's words.
fn negotiation_failure(gone: &Disconnect) -> String {
    let what = "Failed to read opts magic";
    match gone {
        Disconnect::Closed => format!("{what}: Unexpected end-of-file before all data were read"),
        Disconnect::Failed(error) if error.operation() == TLS_OPERATION => {
            format!("{what}: {}", error.message())
        }
        Disconnect::Failed(error) => {
            format!("{what}: Unable to read from socket: {}", error.message())
        }
        other => other.to_string(),
    }
}

impl Shared {
    fn log(&self, phase: Phase, what: &str) {
        if let Some(log) = &self.options.log {
            log(phase, what);
        }
    }

    /// Waits until a client that has not chosen an export yet is to be given up; why.
    async fn patience(&self) -> Disconnect {
        let stopped = pin!(self.stop.wait());
        if let Some(limit) = self.options.handshake_limit {
            match select(pin!(lane::sleep(limit)), stopped).await {
                Either::Left(_) => return Disconnect::Broken("the handshake took too long"),
                Either::Right(_) => return Disconnect::Closed,
            }
        }
        stopped.await;
        Disconnect::Closed
    }

    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock()
    }

    fn has_room(&self) -> bool {
        let most = self.options.max_connections;
        most == 0 || self.clients().open.len() < most
    }

    /// Waits until another connection may be open.
    async fn wait_for_slot(&self) {
        while !self.has_room() {
            let ended = self.ended.listen();
            if !self.has_room() {
                ended.await;
            }
        }
    }

    async fn all_gone(&self) {
        while !self.clients().open.is_empty() {
            let ended = self.ended.listen();
            if !self.clients().open.is_empty() {
                ended.await;
            }
        }
    }

    fn register(&self, client: ClientHandle) -> u64 {
        let mut clients = self.clients();
        let number = clients.next;
        clients.next += 1;
        clients.open.insert(number, client);
        number
    }

    fn unregister(&self, number: u64, negotiated: bool) {
        let mut clients = self.clients();
        clients.open.remove(&number);
        let last = clients.open.is_empty();
        drop(clients);
        if last && negotiated && !self.options.persistent {
            self.stop.request();
        }
        self.ended.notify(usize::MAX);
    }

    /// Shuts all connections down, in one direction or both.
    fn hang_up(&self, how: Shutdown) {
        for client in self.clients().open.values() {
            client.hang_up(how);
        }
    }
}
