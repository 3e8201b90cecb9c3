//! Devices that give and take whole messages, such as `/dev/fuse`.
//!
//! Each request runs on the lane of the thread that makes it. Dropping a receive cancels it;
//! a send goes on to its end.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::{Completion, Descriptor, Op, Request, submit};
use crate::sys;
use crate::{Buffers, Error, Io, Result};

/// An open device. Clones share it; it closes with the last one and the last request.
#[derive(Clone)]
pub struct MessageDevice {
    file: Arc<Descriptor>,
}

impl MessageDevice {
    /// Takes over an open device; `name` is for messages.
    ///
    /// # Errors
    /// What the system says if the descriptor cannot be made non-blocking.
    pub fn new(fd: OwnedFd, name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        sys::set_nonblocking(fd.as_fd())
            .map_err(|errno| Error::from_errno("open", errno).target(name.as_str()))?;
        let file = Arc::new(Descriptor::new(fd, name));
        Ok(MessageDevice { file })
    }

    /// The descriptor, for requests.
    pub(super) fn descriptor(&self) -> Arc<Descriptor> {
        self.file.clone()
    }

    /// Receives one message into the buffers, in order, and returns them with its length in
    /// bytes. What the message does not fill has unspecified content.
    ///
    /// # Errors
    /// What the device says.
    pub fn recv(&self, buffers: Buffers) -> Io<(Buffers, usize)> {
        let request = Request::new(self.file.clone(), Op::ReceiveMessage, buffers);
        submit(request, finish_receive)
    }

    /// Sends the buffers, in order, as one message.
    ///
    /// # Errors
    /// What the device says.
    pub fn send(&self, buffers: Buffers) -> Io<Buffers> {
        let request = Request::new(self.file.clone(), Op::SendMessage, buffers);
        submit(request, super::finish_buffers)
    }
}

/// The end of a receive.
fn finish_receive(done: Completion) -> Result<(Buffers, usize)> {
    let count = done.value()? as usize;
    Ok((done.request.buffers, count))
}

impl AsFd for MessageDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl fmt::Debug for MessageDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MessageDevice({})", self.file.name())
    }
}
