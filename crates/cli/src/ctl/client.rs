//! [`Client`]: requests to the daemon, one after the other.
//!
//! Invariants:
//! - An answer is bounded, and so is the time to connect and, unless somebody wants it otherwise, that in
//!   which it has come.
//! - A token goes to a socket, to this machine, or to who has proved that it is the daemon, and nowhere else.

use std::future::poll_fn;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::mpsc::channel;
use std::time::Duration;

use http_body::Body;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Runtime;
use tokio::time::timeout;
use vellum_io::error::io_text;

use super::address::Address;
use super::secured::Secured;

const CONNECT_TIME: Duration = Duration::from_secs(10);
/// What a thousand disks have to tell is some megabytes.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Where a daemon is, and what is said to it of who asks.
#[derive(Debug)]
pub struct Peer {
    pub address: Address,
    /// A file with the token.
    pub token_file: Option<PathBuf>,
    /// A folder with certificates, for TLS.
    pub tls: Option<PathBuf>,
}

/// Looks up where a daemon is. The runtime's own way to do so panics if no thread can be started.
fn look_up(place: &str) -> Result<Vec<SocketAddr>, String> {
    if let Ok(known) = place.parse() {
        return Ok(vec![known]);
    }
    let (sender, receiver) = channel();
    let place = place.to_owned();
    let looking = move || {
        // Nobody listens to an answer that comes too late.
        let _ = sender.send(place.to_socket_addrs().map(Iterator::collect));
    };
    let started = std::thread::Builder::new().spawn(looking);
    started.map_err(|error| vellum::Error::no_thread(&error).message().to_owned())?;
    let found = receiver.recv_timeout(CONNECT_TIME);
    let found = found.map_err(|_| "its name is not looked up in time".to_owned())?;
    found.map_err(|error| io_text(&error))
}

/// Asks a daemon.
pub struct Client {
    address: Address,
    token: Option<HeaderValue>,
    /// Where the daemon is asked with TLS.
    secured: Option<Secured>,
    /// How long an answer is waited for.
    limit: Option<Duration>,
    runtime: Runtime,
}

/// What a daemon has answered.
struct Answer {
    status: u16,
    body: Vec<u8>,
}

impl Client {
    /// Asks a daemon. An answer is waited for as long as `limit` says.
    ///
    /// # Errors
    /// What a person should read.
    pub fn new(peer: Peer, limit: Option<Duration>) -> Result<Client, String> {
        let secured = match (&peer.address, peer.tls) {
            (Address::Tls(_), folder) => Some(Secured::new(folder.as_deref())?),
            (_, None) => None,
            (other, Some(_)) => {
                return Err(format!(
                    "--tls is for --connect https://HOST:PORT, and {other} is asked without TLS"
                ));
            }
        };
        let token = peer.token_file.as_deref().map(read_token).transpose()?;
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_io().enable_time().build();
        Ok(Client {
            address: peer.address,
            token,
            secured,
            limit,
            runtime: runtime.map_err(|why| format!("Cannot speak HTTP: {}", io_text(&why)))?,
        })
    }

    /// Asks for JSON; what the daemon refuses is an error.
    ///
    /// # Errors
    /// What a person should read.
    pub fn ask_json(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, String> {
        let answer = self.ask(method, path, body)?;
        let value: Result<Value, _> = serde_json::from_slice(&answer.body);
        match (answer.status, value) {
            (200, Ok(value)) => Ok(value),
            (status, Ok(value)) => {
                let detail = value["detail"].as_str().unwrap_or("no reason was given");
                Err(match status {
                    401 => format!("{detail}; say --token-file FILE"),
                    _ => detail.to_owned(),
                })
            }
            (status, Err(_)) => Err(format!(
                "What has answered is no daemon of ours (status {status})"
            )),
        }
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// What a person should read, where nothing was answered.
    fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer, String> {
        self.runtime.block_on(async {
            let connecting = timeout(CONNECT_TIME, self.connect());
            let stream = connecting
                .await
                .map_err(|_| self.failed("it does not answer"))?;
            let stream = stream.map_err(|why| self.failed(&why))?;
            let answer = self.converse(stream, method, path, body);
            let Some(limit) = self.limit else {
                return answer.await;
            };
            timeout(limit, answer).await.map_err(|_| {
                self.failed(&format!(
                    "it has not answered within {} s, and may do what it was asked all the same; \
                     --timeout SECONDS waits longer",
                    limit.as_secs_f64()
                ))
            })?
        })
    }

    async fn connect(&self) -> Result<Box<dyn Wire>, String> {
        let told = |why: std::io::Error| io_text(&why);
        Ok(match (&self.address, &self.secured) {
            (Address::Unix(path), _) => Box::new(UnixStream::connect(path).await.map_err(told)?),
            (Address::Tls(place), Some(secured)) => {
                let found = look_up(place)?;
                let stream = TcpStream::connect(&found[..]).await.map_err(told)?;
                Box::new(secured.secure(place, stream).await?)
            }
            (Address::Tcp(place) | Address::Tls(place), _) => {
                let found = look_up(place)?;
                self.refuse_to_tell(&found)?;
                Box::new(TcpStream::connect(&found[..]).await.map_err(told)?)
            }
        })
    }

    /// Refuses to show a token in the clear to whoever is at, or on the way to, another machine.
    fn refuse_to_tell(&self, places: &[SocketAddr]) -> Result<(), String> {
        let is_here = |place: &SocketAddr| place.ip().to_canonical().is_loopback();
        match self.token.is_none() || places.iter().all(is_here) {
            true => Ok(()),
            false => Err(
                "that is not this machine, and the token would be sent in the clear: say --connect \
                 https://HOST:PORT, or unix:PATH"
                    .to_owned(),
            ),
        }
    }

    fn failed(&self, why: &str) -> String {
        format!("Cannot ask the daemon at {}: {why}", self.address)
    }

    async fn converse(
        &self,
        stream: Box<dyn Wire>,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Answer, String> {
        let failed = |why: hyper::Error| self.failed(&why.to_string());
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.map_err(failed)?;
        let connection = tokio::spawn(connection);
        let mut request = hyper::Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, self.address.host())
            .header(CONTENT_TYPE, "application/json");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, token.clone());
        }
        let body = body.map_or_else(String::new, Value::to_string);
        let request = request
            .body(body)
            .map_err(|why| self.failed(&why.to_string()))?;
        let answer = sender.send_request(request).await.map_err(failed)?;
        let (head, mut incoming) = answer.into_parts();
        let mut body = Vec::new();
        while let Some(frame) = poll_fn(|context| Pin::new(&mut incoming).poll_frame(context)).await
        {
            let frame = frame.map_err(failed)?;
            body.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            if body.len() > MAX_ANSWER_BYTES {
                return Err(self.failed("the answer is too long"));
            }
        }
        connection.abort();
        Ok(Answer {
            status: head.status.as_u16(),
            body,
        })
    }
}

/// A connection.
trait Wire: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Wire for S {}

fn read_token(file: &Path) -> Result<HeaderValue, String> {
    let read = vellum_storage::secret::read_file(file);
    let place = file.display();
    let bytes = read.map_err(|why| format!("Cannot read '{place}': {}", io_text(&why)))?;
    let mut header = b"Bearer ".to_vec();
    header.extend_from_slice(bytes.trim_ascii());
    let value = HeaderValue::from_bytes(&header);
    let mut value = value.map_err(|_| format!("What is in '{place}' is no token"))?;
    value.set_sensitive(true);
    Ok(value)
}
