//! HTTP, on a thread of its own: connections, and the bounds of what they may send and leave unread.
//! What requests mean is up to the `service`.

use std::convert::Infallible;
use std::future::poll_fn;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_channel::oneshot;
use futures_util::future::{Either, select};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::time::{sleep, timeout};
use vellum_export::nbd::Stop;

use crate::failure::{Failure, message};

use super::access::Access;
use super::connections::{Connected, ConnectionState, Connections};
use super::listen::{Bound, Socket, SocketFile};
use super::patient::{Patient, WRITE_TIME};
use super::problem::Problem;
use super::service::Service;
use super::tls_front::TlsFront;
use super::{Request, Response};

/// So long may a client take for the head of a request, and wait between two of them.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// Longer heads are refused.
const MAX_HEAD_BYTES: usize = 16 << 10;
const MAX_HEADERS: usize = 64;
/// So long may a client take for the body of a request.
const BODY_TIME: Duration = Duration::from_secs(10);
/// Longer bodies are refused.
const MAX_BODY_BYTES: usize = 256 << 10;
/// What of an answer is given to the connection at once.
const PIECE_BYTES: usize = 64 << 10;
/// So long may the last answers take.
const FAREWELL: Duration = Duration::from_secs(1);
/// So long nobody is taken in where the system has no room for a connection.
const REST: Duration = Duration::from_millis(100);

/// Serves sockets until it is told to stop. What is returned hears when the thread has ended and the
/// sockets are gone.
///
/// # Errors
/// If there can be no thread.
pub(super) fn start(
    bound: Vec<Bound>,
    service: Service,
    stop: Stop,
) -> Result<oneshot::Receiver<()>, Failure> {
    let failed = |error: std::io::Error| message(format!("Failed to serve HTTP: {error}"));
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_io().enable_time().build().map_err(failed)?;
    let (done, ended) = oneshot::channel();
    let thread = std::thread::Builder::new().name("http".to_owned());
    let spawned = thread.spawn(move || {
        runtime.block_on(serve(bound, service, stop));
        drop(runtime);
        // Nobody need wait for it.
        let _ = done.send(());
    });
    spawned.map_err(|error| {
        let error = vellum::Error::no_thread(&error);
        message(format!("Failed to serve HTTP: {}", error.message()))
    })?;
    Ok(ended)
}

async fn serve(bound: Vec<Bound>, service: Service, stop: Stop) {
    let mut all = Vec::new();
    for one in bound {
        let connections = Arc::new(Connections::default());
        all.push(connections.clone());
        let door = Arc::new(Door {
            access: one.access,
            service: service.clone(),
            connections,
            stop: stop.clone(),
        });
        let tls = one.tls.map(TlsFront::start);
        tokio::spawn(take_in(one.socket, tls, door));
    }
    stop.wait().await;
    let gone = async {
        for connections in &all {
            connections.all_gone().await;
        }
    };
    // Those that have not gone by then are hung up on with the runtime.
    let _ = timeout(FAREWELL, gone).await;
}

/// What the connections of one socket have in common.
struct Door {
    access: Access,
    service: Service,
    connections: Arc<Connections>,
    stop: Stop,
}

enum Listener {
    Unix(
        UnixListener,
        #[allow(dead_code, reason = "goes with the socket")] SocketFile,
    ),
    Tcp(TcpListener),
}

impl Listener {
    fn new(socket: Socket) -> std::io::Result<Listener> {
        match socket {
            Socket::Unix(socket, file) => {
                let listener = UnixListener::from_std(StdUnixListener::from(socket))?;
                Ok(Listener::Unix(listener, file))
            }
            Socket::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                Ok(Listener::Tcp(TcpListener::from_std(listener)?))
            }
        }
    }
}

/// Takes clients in until the end.
async fn take_in(socket: Socket, tls: Option<TlsFront>, door: Arc<Door>) {
    let Ok(listener) = Listener::new(socket) else {
        return;
    };
    loop {
        let taken = pin!(take_one(&listener, tls.as_ref(), &door));
        match select(taken, pin!(door.stop.wait())).await {
            Either::Left((Ok(()), _)) => {}
            Either::Left((Err(_), _)) => sleep(REST).await,
            Either::Right(_) => return,
        }
    }
}

async fn take_one(
    listener: &Listener,
    tls: Option<&TlsFront>,
    door: &Arc<Door>,
) -> std::io::Result<()> {
    match listener {
        Listener::Unix(listener, _) => {
            let (stream, _) = listener.accept().await?;
            begin(door, stream);
        }
        Listener::Tcp(listener) => {
            let (stream, _) = listener.accept().await?;
            match tls {
                None => begin(door, stream),
                Some(tls) => begin(door, tls.secure(stream.into_std()?)?),
            }
        }
    }
    Ok(())
}

/// Serves a client beside the others, if there is room.
fn begin<S>(door: &Arc<Door>, stream: S)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let Some(connected) = door.connections.admit() else {
        return;
    };
    let state = connected.state.clone();
    let task = tokio::spawn(converse(door.clone(), stream, connected));
    door.connections.note(state, task.abort_handle());
}

async fn converse<S>(door: Arc<Door>, stream: S, connected: Connected)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let state = connected.state.clone();
    let answer = |request| {
        let (door, state) = (door.clone(), state.clone());
        async move { Ok::<_, Infallible>(respond(&door, &state, request).await) }
    };
    let stream = TokioIo::new(Patient::new(stream, WRITE_TIME));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(stream, service_fn(answer));
    let mut connection = pin!(connection);
    // What clients do wrong is their matter.
    if let Either::Right(_) = select(connection.as_mut(), pin!(door.stop.wait())).await {
        connection.as_mut().graceful_shutdown();
        let _ = connection.await;
    }
    drop(connected);
}

async fn respond(
    door: &Door,
    state: &Arc<ConnectionState>,
    request: hyper::Request<Incoming>,
) -> hyper::Response<Unsent> {
    let (head, body) = request.into_parts();
    let mut request = Request {
        method: head.method.as_str().to_owned(),
        target: target(&head.uri),
        host: text(&head.headers, HOST),
        authorization: head
            .headers
            .get(AUTHORIZATION)
            .map(|value| value.as_bytes().to_vec()),
        content_type: text(&head.headers, CONTENT_TYPE),
        body: Vec::new(),
    };
    // Whoever may not do anything need not send a body.
    let read = match door.access.check(&request) {
        Ok(()) => match timeout(BODY_TIME, read(body)).await {
            Ok(read) => read,
            Err(_) => Err(Problem::new(408, "The body did not come in time")),
        },
        Err(problem) => Err(problem),
    };
    let response = match read {
        Ok(body) => {
            request.body = body;
            let _busy = state.work();
            door.service.answer(&request, &door.access).await
        }
        Err(problem) => {
            let mut response = problem.response();
            // What is left of the body would be taken for the next request.
            response.headers.push(("connection", "close".to_owned()));
            response
        }
    };
    door.connections.make_room(response.body.len(), state);
    to_hyper(response, state.clone())
}

/// The target as it was sent: a whole address, which only proxies are asked for, is refused later.
fn target(uri: &hyper::Uri) -> String {
    match (uri.scheme(), uri.path_and_query()) {
        (None, Some(target)) => target.as_str().to_owned(),
        _ => uri.to_string(),
    }
}

fn text(headers: &hyper::HeaderMap, name: HeaderName) -> Option<String> {
    let mut values = headers.get_all(name).iter();
    let only = values.next().filter(|_| values.next().is_none())?;
    Some(only.to_str().ok()?.to_owned())
}

async fn read(mut body: Incoming) -> Result<Vec<u8>, Problem> {
    let too_long = || {
        let detail = format!("A body has {MAX_BODY_BYTES} bytes at most");
        Problem::new(413, detail)
    };
    if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
        return Err(too_long());
    }
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let frame = frame.map_err(|_| Problem::new(400, "The body cannot be read"))?;
        let data = frame.data_ref().map_or(&[][..], |data| data);
        if bytes.len() + data.len() > MAX_BODY_BYTES {
            return Err(too_long());
        }
        bytes.extend_from_slice(data);
    }
    Ok(bytes)
}

fn to_hyper(response: Response, state: Arc<ConnectionState>) -> hyper::Response<Unsent> {
    state.begin_answer(response.body.len());
    let mut answer = hyper::Response::new(Unsent {
        rest: response.body.into(),
        state,
    });
    if let Ok(status) = hyper::StatusCode::from_u16(response.status) {
        *answer.status_mut() = status;
    }
    for (name, value) in response.headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            answer
                .headers_mut()
                .insert(HeaderName::from_static(name), value);
        }
    }
    answer
}

/// An answer on its way, piece by piece, so that it is known how much of it is left.
struct Unsent {
    rest: Bytes,
    state: Arc<ConnectionState>,
}

impl Body for Unsent {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        let len_bytes = self.rest.len().min(PIECE_BYTES);
        self.state.took(len_bytes);
        let piece = self.rest.split_to(len_bytes);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

impl Drop for Unsent {
    fn drop(&mut self) {
        self.state.end_answer();
    }
}
