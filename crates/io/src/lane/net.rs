//! Stream sockets on a lane: listeners and connections over unix and TCP.
//!
//! A listener or stream may be used from any lane thread; each request runs on
//! the lane of the thread that makes it. Dropping a receive or an accept cancels
//! it; a send goes on to its end.

use std::fmt;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use super::request::Step;
use super::{Completion, Descriptor, Op, Request, finish_buffers, submit};
use crate::sys;
use crate::{Buffer, Buffers, Error, Io, Result};

/// A socket that accepts connections. Clones share it.
#[derive(Debug, Clone)]
pub struct Listener {
    socket: ListenerSocket,
}

#[derive(Debug, Clone)]
enum ListenerSocket {
    Kernel(Arc<Descriptor>),
    Simulated(Arc<dyn ListenerBackend>),
}

/// A connection. Clones share it; it closes with the last one and the last
/// request.
#[derive(Debug, Clone)]
pub struct Stream {
    socket: Socket,
}

#[derive(Debug, Clone)]
enum Socket {
    Kernel(Arc<Descriptor>),
    Simulated(Arc<dyn StreamBackend>),
}

/// One end of a connection that is none of the kernel's, but of a simulation, which implements
/// this. Dropping it closes that end.
pub trait StreamBackend: Send + Sync + fmt::Debug {
    /// As [`Stream::recv`].
    fn recv(self: Arc<Self>, buffer: Buffer) -> Io<(Buffer, usize)>;

    /// As [`Stream::send_keeping`].
    fn send(self: Arc<Self>, buffers: Buffers) -> Io<(Buffers, Option<Error>)>;

    /// As [`Stream::has_peer_left`].
    fn has_peer_left(&self) -> bool;

    /// As [`Stream::shutdown`].
    fn shutdown(&self, how: Shutdown);
}

/// Where connections of a simulation come in, which implements this.
pub trait ListenerBackend: Send + Sync + fmt::Debug {
    /// As [`Listener::accept`].
    fn accept(self: Arc<Self>) -> Io<Stream>;
}

fn failure(operation: &'static str, target: &str, error: &io::Error) -> Error {
    Error::from_io(operation, error).target(target)
}

impl Listener {
    /// Listens on a unix socket; the path must not exist.
    ///
    /// # Errors
    /// What the system says: `EADDRINUSE` if the path exists.
    pub fn unix(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let listener = UnixListener::bind(path).map_err(|e| failure("listen", &name, &e))?;
        Self::new(listener.into(), name)
    }

    /// Listens on a TCP address such as `("0.0.0.0", 10809)`.
    ///
    /// # Errors
    /// What the system says if the name is not found, or the address cannot be listened on.
    pub fn tcp(address: impl ToSocketAddrs + fmt::Debug) -> Result<Self> {
        let name = format!("{address:?}");
        let listener = TcpListener::bind(address).map_err(|e| failure("listen", &name, &e))?;
        Self::new(listener.into(), name)
    }

    /// Takes over a socket that listens already (socket activation).
    ///
    /// # Errors
    /// What the system says if the descriptor cannot be made non-blocking.
    pub fn from_fd(fd: OwnedFd) -> Result<Self> {
        Self::new(fd, "listener".to_owned())
    }

    fn new(fd: OwnedFd, name: String) -> Result<Self> {
        // A connection that another process took first must not block the lane.
        sys::set_nonblocking(fd.as_fd())
            .map_err(|errno| Error::from_errno("listen", errno).target(name.as_str()))?;
        Ok(Listener {
            socket: ListenerSocket::Kernel(Arc::new(Descriptor::new(fd, name))),
        })
    }

    /// One of a simulation.
    pub fn simulated(port: Arc<dyn ListenerBackend>) -> Self {
        Listener {
            socket: ListenerSocket::Simulated(port),
        }
    }

    fn kernel(&self, operation: &'static str) -> Result<&Arc<Descriptor>> {
        match &self.socket {
            ListenerSocket::Kernel(descriptor) => Ok(descriptor),
            ListenerSocket::Simulated(_) => Err(Error::from_errno(operation, libc::ENOTSOCK)),
        }
    }

    /// The address of a TCP listener.
    ///
    /// # Errors
    /// If this is no TCP listener, but a unix socket or one of a simulation.
    pub fn local_address(&self) -> Result<SocketAddr> {
        let socket = self.kernel("listen")?;
        let clone = socket.as_fd().try_clone_to_owned();
        clone
            .and_then(|fd| TcpListener::from(fd).local_addr())
            .map_err(|e| failure("listen", socket.name(), &e))
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// What the system says, such as that the program has no more descriptors.
    pub fn accept(&self) -> Io<Stream> {
        match &self.socket {
            ListenerSocket::Kernel(socket) => submit(
                Request::new(socket.clone(), Op::Accept, Buffers::new()),
                finish_stream,
            ),
            ListenerSocket::Simulated(port) => port.clone().accept(),
        }
    }
}

/// The end of a request that makes a connection.
fn finish_stream(mut done: Completion) -> Result<Stream> {
    done.value()?;
    match done.request.made.take() {
        Some(fd) => Ok(Stream::new(fd, done.request.file.name())),
        None => Err(done.error(libc::EIO)),
    }
}

/// The end of a receive.
fn finish_receive(done: Completion) -> Result<(Buffer, usize)> {
    let count = done.value()? as usize;
    Ok((Buffer::join_all(done.request.buffers), count))
}

/// The end of a send: the buffers, and what went wrong.
fn finish_keeping(done: Completion) -> Result<(Buffers, Option<Error>)> {
    let error = done.value().err();
    Ok((done.request.buffers, error))
}

impl Stream {
    /// Connects to a unix socket.
    ///
    /// # Errors
    /// What the system says: nobody listens there.
    pub fn connect_unix(path: &Path) -> Io<Self> {
        let path = path.to_owned();
        Self::connect(path.display().to_string(), move || {
            UnixStream::connect(path).map(OwnedFd::from)
        })
    }

    /// Connects to a TCP address.
    ///
    /// # Errors
    /// What the system says: the name is not found, or nobody listens there.
    pub fn connect_tcp(host: &str, port: u16) -> Io<Self> {
        let host = host.to_owned();
        Self::connect(format!("{host}:{port}"), move || {
            TcpStream::connect((host.as_str(), port)).map(OwnedFd::from)
        })
    }

    /// Connects on a worker thread, as names may take blocking look-ups.
    fn connect(
        name: String,
        connect: impl FnOnce() -> io::Result<OwnedFd> + Send + 'static,
    ) -> Io<Self> {
        let work = move || match connect() {
            Ok(fd) => Ok(i64::from(fd.into_raw_fd())),
            // What has no error number is a name that could not be resolved.
            Err(error) => Err(error.raw_os_error().unwrap_or(libc::EHOSTUNREACH)),
        };
        let op = Op::Connect {
            work: Some(Box::new(work)),
        };
        let file = Arc::new(Descriptor::none(name));
        submit(Request::new(file, op, Buffers::new()), finish_stream)
    }

    /// Takes over a connected socket.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self::new(fd, "connection")
    }

    fn new(fd: OwnedFd, name: &str) -> Self {
        // Requests and replies are sent whole: waiting for more only delays them.
        // What is not TCP refuses, and has no such delay.
        let _ = sys::set_no_delay(fd.as_fd());
        Stream {
            socket: Socket::Kernel(Arc::new(Descriptor::new(fd, name))),
        }
    }

    /// One of a simulation.
    pub fn simulated(wire: Arc<dyn StreamBackend>) -> Self {
        Stream {
            socket: Socket::Simulated(wire),
        }
    }

    /// Two streams connected to each other.
    ///
    /// # Errors
    /// What the system says if it makes no more sockets.
    pub fn pair() -> Result<(Self, Self)> {
        let (a, b) = UnixStream::pair().map_err(|e| Error::from_io("connect", &e))?;
        Ok((Self::from_fd(a.into()), Self::from_fd(b.into())))
    }

    /// Receives what is there, at least one byte, at most the buffer's length.
    /// Gives the buffer back with the count; 0 means that the peer is done.
    ///
    /// # Errors
    /// What the system says: the connection is broken.
    pub fn recv(&self, buffer: Buffer) -> Io<(Buffer, usize)> {
        match &self.socket {
            Socket::Kernel(socket) => submit(
                Request::new(socket.clone(), Op::Receive, Buffers::from_buf([buffer])),
                finish_receive,
            ),
            Socket::Simulated(wire) => wire.clone().recv(buffer),
        }
    }

    /// Sends all of the buffers in order and gives them back. Of two sends on one
    /// stream at a time the bytes may mix: wait for the first.
    ///
    /// # Errors
    /// As [`Stream::recv`]. Some of the bytes may have been sent.
    pub fn send(&self, buffers: Buffers) -> Io<Buffers> {
        if crate::buffer::total_len(&buffers) == 0 {
            return Io::ready(Ok(buffers));
        }
        match &self.socket {
            Socket::Kernel(socket) => start_send(socket, buffers, finish_buffers),
            Socket::Simulated(wire) => {
                let sent = wire.clone().send(buffers);
                Io::boxed(async move {
                    match sent.await? {
                        (buffers, None) => Ok(buffers),
                        (_, Some(error)) => Err(error),
                    }
                })
            }
        }
    }

    /// As [`Stream::send`]; gives the buffers back after a failure too.
    ///
    /// # Errors
    /// As [`Stream::send`], beside the buffers where they can be given back.
    pub fn send_keeping(&self, buffers: Buffers) -> Io<(Buffers, Option<Error>)> {
        if crate::buffer::total_len(&buffers) == 0 {
            return Io::ready(Ok((buffers, None)));
        }
        match &self.socket {
            Socket::Kernel(socket) => start_send(socket, buffers, finish_keeping),
            Socket::Simulated(wire) => wire.clone().send(buffers),
        }
    }

    /// Another descriptor of the socket, for what streams have no word for.
    ///
    /// # Errors
    /// `ENOTSOCK` if it is one of a simulation; what the system says if there are no more
    /// descriptors.
    pub fn to_fd(&self) -> Result<OwnedFd> {
        match &self.socket {
            Socket::Kernel(socket) => {
                let clone = socket.as_fd().try_clone_to_owned();
                clone.map_err(|e| failure("connect", socket.name(), &e))
            }
            Socket::Simulated(_) => Err(Error::from_errno("connect", libc::ENOTSOCK)),
        }
    }

    /// Whether the peer has gone, and receives nothing more either; see [`super::has_hung_up`].
    pub fn has_hung_up(&self) -> bool {
        match &self.socket {
            Socket::Kernel(socket) => super::has_hung_up(socket.as_fd()),
            Socket::Simulated(wire) => wire.has_peer_left(),
        }
    }

    /// Whether the peer sends nothing more, or has gone, whatever it has sent before.
    pub fn has_peer_left(&self) -> bool {
        match &self.socket {
            Socket::Kernel(socket) => super::has_peer_left(socket.as_fd()),
            Socket::Simulated(wire) => wire.has_peer_left(),
        }
    }

    /// Ends one or both directions now: running requests on them end, and the
    /// peer sees it.
    ///
    /// # Errors
    /// What the system says; that the peer has gone already is no error.
    pub fn shutdown(&self, how: Shutdown) -> Result<()> {
        let socket = match &self.socket {
            Socket::Kernel(socket) => socket,
            Socket::Simulated(wire) => {
                wire.shutdown(how);
                return Ok(());
            }
        };
        match sys::shutdown(socket.as_fd(), how) {
            // Gone already: the peer was faster.
            Ok(()) | Err(libc::ENOTCONN) => Ok(()),
            Err(errno) => Err(Error::from_errno("shutdown", errno).target(socket.name())),
        }
    }
}

fn start_send<T>(
    socket: &Arc<Descriptor>,
    buffers: Buffers,
    finish: fn(Completion) -> Result<T>,
) -> Io<T> {
    let mut request = Request::new(socket.clone(), Op::Send, buffers);
    // What is sent mostly fits into the socket's memory: one system call now
    // costs less than a completion that ends the lane's next wait early.
    let answer = request.attempt();
    match request.advance(answer) {
        Step::Finished(result) => Io::ready(finish(Completion { request, result })),
        Step::Again | Step::WhenReady => submit(request, finish),
    }
}
