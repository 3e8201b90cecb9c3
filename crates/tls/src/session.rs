//! A secured connection: OpenSSL on two buffers, and the socket beside it.
//!
//! Invariant: OpenSSL finds no failure of another session of the same thread
//! ([`TlsStream::lock`]).

use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::sync::Arc;

use openssl::error::ErrorStack;
use openssl::ssl::{ErrorCode, Ssl, SslStream};
use openssl::x509::verify::X509CheckFlags;
use parking_lot::{Mutex, MutexGuard};
use vellum_io::lane::net::Stream;
use vellum_io::{Buffer, Buffers, Error, Io, Result};
use vellum_nbd::Secured;

use crate::credentials::{Credentials, Kind};
use crate::peer::{self, Findings};
use crate::{Authorizer, error};

/// How much is received at once: two records.
const RECEIVE_BYTES: usize = 36 << 10;
/// How much is encrypted before it is sent.
const SEND_BYTES: usize = 256 << 10;
/// What GnuTLS says of a peer that hangs up without a word.
const CUT_OFF: &str = "The TLS connection was non-properly terminated.";

/// The encrypted bytes of a session on their way in and out.
#[derive(Debug, Default)]
struct Pipe {
    incoming: Vec<u8>,
    taken: usize,
    ended: bool,
    outgoing: Vec<u8>,
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
    stream: Stream,
    session: Mutex<SslStream<Pipe>>,
    /// Held by the one who sends what the session wants to say: records in order.
    sending: async_lock::Mutex<()>,
}

fn handshake_failed(reason: &str) -> Error {
    error(format!("TLS handshake failed: {reason}"))
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
            findings.judge(secured.lock().ssl(), hostname)?;
            if hostname.is_none() {
                return Err(error("No hostname for certificate validation"));
            }
        }
        Kind::Psk => peer::check_key(secured.lock().ssl())?,
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
        let session = secured.lock();
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
    let session = SslStream::new(session, Pipe::default())
        .map_err(|_| handshake_failed("no memory for a session"))?;
    let secured = Arc::new(TlsStream {
        stream,
        session: Mutex::new(session),
        sending: async_lock::Mutex::new(()),
    });
    loop {
        let stepped = step(&mut secured.lock());
        match stepped {
            Ok(()) => {
                // A peer that is gone already shows as soon as something is read.
                let _ = secured.send_outgoing().await;
                return Ok(secured);
            }
            Err(cause) if cause.code() == ErrorCode::WANT_READ => {
                secured
                    .send_outgoing()
                    .await
                    .map_err(|cause| handshake_failed(cause.message()))?;
                secured
                    .receive()
                    .await
                    .map_err(|cause| handshake_failed(cause.message()))?;
            }
            Err(_) if secured.lock().get_ref().ended => return Err(handshake_failed(CUT_OFF)),
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

impl TlsStream {
    /// The session, for one step. OpenSSL keeps a list of what has failed for each thread,
    /// and looks there for what a step has come to. A lane has many sessions: what one has
    /// left there, such as a signature that is not good, would end all the others.
    fn lock(&self) -> MutexGuard<'_, SslStream<Pipe>> {
        let session = self.session.lock();
        drop(ErrorStack::get());
        session
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
        let bytes = std::mem::take(&mut self.lock().get_mut().outgoing);
        let sent = Buffers::from_iter([Buffer::copy_of(&bytes)]);
        self.stream.send(sent).await?;
        Ok(())
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

    /// Takes decrypted bytes; `None` if more must be received first.
    fn take(&self, place: &mut [u8]) -> Result<Option<usize>> {
        let mut session = self.lock();
        match session.ssl_read(place) {
            Ok(count) => Ok(Some(count)),
            Err(cause) => match cause.code() {
                ErrorCode::WANT_READ => Ok(None),
                ErrorCode::ZERO_RETURN => Ok(Some(0)),
                _ if session.get_ref().ended => {
                    Err(error(format!("Cannot read from TLS channel: {CUT_OFF}")))
                }
                _ => Err(error(format!(
                    "Cannot read from TLS channel: {}",
                    reason(&cause)
                ))),
            },
        }
    }

    async fn recv_decrypted(&self, mut buffer: Buffer) -> Result<(Buffer, usize)> {
        loop {
            let taken = self.take(&mut buffer)?;
            self.send_outgoing().await?;
            if let Some(count) = taken {
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

impl Secured for TlsStream {
    fn recv(self: Arc<Self>, buffer: Buffer) -> Io<(Buffer, usize)> {
        Io::boxed(async move { self.recv_decrypted(buffer).await })
    }

    fn send(self: Arc<Self>, buffers: Buffers) -> Io<(Buffers, Option<Error>)> {
        Io::boxed(async move {
            let sent = self.send_encrypted(&buffers).await;
            Ok((buffers, sent.err()))
        })
    }

    fn finish(self: Arc<Self>) -> Io<()> {
        Io::boxed(async move {
            // Its result tells about the peer's goodbye, which nobody waits for.
            let _ = self.lock().shutdown();
            self.send_outgoing().await
        })
    }

    fn stream(&self) -> &Stream {
        &self.stream
    }
}
