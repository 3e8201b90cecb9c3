//! A client's socket: messages, and the descriptors that come and go with them.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use vellum_io::lane;
use vellum_io::{Error, Result};

use super::message::{HEADER_BYTES, Header, MAX_TABLE_REGIONS, Message, broken};

/// A message and the descriptors that came with it.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) header: Header,
    pub(super) message: Message,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// The socket. Nothing here waits in the kernel: a client that stalls holds nobody up.
#[derive(Debug)]
pub(super) struct Channel(Arc<OwnedFd>);

/// The other end of a channel.
#[derive(Debug, Clone)]
pub(super) struct Peer(Arc<OwnedFd>);

impl Peer {
    pub(super) fn has_left(&self) -> bool {
        lane::has_peer_left(self.0.as_fd())
    }
}

fn failure(operation: &'static str, errno: Errno) -> Error {
    Error::from_errno(operation, errno.raw_os_error())
}

impl Channel {
    pub(super) fn new(socket: OwnedFd) -> Channel {
        Channel(Arc::new(socket))
    }

    /// Says, on any thread, whether the client has hung up.
    pub(super) fn peer(&self) -> Peer {
        Peer(self.0.clone())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// The next message; `None` if the client has hung up.
    pub(super) async fn receive(&self) -> Result<Option<Received>> {
        let mut descriptors = Vec::new();
        let mut head = [0; HEADER_BYTES];
        let count = self.fill(&mut head, &mut descriptors).await?;
        if count == 0 {
            return Ok(None);
        }
        let cut_off = || broken("the client has hung up amid a message");
        if count < head.len() {
            return Err(cut_off());
        }
        let header = Header::decode(head)?;
        let mut payload = vec![0; header.payload_bytes];
        if self.fill(&mut payload, &mut descriptors).await? < payload.len() {
            return Err(cut_off());
        }
        Ok(Some(Received {
            header,
            message: Message::decode(&header, &payload)?,
            descriptors,
        }))
    }

    /// Receives until `bytes` are full or nothing more comes; returns how many came.
    async fn fill(&self, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<usize> {
        let mut filled = 0;
        while filled < bytes.len() {
            match receive_some(self.fd(), &mut bytes[filled..], descriptors) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => lane::poll_readable(self.fd()).await?,
                Err(Errno::CONNRESET) => break,
                Err(Errno::TOOBIG) => return Err(broken("too many descriptors in a message")),
                Err(errno) => return Err(failure("receive", errno)),
            }
        }
        Ok(filled)
    }

    /// Sends a short message if there is room for it now; whether there was.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn send_at_once(&self, bytes: &[u8]) -> Result<bool> {
        loop {
            match send_some(self.fd(), bytes, None) {
                Ok(count) if count == bytes.len() => return Ok(true),
                Ok(_) => return Err(broken("a socket that takes half a message")),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(errno) => return Err(failure("send", errno)),
            }
        }
    }

    /// Sends a whole message.
    pub(super) async fn send(
        &self,
        mut bytes: &[u8],
        mut descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        while !bytes.is_empty() {
            match send_some(self.fd(), bytes, descriptor) {
                Ok(count) => {
                    bytes = &bytes[count..];
                    descriptor = None;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => lane::poll_writable(self.fd()).await?,
                Err(errno) => return Err(failure("send", errno)),
            }
        }
        Ok(())
    }
}

/// Receives what is there. Too many descriptors are `TOOBIG`.
fn receive_some(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_TABLE_REGIONS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            descriptors.extend(sent);
        }
    }
    let is_cut = received.flags.contains(ReturnFlags::CTRUNC);
    if is_cut || descriptors.len() > MAX_TABLE_REGIONS {
        return Err(Errno::TOOBIG);
    }
    Ok(received.bytes)
}

fn send_some(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let sent: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    if !sent.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&sent));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)
}
