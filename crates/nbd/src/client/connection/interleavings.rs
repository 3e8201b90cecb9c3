//! Many lanes on one connection: whoever asks gets an answer, its own, whoever receives or
//! sends for the others and whoever gives up. Three requests fit, so that others wait.

use std::pin::pin;

use super::*;
use crate::channel::Secured;
use vellum_io::lane::net::Stream;
use vellum_io::sync::{block_on, chance, explore, join, thread};
use vellum_io::{Buffer, Error, Io};

/// A server that answers in any order, and the way to it.
#[derive(Debug)]
struct Server {
    state: Mutex<Pipe>,
    socket: Stream,
}

#[derive(Debug, Default)]
struct Pipe {
    asked: Vec<RequestHead>,
    answers: VecDeque<u8>,
    closed: bool,
    receiver: Option<Waker>,
}

#[derive(Debug)]
struct RequestHead {
    command: u16,
    cookie: [u8; 8],
    offset: u64,
    len: usize,
}

impl Server {
    fn new() -> Arc<Self> {
        let (ours, _) = std::os::unix::net::UnixStream::pair().expect("sockets");
        Arc::new(Server {
            state: Mutex::default(),
            socket: Stream::from_fd(ours.into()),
        })
    }

    fn state(&self) -> MutexGuard<'_, Pipe> {
        self.state.lock()
    }

    fn take_in(&self, buffers: &Buffers) {
        let bytes: Vec<u8> = buffers.iter().flat_map(|piece| piece.to_vec()).collect();
        let mut rest = &bytes[..];
        let mut state = self.state();
        while !rest.is_empty() {
            let (head, after) = rest.split_at(28);
            let command = u16::from_be_bytes([head[6], head[7]]);
            let len = u32::from_be_bytes(head[24..28].try_into().expect("four bytes")) as usize;
            let payload = if command == proto::CMD_WRITE { len } else { 0 };
            rest = &after[payload..];
            state.asked.push(RequestHead {
                command,
                cookie: head[8..16].try_into().expect("eight bytes"),
                offset: u64::from_be_bytes(head[16..24].try_into().expect("eight bytes")),
                len,
            });
        }
        drop(state);
        self.answer_some();
    }

    /// Answers what it likes of what it was asked; at least one if anybody waits for it.
    fn answer_some(&self) {
        let mut state = self.state();
        while !state.asked.is_empty() && chance(2) == 0 {
            state.answer_one();
        }
        let receiver = state.receiver.take();
        drop(state);
        receiver.into_iter().for_each(Waker::wake);
    }
}

impl Pipe {
    fn answer_one(&mut self) {
        let asked = self.asked.swap_remove(chance(self.asked.len()));
        self.answers.extend(proto::SIMPLE_REPLY_MAGIC.to_be_bytes());
        self.answers.extend([0; 4]);
        self.answers.extend(asked.cookie);
        if asked.command == proto::CMD_READ {
            self.answers.extend(vec![asked.offset as u8; asked.len]);
        }
    }
}

impl Secured for Server {
    fn recv(self: Arc<Self>, mut buffer: Buffer) -> Io<(Buffer, usize)> {
        Io::boxed(async move {
            let taken = poll_fn(|context| {
                let mut state = self.state();
                if state.answers.is_empty() && !state.asked.is_empty() {
                    state.answer_one();
                }
                if state.answers.is_empty() && !state.closed {
                    state.receiver = Some(context.waker().clone());
                    return Poll::Pending;
                }
                let most = state.answers.len().min(buffer.len());
                let count = if most < 2 { most } else { 1 + chance(most) };
                Poll::Ready(state.answers.drain(..count).collect::<Vec<u8>>())
            })
            .await;
            buffer[..taken.len()].copy_from_slice(&taken);
            Ok((buffer, taken.len()))
        })
    }

    fn send(self: Arc<Self>, buffers: Buffers) -> Io<(Buffers, Option<Error>)> {
        Io::boxed(async move {
            vellum_io::lane::yield_now().await;
            if self.state().closed {
                return Ok((buffers, Some(Error::from_errno("send", libc::EPIPE))));
            }
            self.take_in(&buffers);
            Ok((buffers, None))
        })
    }

    fn finish(self: Arc<Self>) -> Io<()> {
        Io::ready(Ok(()))
    }

    /// Asked for only to shut it down.
    fn stream(&self) -> &Stream {
        let mut state = self.state();
        state.closed = true;
        let receiver = state.receiver.take();
        drop(state);
        receiver.into_iter().for_each(Waker::wake);
        &self.socket
    }
}

fn connection() -> Arc<Connection> {
    let session = Session {
        framing: Framing::Simple,
        size_bytes: 512,
        flags: proto::FLAG_HAS_FLAGS,
        block_sizes: None,
        context: None,
    };
    Connection::new(
        Channel::Secured(Server::new()),
        ReceiveBuffer::new(),
        session,
    )
}

fn read(at: u64) -> Request {
    Request {
        command: proto::CMD_READ,
        flags: 0,
        offset_bytes: at,
        len_bytes: 2,
        buffers: Buffers::from_iter([Buffer::zeroed(2)]),
    }
}

fn write(at: u64) -> Request {
    Request {
        command: proto::CMD_WRITE,
        ..read(at)
    }
}

fn is_answer_of(outcome: &Outcome, at: u64) -> bool {
    matches!(outcome, Outcome::Done(answer) if answer.buffers[0][..] == [at as u8; 2])
}

#[test]
fn everybody_gets_the_own_answer() {
    explore(|| {
        let connection = connection();
        let threads = [1, 2, 3, 4, 5].map(|at| {
            let connection = connection.clone();
            thread::spawn(move || {
                let outcome = block_on(connection.ask(read(at)));
                assert!(is_answer_of(&outcome, at), "{outcome:?}");
            })
        });
        join(threads);
        let state = connection.lock();
        assert!(state.waiting.is_empty() && !state.sending && state.input.is_some());
    });
}

/// Polls a request so often at most, and then gives it up.
async fn ask_for_a_while(connection: &Connection, question: Request, polls: usize) {
    let mut asked = pin!(connection.ask(question));
    let mut left = polls;
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(());
        }
        left -= 1;
        asked.as_mut().poll(context).map(drop)
    })
    .await;
}

/// Whoever gives up while it receives or sends takes the connection along; nobody else does.
#[test]
fn whoever_gives_up_keeps_nobody_waiting() {
    explore(|| {
        let connection = connection();
        let leaving = [1, 2].map(|at| {
            let connection = connection.clone();
            thread::spawn(move || {
                let polls = chance(6);
                block_on(ask_for_a_while(&connection, write(at), polls));
            })
        });
        let staying = [3, 4].map(|at| {
            let connection = connection.clone();
            thread::spawn(move || {
                let outcome = block_on(connection.ask(read(at)));
                let lost = matches!(outcome, Outcome::Lost(_)) && connection.is_broken();
                assert!(lost || is_answer_of(&outcome, at), "{outcome:?}");
            })
        });
        join(leaving);
        join(staying);
    });
}

/// The server hangs up while requests are anywhere.
#[test]
fn everybody_learns_of_the_end() {
    explore(|| {
        let connection = connection();
        let threads = [1, 2, 3].map(|at| {
            let connection = connection.clone();
            thread::spawn(move || {
                let question = if at == 2 { write(at) } else { read(at) };
                match block_on(connection.ask(question)) {
                    Outcome::Lost(buffers) => {
                        assert!(connection.is_broken());
                        assert!(buffers.is_some() || at != 2, "a write has its buffers back");
                    }
                    Outcome::Done(_) => {}
                    Outcome::Failed(error) => panic!("{error}"),
                }
            })
        });
        connection.fail();
        join(threads);
    });
}
