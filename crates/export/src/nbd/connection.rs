//! The transmission phase of one connection: a reader that starts requests, any
//! number of requests in flight, and a sender that takes their replies out.
//!
//! Invariants:
//! - Every request that was let in by the window is answered exactly once (or the
//!   connection is over), and only its last reply leaves the window.
//! - Once the server has hung up no request begins. Long ones are carried out in pieces, of
//!   which none begins then, nor when the client has been gone for a while; what was begun
//!   ends before [`serve`] does.

use std::cell::Cell;
use std::net::Shutdown;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use futures_util::future::{Either, select};
use tracing::trace;
use vellum::BlockDevice;
use vellum_io::{Buffer, lane, spawn};
use vellum_nbd::Channel;
use vellum_storage::mutants::{self, Mutant};

use super::client_handle::ClientHandle;
use super::export::{Export, MetaContext};
use super::in_flight::InFlightLimit;
use super::perform;
use super::pieces;
use super::pool::Pool;
use super::reply_queue::{HeaderPool, Reply, ReplyQueue};
use super::sessions::FAREWELL;
use crate::accounting::{Operation, StartedRequest};
use vellum_nbd::proto;
use vellum_nbd::receive_buffer::{Disconnect, ReceiveBuffer};
use vellum_nbd::reply_encode::{ReplyHeader, ReplyTo};
use vellum_nbd::request::{Command, Framing, RequestHeader, SessionLimits};

/// Payloads of refused requests up to this many bytes are read and dropped, so
/// that the connection stays usable.
const MAX_SKIPPED_BYTES: u64 = 2 * proto::MAX_PAYLOAD_BYTES;

/// So many requests are begun one after the other, of those that have come, before other
/// connections have their turn: one with a deep queue delays one with a single request by no
/// more than that.
const TURN_REQUESTS: u32 = 16;

/// What the handshake agreed on.
#[derive(Debug)]
pub(super) struct NegotiatedSession {
    pub(super) channel: Channel,
    pub(super) export: Arc<Export>,
    pub(super) framing: Framing,
    pub(super) contexts: Vec<MetaContext>,
}

/// One connection in its transmission phase.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) agreement: NegotiatedSession,
    pub(super) pool: Pool,
    window: InFlightLimit,
    replies: ReplyQueue,
    /// Nothing can be sent any more: replies are dropped.
    mute: Cell<bool>,
    guest: ClientHandle,
    /// When the client has said its last.
    left: Cell<Option<Instant>>,
    /// What the client uses.
    device: Arc<dyn BlockDevice>,
    /// How often replies were taken by it; odd while it is to take some.
    taken: Cell<u64>,
}

/// A request in flight; it must be answered.
#[derive(Debug)]
#[must_use = "a request that is not answered keeps its share of the window forever"]
pub(super) struct Request {
    pub(super) connection: Rc<Connection>,
    pub(super) address: ReplyTo,
    /// Payload bytes that the request holds in the window.
    room_bytes: u64,
    /// Where it is counted.
    started: Option<StartedRequest>,
}

/// Serves requests until the client leaves, then finishes what is in flight.
pub(super) async fn serve(
    input: ReceiveBuffer,
    agreement: NegotiatedSession,
    guest: ClientHandle,
) -> Disconnect {
    let has_left = Arc::new(AtomicBool::new(false));
    let export = &agreement.export;
    let device = {
        let (guest, has_left) = (guest.clone(), has_left.clone());
        // A full window has nobody read what the client says.
        let goes_on = move || !(has_left.load(Ordering::Acquire) || guest.is_gone());
        let room = &export.accounting.room;
        export.when_full.around(&export.device, room, goes_on)
    };
    let connection = Rc::new(Connection {
        device,
        pool: Pool::default(),
        window: InFlightLimit::new(&agreement.export.accounting),
        agreement,
        replies: ReplyQueue::default(),
        mute: Cell::new(false),
        guest,
        left: Cell::new(None),
        taken: Cell::new(0),
    });
    let sender = spawn(send_replies(connection.clone()));
    let end = match read_requests(&connection, input).await {
        Ok(()) => Disconnect::Closed,
        Err(gone) => gone,
    };
    has_left.store(true, Ordering::Release);
    let left = connection.left.get();
    connection.left.set(left.or_else(|| Some(lane::now())));
    let rest = pin!(async {
        connection.window.drained().await;
        connection.replies.close();
        sender.await;
    });
    let untaken = pin!(connection.until_nothing_is_taken());
    if let Either::Right(((), rest)) = select(rest, untaken).await {
        let _ = connection.agreement.channel.shutdown(Shutdown::Both);
        rest.await;
    }
    connection.agreement.channel.finish().await;
    end
}

/// Reads and starts requests; returns when the client says goodbye.
async fn read_requests(
    connection: &Rc<Connection>,
    mut input: ReceiveBuffer,
) -> Result<(), Disconnect> {
    let framing = connection.agreement.framing;
    let header_bytes = framing.request_header_bytes();
    let mut begun = 0;
    loop {
        if begun == TURN_REQUESTS {
            begun = 0;
            lane::yield_now().await;
        }
        begun += 1;
        input
            .need(&connection.agreement.channel, header_bytes)
            .await?;
        let header = RequestHeader::decode(framing, &input.available()[..header_bytes])
            .ok_or(Disconnect::Broken("a request with a wrong magic number"))?;
        input.consume(header_bytes);
        trace!(
            name: "nbd_receive_request",
            cookie = header.cookie,
            flags = header.flags,
            command = header.command,
            offset = header.offset_bytes,
            bytes = header.len_bytes
        );
        // What was received before does not begin after.
        if connection.guest.is_hung_up() {
            return Ok(());
        }
        match Command::check(&header, &connection.limits()) {
            Ok(Command::Disconnect) => return Ok(()),
            Ok(command) => connection.admit(&mut input, &header, command).await?,
            Err(refusal) => {
                connection.skip_payload(&mut input, &header).await?;
                let request = connection.request(&header, 0).await?;
                request.fail(refusal.error, refusal.message);
            }
        }
    }
}

impl Connection {
    fn limits(&self) -> SessionLimits {
        SessionLimits {
            size_bytes: self.agreement.export.device.size_bytes(),
            read_only: self.agreement.export.read_only,
            framing: self.agreement.framing,
            has_contexts: !self.agreement.contexts.is_empty(),
        }
    }

    /// Waits for space in the window and takes it for the request; nobody reads that the client has left
    /// meanwhile.
    async fn request(
        self: &Rc<Self>,
        header: &RequestHeader,
        room_bytes: u64,
    ) -> Result<Request, Disconnect> {
        {
            let entered = pin!(self.window.enter(room_bytes));
            let left = pin!(self.until_it_is_given_up());
            if let Either::Right(_) = select(entered, left).await {
                return Err(Disconnect::Closed);
            }
        }
        let address = ReplyTo {
            framing: self.agreement.framing,
            cookie: header.cookie,
            offset_bytes: header.offset_bytes,
        };
        Ok(Request {
            connection: self.clone(),
            address,
            room_bytes,
            started: None,
        })
    }

    /// Waits until a client that has left takes no replies. Long requests of one that has left end before
    /// that, and make room.
    async fn until_it_is_given_up(&self) {
        loop {
            let before = self.taken.get();
            lane::sleep(FAREWELL).await;
            if !self.guest.is_gone() || mutants::is(Mutant::WorkForTheGone) {
                continue;
            }
            if self.left.get().is_none() {
                self.left.set(Some(lane::now()));
            }
            if before % 2 == 1 && self.taken.get() == before {
                return;
            }
        }
    }

    /// Receives the payload of a request, if it has one, and starts it.
    async fn admit(
        self: &Rc<Self>,
        input: &mut ReceiveBuffer,
        header: &RequestHeader,
        command: Command,
    ) -> Result<(), Disconnect> {
        let payload_bytes = header.payload_bytes(self.agreement.framing);
        let room_bytes = match command {
            Command::Read { range, .. } => range.len_bytes,
            Command::Cache { range } => range.len_bytes.min(pieces::CACHE_BYTES),
            _ => payload_bytes,
        };
        let request = self.request(header, room_bytes).await?;
        let mut payload = None;
        if payload_bytes > 0 {
            // Checked by the command: at most `MAX_PAYLOAD_BYTES`.
            let buffer = self.pool.take(payload_bytes as usize);
            match input.fill(&self.agreement.channel, buffer).await {
                Ok(filled) => payload = Some(filled),
                Err(gone) => {
                    request.abandon();
                    return Err(gone);
                }
            }
        }
        if self.is_for_nobody(command) {
            request.abandon();
            return Ok(());
        }
        perform::start(request, command, payload);
        Ok(())
    }

    /// Whether a request has no effect but its answer, which nobody will take.
    fn is_for_nobody(&self, command: Command) -> bool {
        let only_asks = matches!(
            command,
            Command::Read { .. } | Command::Cache { .. } | Command::BlockStatus { .. }
        );
        only_asks && self.mute.get() && !mutants::is(Mutant::WorkForTheGone)
    }

    async fn skip_payload(
        &self,
        input: &mut ReceiveBuffer,
        header: &RequestHeader,
    ) -> Result<(), Disconnect> {
        match header.payload_bytes(self.agreement.framing) {
            0 => Ok(()),
            bytes if bytes <= MAX_SKIPPED_BYTES => input.skip(&self.agreement.channel, bytes).await,
            _ => Err(Disconnect::Broken(
                "a request with an absurdly long payload",
            )),
        }
    }

    /// Whether another piece of what was asked for may begin.
    pub(super) fn goes_on(&self) -> bool {
        if mutants::is(Mutant::WorkForTheGone) {
            return true;
        }
        let late = |at| lane::now().duration_since(at) > FAREWELL;
        let late = self.left.get().is_some_and(late);
        !(late || self.mute.get() || self.guest.is_hung_up())
    }

    /// Waits until replies wait for the client and it takes none for a while.
    async fn until_nothing_is_taken(&self) {
        loop {
            let before = self.taken.get();
            lane::sleep(FAREWELL).await;
            if before % 2 == 1 && self.taken.get() == before {
                return;
            }
        }
    }

    fn push(&self, reply: Reply) {
        if self.mute.get() {
            self.finish_request(reply.releases);
        } else {
            self.replies.push(reply);
        }
    }

    fn finish_request(&self, releases: Option<u64>) {
        if let Some(bytes) = releases
            && self.window.leave(bytes)
        {
            self.pool.trim();
        }
    }
}

/// Sends replies until the replies is closed; after a failure it only drops them.
async fn send_replies(connection: Rc<Connection>) {
    let mut heads = HeaderPool::new();
    let mut batch = Vec::new();
    while connection.replies.next_batch(&mut batch).await {
        if !connection.mute.get() {
            let pieces = heads.gather(&mut batch);
            connection.taken.update(|taken| taken + 1);
            let (pieces, sent) = connection.agreement.channel.send(pieces).await;
            connection.taken.update(|taken| taken + 1);
            match sent {
                Ok(()) => heads.reclaim(pieces, |payload| connection.pool.give(payload)),
                Err(_) => {
                    connection.mute.set(true);
                    heads = HeaderPool::new();
                    // The reader learns of it as the end of its input.
                    let _ = connection.agreement.channel.shutdown(Shutdown::Both);
                }
            }
        }
        for reply in batch.drain(..) {
            connection.finish_request(reply.releases);
        }
    }
}

impl Request {
    /// The export that the request is for.
    pub(super) fn export(&self) -> &Export {
        &self.connection.agreement.export
    }

    /// The device that the client uses.
    pub(super) fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.connection.device
    }

    /// Counts the request from now on to its answer.
    pub(super) fn account(&mut self, operation: Operation, offset_bytes: u64, len_bytes: u64) {
        let accounting = &self.export().accounting;
        let stream = self.connection.window.depth();
        let range = (offset_bytes, len_bytes);
        self.started = Some(accounting.start(operation, range, stream));
    }

    fn push(&self, head: ReplyHeader, payload: Option<Buffer>, last: bool) {
        if last {
            trace!(name: "nbd_request_done", cookie = self.address.cookie);
        }
        let releases = last.then_some(self.room_bytes);
        self.connection.push(Reply {
            head,
            payload,
            releases,
        });
    }

    /// Sends a chunk that is not the last of its reply.
    pub(super) fn send(&self, head: ReplyHeader, payload: Option<Buffer>) {
        self.push(head, payload, false);
    }

    /// Sends the last (or only) chunk of the reply.
    pub(super) fn finish(self, head: ReplyHeader, payload: Option<Buffer>) {
        if let Some(started) = &self.started {
            self.export().accounting.succeed(started);
        }
        self.push(head, payload, true);
    }

    /// Answers success without data.
    pub(super) fn done(self) {
        let head = self.address.done();
        self.finish(head, None);
    }

    /// Answers an error.
    pub(super) fn fail(self, error: u32, message: &str) {
        trace!(
            name: "nbd_co_send_chunk_error",
            cookie = self.address.cookie,
            error,
            message
        );
        if let Some(started) = &self.started {
            // Numbers of the protocol are small.
            self.export()
                .accounting
                .fail(started, error as i32, message);
        }
        if self.address.framing == Framing::Simple {
            let head = self.address.simple(error);
            return self.push(head, None, true);
        }
        let mut end = message.len().min(proto::MAX_STRING_BYTES);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        let text = &message.as_bytes()[..end];
        let head = self.address.error_chunk(error, text.len() as u16);
        let payload = (!text.is_empty()).then(|| Buffer::copy_of(text));
        self.push(head, payload, true);
    }

    /// Gives up without an answer: the connection is over.
    pub(super) fn abandon(self) {
        self.connection.finish_request(Some(self.room_bytes));
    }
}
