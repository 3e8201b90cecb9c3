//! One descriptor of a mount and the lane that serves it: messages of the kernel come in, are
//! begun at once, and answered as they end. What comes over io_uring is in `queue`.
//!
//! Invariants:
//! - What was begun ends before the session does.
//! - The memory of what is in flight is bounded; what the kernel asks for beyond that waits.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

use futures_util::FutureExt;
use futures_util::future::{Either, select};
use vellum_io::lane::message::MessageDevice;
use vellum_io::{Buffer, Buffers, Io, spawn};

use super::file::{Errno, File, OPENED_TO_WRITE};
use super::proto::{
    self, Body, HEAD_BYTES, HEADER_BYTES, Header, MAX_TRANSFER_BYTES, Operation,
    REPLY_HEADER_BYTES, ROOT_ID, Transfer,
};
use super::queue::LaneQueues;
use crate::accounting::{Operation as Counted, StartedRequest};
use crate::fair_depth::StreamDepth;
use crate::nbd::Stop;

/// Most data in flight in bytes; one request always fits.
const MAX_IN_FLIGHT_BYTES: usize = 32 << 20;
/// Data of writes up to this length in bytes is copied, so that the memory that messages come
/// into is used again.
const COPIED_BYTES: usize = 32 << 10;

/// How a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It was asked to.
    Stopped,
    /// The mount is gone.
    Unmounted,
}

/// A session.
pub(super) struct Session {
    pub(super) device: MessageDevice,
    pub(super) file: Arc<File>,
    requests: StreamDepth,
    bytes: Cell<usize>,
    /// Tasks that wait for requests to end.
    waiters: RefCell<Vec<Waker>>,
}

/// A request that was begun; it is over when this is dropped.
pub(super) struct Request {
    session: Rc<Session>,
    unique: u64,
    bytes: usize,
    /// Where it is counted.
    started: Option<StartedRequest>,
}

impl Drop for Request {
    fn drop(&mut self) {
        let session = &self.session;
        session.requests.leave();
        session.bytes.set(session.bytes.get() - self.bytes);
        if !session.waiters.borrow().is_empty() {
            session.waiters.take().into_iter().for_each(Waker::wake);
        }
    }
}

/// Memory for a message: the fixed part of a read or write, and data, which so is aligned.
pub(super) fn receive_buffers() -> Buffers {
    let head = Buffer::for_read(HEAD_BYTES);
    Buffers::from_iter([head, Buffer::for_read(MAX_TRANSFER_BYTES)])
}

/// The bytes of a message from `start` to its end.
pub(super) fn gather(buffers: &Buffers, start: usize, len_bytes: usize) -> Vec<u8> {
    let all = buffers.iter().flat_map(|buffer| buffer.iter().copied());
    all.take(len_bytes).skip(start).collect()
}

impl Session {
    pub(super) fn new(device: MessageDevice, file: Arc<File>) -> Rc<Session> {
        Rc::new(Session {
            device,
            requests: StreamDepth::new(&file.accounting),
            file,
            bytes: Cell::new(0),
            waiters: RefCell::default(),
        })
    }

    /// Serves until `stop` is requested or the mount is gone.
    pub(super) async fn run(self: Rc<Self>, queues: LaneQueues, stop: &Stop) -> End {
        // The lane's own, so that lanes do not wait for each other.
        let queues_end = Stop::new();
        let serving = self.serve_queues(queues, &queues_end);
        let mut stopped = pin!(stop.wait());
        let mut buffers = receive_buffers();
        let end = loop {
            self.wait_until(|| self.has_room()).await;
            let message = match select(self.device.recv(buffers), stopped.as_mut()).await {
                Either::Left((message, _)) => message,
                Either::Right(_) => break End::Stopped,
            };
            buffers = match message {
                Ok((buffers, len_bytes)) => self.start(buffers, len_bytes),
                // Somebody took it, or gave it up.
                Err(error) if matches!(error.errno(), libc::ENOENT | libc::EAGAIN) => {
                    receive_buffers()
                }
                Err(_) => break End::Unmounted,
            };
        };
        queues_end.request();
        for entry in serving {
            entry.await;
        }
        self.wait_until(|| self.requests.get() == 0).await;
        end
    }

    pub(super) fn has_room(&self) -> bool {
        self.bytes.get() <= MAX_IN_FLIGHT_BYTES && self.requests.has_room()
    }

    pub(super) async fn wait_until(&self, condition: impl Fn() -> bool) {
        poll_fn(|context| {
            if condition() {
                return Poll::Ready(());
            }
            self.waiters.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Begins what a message asks for; returns the memory for the next one.
    fn start(self: &Rc<Self>, mut buffers: Buffers, len_bytes: usize) -> Buffers {
        let Some(header) = Header::decode(&buffers[0][..len_bytes.min(HEAD_BYTES)]) else {
            return buffers;
        };
        let operation = match len_bytes <= HEAD_BYTES || header.is_write() {
            true => header.operation(&buffers[0][HEADER_BYTES..len_bytes.min(HEAD_BYTES)]),
            false => header.operation(&gather(&buffers, HEADER_BYTES, len_bytes)),
        };
        let operation = operation.filter(|_| header.len_bytes as usize == len_bytes);
        if operation == Some(Operation::Silent) {
            return buffers;
        }
        let request = self.begin(&header, operation);
        match operation {
            _ if header.node != ROOT_ID => request.fail(libc::ENOENT),
            None => request.fail(libc::EINVAL),
            Some(Operation::Write(transfer)) => {
                if transfer.len_bytes as usize != len_bytes - HEAD_BYTES {
                    request.fail(libc::EINVAL);
                } else {
                    let data = take_data(&mut buffers[1], transfer.len_bytes as usize);
                    request.write(transfer, data);
                }
            }
            Some(operation) => request.perform(operation),
        }
        buffers
    }

    pub(super) fn begin(self: &Rc<Self>, header: &Header, operation: Option<Operation>) -> Request {
        let bytes = match operation {
            Some(Operation::Read(transfer) | Operation::Write(transfer)) => transfer.len_bytes,
            _ => 0,
        };
        let bytes = (bytes as usize).min(MAX_TRANSFER_BYTES);
        self.requests.enter();
        self.bytes.set(self.bytes.get() + bytes);
        Request {
            session: self.clone(),
            unique: header.unique,
            bytes,
            // What is refused never reaches the device, which does not fail then.
            started: operation
                .filter(|operation| self.file.takes(operation))
                .and_then(|operation| self.account(&operation)),
        }
    }

    /// Notes the beginning of what moves bytes or makes them durable.
    fn account(&self, operation: &Operation) -> Option<StartedRequest> {
        let (counted, offset_bytes, len_bytes) = match operation {
            Operation::Read(transfer) => (
                Counted::Read,
                transfer.offset_bytes,
                u64::from(transfer.len_bytes),
            ),
            Operation::Write(transfer) => (
                Counted::Write,
                transfer.offset_bytes,
                u64::from(transfer.len_bytes),
            ),
            Operation::Sync | Operation::Flush(OPENED_TO_WRITE) => (Counted::Flush, 0, 0),
            // Zeroes are written, space ahead of its use is not.
            Operation::Allocate(wanted) if wanted.zeroes() => {
                (Counted::Write, wanted.offset_bytes, wanted.len_bytes)
            }
            _ => return None,
        };
        let accounting = &self.file.accounting;
        Some(accounting.start(counted, (offset_bytes, len_bytes), &self.requests))
    }
}

/// The first `len_bytes` bytes of a message's data; `buffer` has as much memory as before.
fn take_data(buffer: &mut Buffer, len_bytes: usize) -> Buffer {
    if len_bytes <= COPIED_BYTES {
        return Buffer::copy_of(&buffer[..len_bytes]);
    }
    let mut data = std::mem::replace(buffer, Buffer::for_read(MAX_TRANSFER_BYTES));
    data.truncate(len_bytes);
    data
}

impl Request {
    pub(super) fn file(&self) -> &Arc<File> {
        &self.session.file
    }

    fn perform(self, operation: Operation) {
        if let Operation::Read(transfer) = operation {
            return self.read(transfer);
        }
        let file = self.file().clone();
        self.run(async move { file.perform(operation).await });
    }

    fn read(self, transfer: Transfer) {
        if transfer.len_bytes as usize > MAX_TRANSFER_BYTES {
            return self.fail(libc::EINVAL);
        }
        match self.file().read(transfer) {
            None => self.answer(&Body::default()),
            Some(io) => self.when_done(io, Request::answer_data),
        }
    }

    fn write(self, transfer: Transfer, data: Buffer) {
        match self.file().write_at_once(transfer, data) {
            Ok(io) => self.when_done(io, |request, data| {
                request.answer(&proto::written(data.len() as u32));
            }),
            Err(data) => {
                let file = self.file().clone();
                self.run(async move { Ok(proto::written(file.write(transfer, data).await?)) });
            }
        }
    }

    /// Answers when `io` is complete: at once if it is already.
    fn when_done<T: 'static>(self, io: Io<T>, answer: impl FnOnce(Request, T) + 'static) {
        let finish = move |result: vellum_io::Result<T>| match result {
            Ok(value) => answer(self, value),
            Err(error) => self.fail(error.errno()),
        };
        if !io.is_ready() {
            drop(spawn(io.map(finish)));
        } else if let Some(result) = io.now_or_never() {
            finish(result);
        }
    }

    /// Answers with what `work` gives.
    fn run(self, work: impl Future<Output = Result<Body, Errno>> + 'static) {
        drop(spawn(async move {
            match work.await {
                Ok(body) => self.answer(&body),
                Err(errno) => self.fail(errno),
            }
        }));
    }

    fn fail(self, errno: Errno) {
        self.note_failure(errno);
        let header = proto::reply_header(self.unique, errno, 0);
        self.send(Buffer::copy_of(&header), None);
    }

    /// Counts a request that has failed.
    pub(super) fn note_failure(&self, errno: Errno) {
        if let Some(started) = &self.started {
            let reason = vellum_io::error::errno_text(errno);
            self.file().accounting.fail(started, errno, &reason);
        }
    }

    /// Counts a request that has succeeded.
    pub(super) fn succeed(&self) {
        if let Some(started) = &self.started {
            self.file().accounting.succeed(started);
        }
    }

    fn answer(self, body: &Body) {
        self.succeed();
        let body = body.bytes();
        let mut reply = Buffer::for_read(REPLY_HEADER_BYTES + body.len());
        let header = proto::reply_header(self.unique, 0, body.len());
        reply[..REPLY_HEADER_BYTES].copy_from_slice(&header);
        reply[REPLY_HEADER_BYTES..].copy_from_slice(body);
        self.send(reply, None);
    }

    fn answer_data(self, data: Buffer) {
        self.succeed();
        let header = proto::reply_header(self.unique, 0, data.len());
        self.send(Buffer::copy_of(&header), Some(data));
    }

    /// Sends the answer. It goes on to its end; that it finds nobody who waits is no matter.
    fn send(self, head: Buffer, data: Option<Buffer>) {
        let buffers = std::iter::once(head).chain(data).collect();
        drop(self.session.device.send(buffers));
    }
}
