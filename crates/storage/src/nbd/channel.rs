//! What messages go through: a socket, plain or under TLS.

use std::net::Shutdown;

use crate::lane::net::Stream;
use crate::{Buffer, Buffers, Error, Result};

/// A connection that carries the protocol. Clones share it.
///
/// One receive and any number of sends may run at a time; of two sends on a plain
/// connection the bytes may mix, so wait for the first.
#[derive(Debug, Clone)]
pub enum Channel {
    /// The socket itself.
    Plain(Stream),
}

impl From<Stream> for Channel {
    fn from(stream: Stream) -> Self {
        Channel::Plain(stream)
    }
}

impl Channel {
    /// Receives what is there, at least one byte, at most the buffer's length;
    /// 0 bytes mean that the peer is done.
    pub async fn recv(&self, buffer: Buffer) -> Result<(Buffer, usize)> {
        match self {
            Channel::Plain(stream) => stream.recv(buffer).await,
        }
    }

    /// Sends all of the buffers in order; gives them back, whatever became of it.
    pub async fn send(&self, buffers: Buffers) -> (Buffers, Result<()>) {
        match self {
            Channel::Plain(stream) => match stream.send_keeping(buffers).await {
                Ok((buffers, None)) => (buffers, Ok(())),
                Ok((buffers, Some(error))) => (buffers, Err(error)),
                Err(error) => (Buffers::new(), Err(error)),
            },
        }
    }

    /// Sends bytes.
    pub async fn send_bytes(&self, bytes: &[u8]) -> Result<()> {
        let pieces = Buffers::from_iter([Buffer::copy_of(bytes)]);
        self.send(pieces).await.1
    }

    /// The socket below.
    pub fn stream(&self) -> &Stream {
        match self {
            Channel::Plain(stream) => stream,
        }
    }

    /// Ends one or both directions now.
    pub fn shutdown(&self, how: Shutdown) -> Result<(), Error> {
        self.stream().shutdown(how)
    }
}
