//! Requests that are on their way, for whoever waits for them.

use futures_channel::oneshot;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};

use super::wire::{self, FileState, Reader};

/// What a read has brought: its buffers, and how many bytes of them.
pub(super) type Filled = (Buffers, u64);

/// A request on its way.
#[derive(Debug)]
pub(super) struct Answer(pub(super) oneshot::Receiver<Result<Filled>>);

impl Answer {
    pub(super) async fn wait(self) -> Result<Filled> {
        self.0.await.unwrap_or_else(|_| Err(lost()))
    }
}

/// A write on its way.
#[derive(Debug)]
pub(super) struct Written(pub(super) Answer, pub(super) oneshot::Receiver<Buffers>);

impl Written {
    pub(super) async fn wait(self) -> Result<Buffers> {
        let buffers = self.1.await;
        self.0.wait().await?;
        buffers.map_err(|_| lost())
    }
}

/// A look at the file on its way, and what it was.
#[derive(Debug)]
pub(super) struct Looked(pub(super) Answer, pub(super) FileState);

impl Looked {
    /// Whether the file is what it was.
    pub(super) async fn wait(self) -> Result<bool> {
        let (body, _) = self.0.wait().await?;
        Ok(wire::file_state(Reader(&Buffer::join_all(body)))? == self.1)
    }
}

pub(super) fn lost() -> Error {
    Error::new(ErrorKind::Io, "wait", "the connection is lost").with_errno(libc::ECONNRESET)
}
