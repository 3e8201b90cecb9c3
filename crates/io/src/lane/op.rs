//! What a request does, and what follows from that for the backends.

use super::queue_entry::EntryCommand;
use crate::sys::Errno;

/// Work for a worker thread.
pub type Work = Box<dyn FnOnce() -> Result<i64, Errno> + Send>;

/// What a request does.
pub enum Op {
    /// Fill the buffers from an offset; zeroes beyond the end.
    Read {
        /// Offset of the first byte.
        offset_bytes: u64,
    },
    /// Write the buffers at an offset.
    Write {
        /// Offset of the first byte.
        offset_bytes: u64,
        /// Durable on completion.
        durable: bool,
    },
    /// Make data durable.
    Sync {
        /// Changes that were complete before.
        changes: u64,
    },
    /// `fallocate(2)`.
    Fallocate {
        /// `FALLOC_FL_*`.
        mode: i32,
        /// Offset of the range.
        offset_bytes: u64,
        /// Length of the range.
        len_bytes: u64,
    },
    /// Receive what is there into the only buffer, at least one byte.
    Receive,
    /// Send all of the buffers.
    Send,
    /// Receive one message of a device, such as `/dev/fuse`, that hands them out whole.
    ReceiveMessage,
    /// Give a device all of the buffers as one message.
    SendMessage,
    /// Give an entry of a queue of `/dev/fuse` to the kernel, and wait for the next request
    /// in it. Only the end of the mount, or of the lane, ends it otherwise.
    FuseEntry(EntryCommand),
    /// Accept a connection.
    Accept,
    /// Wait until the descriptor is ready.
    Poll {
        /// `POLL*`.
        events: i16,
    },
    /// A blocking call, made by a worker thread on every backend.
    Call {
        /// What is being done, for messages.
        name: &'static str,
        /// The call, until it is made.
        work: Option<Work>,
    },
    /// A blocking call that makes a connection and returns its descriptor.
    Connect {
        /// The call, until it is made.
        work: Option<Work>,
    },
}

impl Op {
    /// The verb for messages.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Op::Read { .. } => "read",
            Op::Write { .. } => "write",
            Op::Sync { .. } => "flush",
            Op::Fallocate { .. } => "fallocate",
            Op::Receive | Op::ReceiveMessage => "receive",
            Op::Send | Op::SendMessage => "send",
            Op::FuseEntry(_) => "wait for a request",
            Op::Accept => "accept",
            Op::Poll { .. } => "poll",
            Op::Connect { .. } => "connect",
            Op::Call { name, .. } => name,
        }
    }

    /// Whether only a worker thread can do it.
    pub(crate) fn needs_worker(&self) -> bool {
        matches!(self, Op::Call { .. } | Op::Connect { .. })
    }

    /// Whether only a ring that takes commands can do it.
    pub(crate) fn is_command(&self) -> bool {
        matches!(self, Op::FuseEntry(_))
    }

    /// Whether it may change what the next flush must make durable.
    pub(super) fn changes(&self) -> bool {
        matches!(
            self,
            Op::Write { .. } | Op::Fallocate { .. } | Op::Call { .. }
        )
    }

    /// Whether it makes something durable.
    pub(super) fn syncs(&self) -> bool {
        matches!(self, Op::Sync { .. } | Op::Write { durable: true, .. })
    }

    /// Whether the request is given up with its handle: it might wait forever, or
    /// take what the next one should get. All others run to their end.
    pub(crate) fn is_cancelled_on_drop(&self) -> bool {
        matches!(
            self,
            Op::Receive | Op::ReceiveMessage | Op::Accept | Op::Poll { .. }
        )
    }

    /// Whether it ends when a peer does something, which may be never. So do commands, which are no such
    /// requests.
    pub(crate) fn waits_for_others(&self) -> bool {
        self.readiness().is_some()
    }

    /// Whether it is a file's request, for which the kernel may need a thread of its own.
    pub(crate) fn blocks_in_kernel(&self) -> bool {
        !self.is_command() && !self.waits_for_others()
    }

    /// What must be ready for the request to go on; `None` for requests that
    /// block in the kernel instead (files, calls).
    pub(crate) fn readiness(&self) -> Option<i16> {
        match self {
            Op::Receive | Op::ReceiveMessage | Op::Accept => Some(libc::POLLIN),
            Op::Send | Op::SendMessage => Some(libc::POLLOUT),
            Op::Poll { events } => Some(*events),
            _ => None,
        }
    }
}
