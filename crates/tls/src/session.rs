//! A secured connection: OpenSSL on two buffers, and the socket beside it.
//!
//! Invariants:
//! - Whoever receives waits for nobody who sends: the peer may be one that does not read
//!   before it is read from.
//! - OpenSSL finds no failure of another session of the same thread ([`Session::lock`]).

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown};
use std::sync::Arc;

use openssl::error::ErrorStack;
use openssl::ssl::{ErrorCode, Ssl, SslStream};
use openssl::x509::verify::X509CheckFlags;
use parking_lot::{Mutex, MutexGuard};
use vellum_io::lane::net::Stream;
use vellum_io::{Buffer, Buffers, Error, Io, Result, spawn};
use vellum_nbd::Secured;

use crate::authorizer::Authorizer;
use crate::credentials::{Credentials, Kind};
use crate::error::error;
use crate::peer::{self, Findings};

/// How much is received at once: two records.
const RECEIVE_BYTES: usize = 36 << 10;
/// How much is encrypted before it is sent.
const SEND_BYTES: usize = 256 << 10;
/// So much is kept for a peer that asks for answers and reads none: more than what is
/// received at once asks for.
const MAX_ANSWERS_BYTES: usize = 64 << 10;
/// What GnuTLS says of a peer that hangs up without a word.
const CUT_OFF: &str = "The TLS connection was non-properly terminated.";

/// The encrypted bytes of a session on their way in and out.
#[derive(Debug, Default)]
struct Pipe {
    incoming: Vec<u8>,
    taken: usize,
    ended: bool,
    outgoing: Vec<u8>,
    answers: Answers,
}

/// What a session says because of what it has read: that it takes new keys, too.
#[derive(Debug, Default)]
struct Answers {
    /// How much of what is outgoing are answers.
    len_bytes: usize,
    /// Somebody sees to it that they are sent.
    are_sent: bool,
}

/// What has become of a read.
#[derive(Debug)]
struct Taken {
    /// Decrypted bytes; `None` if more must be received first.
    count: Option<usize>,
    /// There are answers that nobody sends so far.
    has_answers: bool,
}

impl Read for Pipe {
    fn read(&mut self, place: &mut [u8]) -> io::Result<usize> {
        let rest = &self.incoming[self.taken..];
        if rest.is_empty() {
            return match self.ended {
                true => Ok(0),
                false => Err(io::ErrorKind::WouldBlock.into()),
            };
        }
        let count = rest.len().min(place.len());
        place[..count].copy_from_slice(&rest[..count]);
        self.taken += count;
        if self.taken == self.incoming.len() {
            self.incoming.clear();
            self.taken = 0;
        }
        Ok(count)
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outgoing.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection under TLS.
#[derive(Debug)]
pub(crate) struct TlsStream {
    session: Arc<Session>,
}

/// What a connection is made of. Whoever sends its answers has it, too.
#[derive(Debug)]
struct Session {
    stream: Stream,
    state: Mutex<SslStream<Pipe>>,
    /// Held by the one who sends what the session wants to say: records in order.
    sending: async_lock::Mutex<()>,
}

fn handshake_failed(reason: &str) -> Error {
    error(format!("TLS handshake failed: {reason}"))
}

fn cannot_read(reason: &str) -> Error {
    error(format!("Cannot read from TLS channel: {reason}"))
}

/// Connects as a client to a server that must be `hostname`.
pub(crate) async fn connect(
    credentials: &Credentials,
    hostname: Option<&str>,
    stream: Stream,
) -> Result<Arc<TlsStream>> {
    let mut session = credentials.session()?;
    let findings = Findings::default();
    if credentials.wants_certificate() {
        if let Some(name) = hostname {
            expect_name(&mut session, name)
                .map_err(|_| error(format!("Cannot set TLS hostname {name}")))?;
        }
        findings.watch(&mut session);
    }
    if credentials.kind() == Kind::Psk {
        peer::refuse_certificates(&mut session);
    }
    let secured = shake_hands(session, stream, SslStream::connect).await?;
    match credentials.kind() {
        Kind::X509 if credentials.wants_certificate() => {
            findings.judge(secured.session.lock().ssl(), hostname)?;
            if hostname.is_none() {
                return Err(error("No hostname for certificate validation"));
            }
        }
        Kind::Psk => peer::check_key(secured.session.lock().ssl())?,
        // The user has said that nothing need be proved.
        Kind::X509 | Kind::Anonymous => {}
    }
    Ok(secured)
}

fn expect_name(session: &mut Ssl, name: &str) -> Result<(), ErrorStack> {
    match name.parse::<IpAddr>() {
        Ok(address) => session.param_mut().set_ip(address),
        Err(_) => {
            session.set_hostname(name)?;
            let parameters = session.param_mut();
            // A star stands for a whole part of a name, as for GnuTLS.
            parameters.set_hostflags(X509CheckFlags::NO_PARTIAL_WILDCARDS);
            parameters.set_host(name)
        }
    }
}

/// Takes in a client.
pub(crate) async fn accept(
    credentials: &Credentials,
    authorizer: Option<&dyn Authorizer>,
    stream: Stream,
) -> Result<Arc<TlsStream>> {
    let mut session = credentials.session()?;
    let findings = Findings::default();
    if credentials.wants_certificate() {
        findings.watch(&mut session);
    }
    let secured = shake_hands(session, stream, SslStream::accept).await?;
    {
        let session = secured.session.lock();
        match credentials.kind() {
            Kind::X509 if credentials.wants_certificate() => {
                findings.judge(session.ssl(), None)?;
            }
            Kind::Psk => peer::check_key(session.ssl())?,
            // The user has said that nothing need be proved.
            Kind::X509 | Kind::Anonymous => {}
        }
        if let Some(authorizer) = authorizer {
            peer::authorize(session.ssl(), authorizer)?;
        }
    }
    Ok(secured)
}

type Step = fn(&mut SslStream<Pipe>) -> Result<(), openssl::ssl::Error>;

/// Exchanges messages until both sides are content. After a failure nothing more is
/// said: the peer sees the end of the connection.
async fn shake_hands(session: Ssl, stream: Stream, step: Step) -> Result<Arc<TlsStream>> {
    let state = SslStream::new(session, Pipe::default())
        .map_err(|_| handshake_failed("no memory for a session"))?;
    let session = Arc::new(Session {
        stream,
        state: Mutex::new(state),
        sending: async_lock::Mutex::new(()),
    });
    loop {
        let stepped = step(&mut session.lock());
        match stepped {
            Ok(()) => {
                // A peer that is gone already shows as soon as something is read.
                let _ = session.send_outgoing().await;
                return Ok(Arc::new(TlsStream { session }));
            }
            Err(cause) if cause.code() == ErrorCode::WANT_READ => {
                session
                    .send_outgoing()
                    .await
                    .map_err(|cause| handshake_failed(cause.message()))?;
                session
                    .receive()
                    .await
                    .map_err(|cause| handshake_failed(cause.message()))?;
            }
            Err(_) if session.lock().get_ref().ended => return Err(handshake_failed(CUT_OFF)),
            Err(cause) => return Err(handshake_failed(&reason(&cause))),
        }
    }
}

/// Why the session has failed, in GnuTLS's words where they are known.
fn reason(cause: &openssl::ssl::Error) -> String {
    let last = cause.ssl_error().and_then(|stack| stack.errors().last());
    match last.and_then(|one| one.reason()) {
        // A key that differs shows as a proof that does not fit; one that is not known,
        // as a client that would have to be content with a certificate.
        Some("binder does not verify" | "no suitable signature algorithm") => {
            "An illegal parameter has been received.".to_owned()
        }
        Some(reason) => reason.to_owned(),
        None => "unknown error".to_owned(),
    }
}

impl Session {
    /// The session, for one step. OpenSSL keeps a list of what has failed for each thread,
    /// and looks there for what a step has come to. A lane has many sessions: what one has
    /// left there, such as a signature that is not good, would end all the others.
    fn lock(&self) -> MutexGuard<'_, SslStream<Pipe>> {
        let state = self.state.lock();
        drop(ErrorStack::get());
        state
    }

    fn take_outgoing(&self) -> Vec<u8> {
        let mut state = self.lock();
        let pipe = state.get_mut();
        pipe.answers.len_bytes = 0;
        std::mem::take(&mut pipe.outgoing)
    }

    /// Sends what the session wants to say.
    async fn send_outgoing(&self) -> Result<()> {
        if self.lock().get_ref().outgoing.is_empty() {
            return Ok(());
        }
        let _turn = self.sending.lock().await;
        self.send_taken().await
    }

    /// The caller holds `sending`.
    async fn send_taken(&self) -> Result<()> {
        let sent = Buffers::from_iter([Buffer::copy_of(&self.take_outgoing())]);
        self.stream.send(sent).await?;
        Ok(())
    }

    /// Sends answers, until there are none.
    async fn send_answers(&self) {
        let _turn = self.sending.lock().await;
        while self.has_answers() {
            if self.send_taken().await.is_err() {
                // Whoever receives or sends next hears of it.
                return;
            }
        }
    }

    /// Whether there are answers to be sent; if not, nobody sends them any more.
    fn has_answers(&self) -> bool {
        let mut state = self.lock();
        let answers = &mut state.get_mut().answers;
        answers.are_sent = answers.len_bytes > 0;
        answers.are_sent
    }

    /// Receives encrypted bytes.
    async fn receive(&self) -> Result<()> {
        let received = self.stream.recv(Buffer::for_read(RECEIVE_BYTES)).await;
        let (buffer, count) = match received {
            // A peer that hangs up before it has read everything.
            Err(cause) if cause.errno() == libc::ECONNRESET => (Buffer::zeroed(0), 0),
            other => other?,
        };
        let mut session = self.lock();
        let pipe = session.get_mut();
        pipe.incoming.extend_from_slice(&buffer[..count]);
        pipe.ended |= count == 0;
        Ok(())
    }

    /// Takes decrypted bytes. Whoever is told of answers has them sent.
    fn take(&self, place: &mut [u8]) -> Result<Taken> {
        let mut state = self.lock();
        let before_bytes = state.get_ref().outgoing.len();
        let read = state.ssl_read(place);
        let count = match read {
            Ok(count) => Some(count),
            Err(cause) => match cause.code() {
                ErrorCode::WANT_READ => None,
                ErrorCode::ZERO_RETURN => Some(0),
                _ if state.get_ref().ended => return Err(cannot_read(CUT_OFF)),
                _ => return Err(cannot_read(&reason(&cause))),
            },
        };
        let pipe = state.get_mut();
        let answers = &mut pipe.answers;
        answers.len_bytes += pipe.outgoing.len() - before_bytes;
        if answers.len_bytes > MAX_ANSWERS_BYTES {
            return Err(cannot_read("the peer asks for answers, and takes none"));
        }
        let has_answers = answers.len_bytes > 0 && !answers.are_sent;
        answers.are_sent |= has_answers;
        Ok(Taken { count, has_answers })
    }

    async fn recv_decrypted(self: &Arc<Self>, mut buffer: Buffer) -> Result<(Buffer, usize)> {
        loop {
            let taken = self.take(&mut buffer)?;
            if taken.has_answers {
                let session = self.clone();
                drop(spawn(async move { session.send_answers().await }));
            }
            if let Some(count) = taken.count {
                return Ok((buffer, count));
            }
            self.receive().await?;
        }
    }

    async fn send_encrypted(&self, buffers: &Buffers) -> Result<()> {
        let _turn = self.sending.lock().await;
        for piece in buffers {
            for part in piece.chunks(SEND_BYTES) {
                self.lock().write_all(part).map_err(|cause| {
                    error(format!(
                        "Cannot write to TLS channel: {}",
                        vellum_io::error::io_text(&cause)
                    ))
                })?;
                if self.lock().get_ref().outgoing.len() >= SEND_BYTES {
                    self.send_taken().await?;
                }
            }
        }
        self.send_taken().await
    }
}

impl Drop for TlsStream {
    fn drop(&mut self) {
        if self.session.lock().get_ref().answers.are_sent {
            // Nobody is left who would end the connection if the peer does not take them.
            let _ = self.session.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Secured for TlsStream {
    fn recv(self: Arc<Self>, buffer: Buffer) -> Io<(Buffer, usize)> {
        Io::boxed(async move { self.session.recv_decrypted(buffer).await })
    }

    fn send(self: Arc<Self>, buffers: Buffers) -> Io<(Buffers, Option<Error>)> {
        Io::boxed(async move {
            let sent = self.session.send_encrypted(&buffers).await;
            Ok((buffers, sent.err()))
        })
    }

    fn finish(self: Arc<Self>) -> Io<()> {
        Io::boxed(async move {
            // Its result tells about the peer's goodbye, which nobody waits for.
            let _ = self.session.lock().shutdown();
            self.session.send_outgoing().await
        })
    }

    fn stream(&self) -> &Stream {
        &self.session.stream
    }
}
