//! Receiving: as much as there is at once, messages out of one buffer, payloads
//! straight to where they belong.

use std::fmt;

use super::channel::Channel;
use vellum_io::{Buffer, Error};

/// How much is received at once.
const CHUNK_BYTES: usize = 64 << 10;

/// Why a connection ends before its time.
#[derive(Debug, Clone)]
pub enum Disconnect {
    /// The peer has closed its side.
    Closed,
    /// The socket failed.
    Failed(Error),
    /// The peer broke the protocol.
    Broken(&'static str),
    /// The peer could not prove who it is.
    Untrusted(Error),
}

impl From<Error> for Disconnect {
    fn from(error: Error) -> Self {
        Disconnect::Failed(error)
    }
}

impl fmt::Display for Disconnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Disconnect::Closed => f.write_str("the peer hung up"),
            Disconnect::Failed(error) => write!(f, "{error}"),
            Disconnect::Broken(what) => f.write_str(what),
            Disconnect::Untrusted(error) => f.write_str(error.message()),
        }
    }
}

/// Received bytes that were not used yet.
#[derive(Debug)]
pub struct ReceiveBuffer {
    chunk: Buffer,
    start: usize,
    end: usize,
}

impl Default for ReceiveBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl ReceiveBuffer {
    /// Longest message that [`ReceiveBuffer::need`] can wait for.
    pub const MAX_MESSAGE_BYTES: usize = CHUNK_BYTES;

    /// Nothing yet.
    pub fn new() -> Self {
        ReceiveBuffer {
            chunk: Buffer::for_read(CHUNK_BYTES),
            start: 0,
            end: 0,
        }
    }

    /// What is here and not used yet.
    pub fn available(&self) -> &[u8] {
        &self.chunk[self.start..self.end]
    }

    /// Uses up `len_bytes` of what is [`ReceiveBuffer::available`].
    pub fn consume(&mut self, len_bytes: usize) {
        self.start += len_bytes;
        debug_assert!(self.start <= self.end);
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Receives until `len_bytes` bytes are available, at most
    /// [`ReceiveBuffer::MAX_MESSAGE_BYTES`].
    ///
    /// # Errors
    /// [`Disconnect::Closed`] if the peer closes its side before, [`Disconnect::Failed`] if the
    /// socket fails.
    pub async fn need(&mut self, channel: &Channel, len_bytes: usize) -> Result<(), Disconnect> {
        debug_assert!(len_bytes <= Self::MAX_MESSAGE_BYTES);
        while self.available().len() < len_bytes {
            self.receive(channel).await?;
        }
        Ok(())
    }

    async fn receive(&mut self, channel: &Channel) -> Result<(), Disconnect> {
        self.chunk.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let mut tail = std::mem::replace(&mut self.chunk, Buffer::zeroed(0));
        let kept = tail.split_to(self.end);
        let (tail, received) = channel.recv(tail).await?;
        self.chunk = Buffer::join_all([kept, tail]);
        self.end += received;
        if received == 0 {
            Err(Disconnect::Closed)
        } else {
            Ok(())
        }
    }

    /// Fills `payload` with the next bytes.
    ///
    /// # Errors
    /// As [`ReceiveBuffer::need`].
    pub async fn fill(
        &mut self,
        channel: &Channel,
        mut payload: Buffer,
    ) -> Result<Buffer, Disconnect> {
        let here = self.available().len().min(payload.len());
        payload[..here].copy_from_slice(&self.available()[..here]);
        self.consume(here);
        if here == payload.len() {
            return Ok(payload);
        }
        let mut filled = payload.split_to(here);
        let mut rest = payload;
        while !rest.is_empty() {
            let (mut buffer, received) = channel.recv(rest).await?;
            if received == 0 {
                return Err(Disconnect::Closed);
            }
            filled = Buffer::join_all([filled, buffer.split_to(received)]);
            rest = buffer;
        }
        Ok(filled)
    }

    /// Drops the next `len_bytes` bytes.
    ///
    /// # Errors
    /// As [`ReceiveBuffer::need`].
    pub async fn skip(&mut self, channel: &Channel, mut len_bytes: u64) -> Result<(), Disconnect> {
        loop {
            let here = (self.available().len() as u64).min(len_bytes);
            self.consume(here as usize);
            len_bytes -= here;
            if len_bytes == 0 {
                return Ok(());
            }
            self.receive(channel).await?;
        }
    }
}
