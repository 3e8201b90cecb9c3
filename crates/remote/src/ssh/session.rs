//! A connection with an open file: requests in flight, and the threads that send them and take the
//! answers.
//!
//! Invariants:
//! - A request is in the table before any byte of it goes out, and whoever takes it out answers it.
//! - The buffers of a read belong to the table and then to the thread that fills them; those of a
//!   write to the thread that sends them, which gives them back (rule 10).
//! - A session that is dead stays so, and the program behind it has ended.

use std::collections::HashMap;
use std::io::{BufReader, Read};
use std::process::{ChildStdin, ChildStdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use futures_channel::oneshot;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vellum_io::buffer::total_len;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};

use super::answer::{Answer, Filled, Looked, Written, lost};
use super::host_key;
use super::options::{HostKeyCheck, SshOptions};
use super::program::Program;
use super::sending::{Job, Payload, send_all, send_jobs};
use super::wire::{self, Abilities, FileState, Message, Reader};
use crate::blocking;

/// A flush takes as long as the server's disk does: so many times the usual silence.
const FLUSH_TIMEOUTS: u32 = 10;
/// How long the program may take to end when it is to.
const END_LIMIT: Duration = Duration::from_secs(5);
/// How often it is looked whether somebody waits in vain.
const TURN: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// A connection with an open file.
#[derive(Debug)]
pub(super) struct Session {
    shared: Arc<Shared>,
    /// Where what is to be sent goes.
    jobs: Mutex<Option<Sender<Job>>>,
    handle: Vec<u8>,
    abilities: Abilities,
    /// At most so much is read and written at once, in bytes.
    most_read: u32,
    most_write: u32,
    state: FileState,
}

/// What the threads share.
#[derive(Debug)]
pub(super) struct Shared {
    table: Mutex<Table>,
    timeout: Duration,
    begun: Instant,
    /// When something moved last, or the first of those began who wait: milliseconds since the begin.
    moved: AtomicU64,
}

#[derive(Debug)]
struct Table {
    waiting: HashMap<u32, Waiting>,
    next: u32,
    stage: Stage,
    dead: Option<Error>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Connecting,
    Open,
    Closing,
}

/// A request that was or will be sent.
#[derive(Debug)]
struct Waiting {
    operation: &'static str,
    /// Where data goes, for reads.
    buffers: Option<Buffers>,
    answer: oneshot::Sender<Result<Filled>>,
}

fn broken(why: &str) -> Error {
    let message = format!("the server does not keep to the SFTP protocol: {why}");
    Error::new(ErrorKind::Protocol, "read", message)
}

impl Shared {
    fn new(timeout: Duration) -> Self {
        Shared {
            table: Mutex::new(Table {
                waiting: HashMap::new(),
                next: 1,
                stage: Stage::Connecting,
                dead: None,
            }),
            timeout,
            begun: Instant::now(),
            moved: AtomicU64::new(0),
        }
    }

    /// Notes that something has moved.
    pub(super) fn note_move(&self) {
        let now = self.begun.elapsed().as_millis() as u64;
        self.moved.store(now, Ordering::Relaxed);
    }

    /// Whether somebody has waited for too long while nothing moved.
    fn is_stuck(&self) -> bool {
        let table = self.table.lock();
        let limit = match table.stage {
            // Connecting has a limit of its own in the program.
            Stage::Connecting => self.timeout * 2,
            Stage::Closing => END_LIMIT.min(self.timeout),
            Stage::Open if table.waiting.is_empty() => return false,
            Stage::Open if table.waiting.values().any(|one| one.operation == "flush") => {
                self.timeout * FLUSH_TIMEOUTS
            }
            Stage::Open => self.timeout,
        };
        drop(table);
        let moved = Duration::from_millis(self.moved.load(Ordering::Relaxed));
        self.begun.elapsed().saturating_sub(moved) > limit
    }

    fn enter(&self, stage: Stage) {
        self.note_move();
        self.table.lock().stage = stage;
    }

    /// Has all who wait fail, and all who come.
    fn fail(&self, error: &Error) {
        let mut table = self.table.lock();
        table.dead.get_or_insert_with(|| error.clone());
        let waiting = std::mem::take(&mut table.waiting);
        drop(table);
        for one in waiting.into_values() {
            // Nobody waits any more: the result goes.
            let _ = one.answer.send(Err(error.clone()));
        }
    }

    /// Takes the answer to one request.
    fn take_answer(&self, input: &mut impl Read) -> Result<()> {
        let mut head = [0; 9];
        read_exact(input, &mut head)?;
        let mut fields = Reader(&head);
        let len = fields.u32()?;
        let kind = head[4];
        let number = Reader(&head[5..]).u32()?;
        if len < 5 {
            return Err(broken("a message is too short"));
        }
        let found = self.table.lock().waiting.remove(&number);
        let Some(one) = found else {
            return Err(broken("an answer to nothing"));
        };
        let (operation, answer) = (one.operation, one.answer);
        let answered = answered(operation, one.buffers, kind, len - 5, input);
        match answered {
            Ok(result) => {
                // Nobody waits any more: the result goes.
                let _ = answer.send(result);
                Ok(())
            }
            Err(error) => {
                // Told with the others, when the session is dead: who reads looks for another one then.
                let waiting = Waiting {
                    operation,
                    buffers: None,
                    answer,
                };
                self.table.lock().waiting.insert(number, waiting);
                Err(error)
            }
        }
    }
}

/// What a request is answered with: an error outside ends the session.
fn answered(
    operation: &'static str,
    buffers: Option<Buffers>,
    kind: u8,
    len: u32,
    input: &mut impl Read,
) -> Result<Result<Filled>> {
    if let (wire::DATA, Some(mut buffers)) = (kind, buffers) {
        let mut head = [0; 4];
        read_exact(input, &mut head)?;
        let data_len = u64::from(u32::from_be_bytes(head));
        if data_len + 4 != u64::from(len) || data_len > total_len(&buffers) {
            return Err(broken("more data than was asked for"));
        }
        let mut left = data_len as usize;
        for buffer in &mut buffers {
            let part = left.min(buffer.len());
            read_exact(input, &mut buffer[..part])?;
            left -= part;
        }
        return Ok(Ok((buffers, data_len)));
    }
    let body = read_body(input, len)?;
    match kind {
        wire::ATTRIBUTES if operation == "look" => {
            let body = Buffers::from_iter([Buffer::copy_of(&body)]);
            Ok(Ok((body, len.into())))
        }
        wire::STATUS if operation == "read" && wire::is_end(Reader(&body)) => {
            Ok(Ok((Buffers::new(), 0)))
        }
        wire::STATUS => match wire::status(operation, Reader(&body)) {
            Ok(()) if matches!(operation, "read" | "look") => {
                Err(broken("nothing of what was asked for"))
            }
            status => Ok(status.map(|()| (Buffers::new(), 0))),
        },
        _ => Err(broken("an answer of another kind")),
    }
}

fn read_exact(input: &mut impl Read, bytes: &mut [u8]) -> Result<()> {
    input.read_exact(bytes).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            let message = "the server or 'ssh' has ended the connection";
            Error::new(ErrorKind::Io, "read", message).with_errno(libc::ECONNRESET)
        }
        std::io::ErrorKind::TimedOut => {
            let message = "the server is silent (option 'timeout')";
            Error::new(ErrorKind::Io, "read", message).with_errno(libc::ETIMEDOUT)
        }
        _ => Error::from_io("read", &error),
    })
}

fn read_body(input: &mut impl Read, len: u32) -> Result<Vec<u8>> {
    if len > wire::MOST_MESSAGE_BYTES {
        return Err(broken("a message is too long"));
    }
    let mut body = vec![0; len as usize];
    read_exact(input, &mut body)?;
    Ok(body)
}

/// What comes from the server; a read of it fails when somebody has waited for too long.
struct Patient {
    input: ChildStdout,
    shared: Arc<Shared>,
}

impl Read for Patient {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        loop {
            let mut polled = [PollFd::new(&self.input, PollFlags::IN)];
            if poll(&mut polled, Some(&TURN))? > 0 {
                break;
            }
            if self.shared.is_stuck() {
                return Err(std::io::ErrorKind::TimedOut.into());
            }
        }
        let read = self.input.read(bytes);
        self.shared.note_move();
        read
    }
}

/// A connection on which one question follows another.
struct Handshake {
    input: BufReader<Patient>,
    output: ChildStdin,
    shared: Arc<Shared>,
}

impl Handshake {
    /// Sends a message, and says what kind of answer came, and what is in it behind its number.
    fn ask(&mut self, message: &[u8]) -> Result<(u8, Vec<u8>)> {
        // Why it cannot be sent is what is read then.
        let _ = send_all(&mut self.output, message, &self.shared);
        let mut head = [0; 5];
        read_exact(&mut self.input, &mut head)?;
        let len = Reader(&head).u32()?;
        if head[4] == wire::SERVER_VERSION {
            return Ok((head[4], read_body(&mut self.input, len.saturating_sub(1))?));
        }
        let body = read_body(&mut self.input, len.saturating_sub(1))?;
        let body = body
            .get(4..)
            .ok_or_else(|| broken("a message is too short"))?;
        Ok((head[4], body.to_vec()))
    }

    fn abilities(&mut self) -> Result<(Abilities, [u32; 2])> {
        // This one has the version in the place of a number.
        let hello = Message::new(wire::INIT, wire::VERSION).done(0);
        let (kind, body) = self.ask(&hello)?;
        if kind != wire::SERVER_VERSION {
            return Err(broken("it does not begin with a version"));
        }
        let abilities = wire::abilities(Reader(&body))?;
        let mut limits = [wire::SMALL_TRANSFER_BYTES; 2];
        if abilities.limits {
            let ask = Message::new(wire::EXTENDED, 0)
                .text(wire::LIMITS.as_bytes())
                .done(0);
            if let (wire::EXTENDED_REPLY, body) = self.ask(&ask)? {
                limits = wire::limits(Reader(&body))?;
            }
        }
        Ok((abilities, limits))
    }

    fn open(&mut self, options: &SshOptions) -> Result<(Vec<u8>, FileState)> {
        let mut flags = wire::OPEN_READ;
        if options.writable {
            flags |= wire::OPEN_WRITE;
        }
        let open = Message::new(wire::OPEN, 0).text(options.path.as_bytes());
        let open = match options.create {
            true => open
                .u32(flags | wire::OPEN_CREATE | wire::OPEN_TRUNCATE)
                .new_file(),
            false => open.u32(flags).u32(0),
        };
        let operation = if options.create { "create" } else { "open" };
        let handle = match self.ask(&open.done(0))? {
            (wire::HANDLE, body) => Reader(&body).text()?.to_vec(),
            (wire::STATUS, body) => {
                wire::status(operation, Reader(&body))?;
                return Err(broken("no handle"));
            }
            _ => return Err(broken("an answer of another kind")),
        };
        let stat = Message::new(wire::FSTAT, 0).text(&handle).done(0);
        match self.ask(&stat)? {
            (wire::ATTRIBUTES, body) => Ok((handle, wire::file_state(Reader(&body))?)),
            (wire::STATUS, body) => {
                wire::status(operation, Reader(&body))?;
                Err(broken("no attributes"))
            }
            _ => Err(broken("an answer of another kind")),
        }
    }
}

impl Session {
    /// Connects, and opens the file. Blocks.
    pub(super) fn open(options: &SshOptions) -> Result<Session> {
        let keys = match &options.host_key_check {
            HostKeyCheck::Hash(kind, hash) => Some(host_key::fetch(options, *kind, hash)?),
            HostKeyCheck::None | HostKeyCheck::KnownHosts => None,
        };
        let mut program = Program::start(options, keys)?;
        let pipes = (program.child.stdout.take(), program.child.stdin.take());
        let (Some(input), Some(output)) = pipes else {
            return Err(lost());
        };
        let shared = Arc::new(Shared::new(options.timeout));
        let patient = Patient {
            input,
            shared: shared.clone(),
        };
        let mut handshake = Handshake {
            input: BufReader::with_capacity(64 << 10, patient),
            output,
            shared: shared.clone(),
        };
        let opened = handshake.abilities().and_then(|(abilities, limits)| {
            let (handle, state) = handshake.open(options)?;
            Ok((abilities, limits, handle, state))
        });
        let (abilities, [most_read, most_write], handle, state) = match opened {
            Ok(opened) => opened,
            // What the program has said is better.
            Err(error) if error.errno() == libc::ECONNRESET => {
                return Err(program.end().unwrap_or(error));
            }
            Err(error) => return Err(error),
        };
        shared.enter(Stage::Open);
        let (jobs, receiver) = channel();
        start_threads(program, handshake, receiver)?;
        Ok(Session {
            shared,
            jobs: Mutex::new(Some(jobs)),
            handle,
            abilities,
            most_read,
            most_write,
            state,
        })
    }

    pub(super) fn state(&self) -> FileState {
        self.state
    }

    pub(super) fn most_read_bytes(&self) -> u64 {
        self.most_read.into()
    }

    pub(super) fn most_write_bytes(&self) -> u64 {
        self.most_write.into()
    }

    pub(super) fn has_fsync(&self) -> bool {
        self.abilities.fsync
    }

    pub(super) fn is_dead(&self) -> bool {
        self.shared.table.lock().dead.is_some()
    }

    /// Has a request sent; `message` gets its number.
    fn submit(
        &self,
        operation: &'static str,
        buffers: Option<Buffers>,
        payload: Option<Payload>,
        message: impl FnOnce(u32) -> Vec<u8>,
    ) -> Answer {
        let (answer, receive) = oneshot::channel();
        let mut table = self.shared.table.lock();
        if let Some(error) = &table.dead {
            let _ = answer.send(Err(error.clone()));
            return Answer(receive);
        }
        if table.waiting.is_empty() {
            self.shared.note_move();
        }
        let number = table.next;
        table.next = table.next.wrapping_add(1);
        let waiting = Waiting {
            operation,
            buffers,
            answer,
        };
        table.waiting.insert(number, waiting);
        drop(table);
        let job = Job {
            message: message(number),
            payload,
        };
        if let Some(jobs) = &*self.jobs.lock() {
            // Where the thread has ended the session has, too, and all who wait are told.
            let _ = jobs.send(job);
        }
        Answer(receive)
    }

    /// Begins a read of what the buffers hold, [`Session::most_read_bytes`] at most.
    pub(super) fn read(&self, offset_bytes: u64, buffers: Buffers) -> Answer {
        let len = total_len(&buffers) as u32;
        self.submit("read", Some(buffers), None, |number| {
            let message = Message::new(wire::READ, number).text(&self.handle);
            message.u64(offset_bytes).u32(len).done(0)
        })
    }

    /// Looks whether the file is still what it was when it was opened, behind everything that was asked before: a
    /// server carries out requests for one file in their order.
    pub(super) fn look(&self) -> Looked {
        let answer = self.submit("look", None, None, |number| {
            Message::new(wire::FSTAT, number).text(&self.handle).done(0)
        });
        Looked(answer, self.state)
    }

    /// Begins a write, of [`Session::most_write_bytes`] at most.
    pub(super) fn write(&self, offset_bytes: u64, buffers: Buffers) -> Written {
        let len = total_len(&buffers) as u32;
        let (back, returned) = oneshot::channel();
        let payload = Payload { buffers, back };
        let answer = self.submit("write", None, Some(payload), |number| {
            let message = Message::new(wire::WRITE, number).text(&self.handle);
            message.u64(offset_bytes).u32(len).done(len)
        });
        Written(answer, returned)
    }

    /// Begins to make what was written durable.
    pub(super) fn fsync(&self) -> Answer {
        self.submit("flush", None, None, |number| {
            let message = Message::new(wire::EXTENDED, number);
            message
                .text(wire::FSYNC.as_bytes())
                .text(&self.handle)
                .done(0)
        })
    }

    pub(super) fn set_len(&self, len_bytes: u64) -> Answer {
        self.submit("truncate", None, None, |number| {
            let message = Message::new(wire::FSETSTAT, number);
            message.text(&self.handle).size(len_bytes).done(0)
        })
    }

    /// Closes the file, and then the connection: a server that sees its end says no more.
    pub(super) async fn close(&self) -> Result<()> {
        let answer = self.submit("close", None, None, |number| {
            Message::new(wire::CLOSE, number).text(&self.handle).done(0)
        });
        let closed = answer.wait().await;
        self.hang_up();
        closed.map(|_| ())
    }

    fn hang_up(&self) {
        self.jobs.lock().take();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.hang_up();
    }
}

/// Starts the threads of a connection: one ends with the sender of its jobs, the other one with
/// the program.
fn start_threads(mut program: Program, handshake: Handshake, jobs: Receiver<Job>) -> Result<()> {
    let Handshake {
        mut input,
        output,
        shared,
    } = handshake;
    let sending = shared.clone();
    let sends = blocking::start(move || {
        send_jobs(output, &jobs, &sending);
        sending.enter(Stage::Closing);
    });
    let takes = blocking::start(move || {
        let error = loop {
            if let Err(error) = shared.take_answer(&mut input) {
                break error;
            }
        };
        let said = match error.errno() {
            libc::ECONNRESET => program.end(),
            _ => None,
        };
        drop(program);
        shared.fail(&said.unwrap_or(error));
    });
    let started = sends.and(takes);
    started.map_err(|error| Error::from_io("open", &error))
}
