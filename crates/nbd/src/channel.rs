//! What messages go through: a socket, plain or secured.
//!
//! Invariant: bytes received in the clear never count as said under TLS: whoever switches has none left
//! over.

use std::fmt;
use std::net::Shutdown;
use std::sync::Arc;

use vellum_io::lane::net::Stream;
use vellum_io::{Buffer, Buffers, Error, Io, Result};

/// A connection that carries the protocol. Clones share it.
///
/// One receive and one send may run at a time; of two sends on a plain connection
/// the bytes may mix, so wait for the first.
#[derive(Debug, Clone)]
pub enum Channel {
    /// The socket itself.
    Plain(Stream),
    /// Something around it, such as TLS.
    Secured(Arc<dyn Secured>),
}

/// A socket whose bytes are encrypted: that of `vellum-tls`, or of another TLS library.
pub trait Secured: Send + Sync + fmt::Debug {
    /// As [`Channel::recv`].
    fn recv(self: Arc<Self>, buffer: Buffer) -> Io<(Buffer, usize)>;

    /// As [`Channel::send`]: gives the buffers back, and what went wrong.
    fn send(self: Arc<Self>, buffers: Buffers) -> Io<(Buffers, Option<Error>)>;

    /// Tells the peer that nothing more comes.
    ///
    /// # Errors
    /// What the socket says; nobody waits for it.
    fn finish(self: Arc<Self>) -> Io<()>;

    /// The socket below.
    fn stream(&self) -> &Stream;
}

/// Secures a fresh connection, as one side of it. Who brings a TLS library implements this and
/// [`Secured`].
pub trait Upgrade: Send + Sync + fmt::Debug {
    /// Shakes hands with the peer on `stream` and checks who it is.
    ///
    /// # Errors
    /// If the handshake fails, or the peer is not who it should be.
    fn upgrade(&self, stream: Stream) -> Io<Arc<dyn Secured>>;
}

impl From<Stream> for Channel {
    fn from(stream: Stream) -> Self {
        Channel::Plain(stream)
    }
}

impl Channel {
    /// Receives what is there, at least one byte, at most the buffer's length;
    /// 0 bytes mean that the peer is done.
    ///
    /// # Errors
    /// What the system says of the socket; of a secured one also what breaks its encryption.
    pub async fn recv(&self, buffer: Buffer) -> Result<(Buffer, usize)> {
        match self {
            Channel::Plain(stream) => stream.recv(buffer).await,
            Channel::Secured(secured) => secured.clone().recv(buffer).await,
        }
    }

    /// Sends all of the buffers in order; gives them back, whatever became of it.
    pub async fn send(&self, buffers: Buffers) -> (Buffers, Result<()>) {
        let sent = match self {
            Channel::Plain(stream) => stream.send_keeping(buffers).await,
            Channel::Secured(secured) => secured.clone().send(buffers).await,
        };
        match sent {
            Ok((buffers, None)) => (buffers, Ok(())),
            Ok((buffers, Some(error))) => (buffers, Err(error)),
            Err(error) => (Buffers::new(), Err(error)),
        }
    }

    /// Sends bytes.
    ///
    /// # Errors
    /// As [`Channel::recv`]. Some of the bytes may have been sent.
    pub async fn send_bytes(&self, bytes: &[u8]) -> Result<()> {
        let pieces = Buffers::from_iter([Buffer::copy_of(bytes)]);
        self.send(pieces).await.1
    }

    /// Tells the peer that nothing more comes, where that is more than the end of the
    /// connection.
    pub async fn finish(&self) {
        if let Channel::Secured(secured) = self {
            // Whoever is gone already need not know.
            let _ = secured.clone().finish().await;
        }
    }

    /// Secures a plain connection.
    ///
    /// # Errors
    /// What [`Upgrade::upgrade`] says: the handshake failed, or the peer is not who it should
    /// be.
    pub async fn upgrade(&self, upgrade: &dyn Upgrade) -> Result<Channel> {
        let secured = upgrade.upgrade(self.stream().clone()).await?;
        Ok(Channel::Secured(secured))
    }

    /// Whether the bytes are encrypted.
    pub fn is_secured(&self) -> bool {
        matches!(self, Channel::Secured(_))
    }

    /// The socket below.
    pub fn stream(&self) -> &Stream {
        match self {
            Channel::Plain(stream) => stream,
            Channel::Secured(secured) => secured.stream(),
        }
    }

    /// Ends one or both directions now.
    ///
    /// # Errors
    /// As [`Stream::shutdown`].
    pub fn shutdown(&self, how: Shutdown) -> Result<(), Error> {
        self.stream().shutdown(how)
    }
}
