//! [`Client`]: requests to the daemon, one after the other.
//!
//! Invariant: an answer is bounded, and so is the time to connect and, unless somebody wants it
//! otherwise, that in which it has come.

use std::future::poll_fn;
use std::path::Path;
use std::pin::Pin;
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

const CONNECT_TIME: Duration = Duration::from_secs(10);
/// What a thousand disks have to tell is some megabytes.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Asks a daemon.
pub struct Client {
    address: Address,
    token: Option<HeaderValue>,
    /// How long an answer is waited for.
    limit: Option<Duration>,
    runtime: Runtime,
}

/// What a daemon has answered.
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

impl Client {
    /// Asks the daemon at an address, with the token in a file. An answer is waited for as long as
    /// `limit` says.
    ///
    /// # Errors
    /// What a person should read.
    pub fn new(
        address: Address,
        token_file: Option<&Path>,
        limit: Option<Duration>,
    ) -> Result<Client, String> {
        let token = token_file.map(read_token).transpose()?;
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_io().enable_time().build();
        Ok(Client {
            address,
            token,
            limit,
            runtime: runtime.map_err(|why| format!("Cannot speak HTTP: {}", io_text(&why)))?,
        })
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// What a person should read, where nothing was answered.
    pub fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer, String> {
        self.runtime.block_on(async {
            let connecting = timeout(CONNECT_TIME, self.connect());
            let stream = connecting
                .await
                .map_err(|_| self.failed("it does not answer"))?;
            let stream = stream.map_err(|why| self.failed(&io_text(&why)))?;
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

    async fn connect(&self) -> std::io::Result<Box<dyn Wire>> {
        Ok(match &self.address {
            Address::Unix(path) => Box::new(UnixStream::connect(path).await?),
            Address::Tcp(place) => Box::new(TcpStream::connect(place.as_str()).await?),
        })
    }

    fn failed(&self, why: &str) -> String {
        let place = match &self.address {
            Address::Unix(path) => format!("unix:{}", path.display()),
            Address::Tcp(place) => place.clone(),
        };
        format!("Cannot ask the daemon at {place}: {why}")
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
