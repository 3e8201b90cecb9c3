//! An open descriptor that requests share, and the syncs of its file.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use super::op::Op;
use super::syncs::Syncs;
use crate::sys;
use crate::{Error, Result};

/// An open descriptor that requests share, and its name for messages.
#[derive(Debug)]
pub struct Descriptor {
    /// `None` for requests that need none.
    fd: Option<OwnedFd>,
    name: String,
    /// See [`Descriptor::read_unit_bytes`].
    read_unit_bytes: u32,
    syncs: Syncs,
}

impl Descriptor {
    /// A descriptor for buffered I/O or a socket.
    pub fn new(fd: OwnedFd, name: impl Into<String>) -> Self {
        Self::direct(fd, name, 1)
    }

    /// Only a name, for calls that make a descriptor.
    pub fn none(name: String) -> Self {
        Self::of(None, name, 1)
    }

    fn of(fd: Option<OwnedFd>, name: String, read_unit_bytes: u32) -> Self {
        Descriptor {
            fd,
            name,
            read_unit_bytes,
            syncs: Syncs::default(),
        }
    }

    /// A descriptor for direct I/O in units of `read_unit_bytes`.
    pub fn direct(fd: OwnedFd, name: impl Into<String>, read_unit_bytes: u32) -> Self {
        Self::of(Some(fd), name.into(), read_unit_bytes)
    }

    /// The descriptor's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What a short direct read must be a multiple of, or it met the end of the file.
    pub(super) fn read_unit_bytes(&self) -> u32 {
        self.read_unit_bytes
    }

    /// Whether the page cache is between requests and the medium.
    pub(super) fn is_buffered(&self) -> bool {
        self.read_unit_bytes == 1
    }

    /// What is known of its syncs.
    pub(super) fn syncs(&self) -> &Syncs {
        &self.syncs
    }

    /// A flush of everything that has changed so far; `None`: all of it is durable.
    pub fn flush(&self) -> Option<Op> {
        let changes = self.syncs.changes_to_sync()?;
        Some(Op::Sync { changes })
    }

    /// Waits until a sync that the kernel calls good, and that has just ended, may be
    /// believed; it covers the first `changes` ones.
    ///
    /// # Errors
    /// If one that ran beside it has failed.
    pub async fn accept_sync(&self, operation: &'static str, changes: u64) -> Result<()> {
        let accepted = self.syncs.accept(changes).await;
        accepted.map_err(|errno| {
            let error = Error::from_errno(operation, errno).target(self.name());
            error.of_failed_sync()
        })
    }

    /// The raw descriptor, valid as long as `self`; -1 if there is none.
    pub fn raw(&self) -> RawFd {
        self.fd.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }
}

impl Drop for Descriptor {
    /// Locks would else stay until the kernel lets go of the file, which it holds a moment
    /// longer than the last request says; who opens it anew at once would be refused.
    fn drop(&mut self) {
        if let Some(fd) = &self.fd {
            sys::unlock(fd.as_raw_fd());
        }
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let fd = self.fd.as_ref();
        fd.expect("only a connect request is without a descriptor")
            .as_fd()
    }
}

/// A sync, or a write that is to be durable, until the kernel is done with it.
#[derive(Debug)]
pub(super) struct RunningSync {
    file: Arc<Descriptor>,
    number: u64,
}

impl RunningSync {
    /// Of a sync that is about to be asked for.
    pub(super) fn begin(file: &Arc<Descriptor>) -> Self {
        RunningSync {
            number: file.syncs.begin(),
            file: file.clone(),
        }
    }
}

impl Drop for RunningSync {
    fn drop(&mut self) {
        self.file.syncs.end(self.number);
    }
}
