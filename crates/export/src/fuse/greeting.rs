//! The kernel's greeting, which comes before all requests, and the answer: the version of the protocol
//! and what of it is used.

use vellum_io::lane::message::MessageDevice;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};

use super::proto::{self, HEADER_BYTES, Header, Init, MAX_TRANSFER_BYTES, Operation, Welcome};
use super::session;

/// Requests that nobody waits for, such as asynchronous ones, that the kernel sends at once.
const MAX_BACKGROUND: u16 = 128;

/// Answers the kernel's greeting, which comes before everything else; whether requests come over
/// queues, if they may.
pub(super) async fn greet(kernel: &MessageDevice, has_queues: bool) -> Result<bool> {
    let (buffers, len_bytes) = kernel.recv(session::receive_buffers()).await?;
    let (header, init) = greeting(&session::gather(&buffers, 0, len_bytes))?;
    let welcome = welcome(&init, has_queues);
    let body = welcome.encode();
    let reply = proto::reply_header(header.unique, 0, body.bytes().len());
    let reply = Buffer::copy_of(&[&reply, body.bytes()].concat());
    kernel.send(Buffers::from_iter([reply])).await?;
    Ok(welcome.flags2 & proto::INIT2_OVER_IO_URING != 0)
}

/// Decodes the kernel's greeting.
///
/// # Errors
/// If the message is no greeting, or of a version that is not supported.
fn greeting(message: &[u8]) -> Result<(Header, Init)> {
    let operation =
        Header::decode(message).map(|header| (header, header.operation(&message[HEADER_BYTES..])));
    let Some((header, Some(Operation::Init(init)))) = operation else {
        let text = "the kernel does not greet";
        return Err(Error::new(ErrorKind::Protocol, "mount", text));
    };
    if init.major != proto::VERSION.0 || init.minor < proto::MINOR_MIN {
        let text = format!(
            "the kernel's FUSE {}.{} is not supported",
            init.major, init.minor
        );
        return Err(Error::new(ErrorKind::Unsupported, "mount", text));
    }
    Ok((header, init))
}

fn welcome(init: &Init, has_queues: bool) -> Welcome {
    let mut flags2 = proto::INIT2_DIRECT_IO_ALLOW_MMAP;
    if has_queues {
        flags2 |= proto::INIT2_OVER_IO_URING;
    }
    let flags = proto::INIT_ASYNC_READ
        | proto::INIT_ATOMIC_O_TRUNC
        | proto::INIT_BIG_WRITES
        | proto::INIT_ASYNC_DIO
        | proto::INIT_MAX_PAGES
        | proto::INIT_EXT;
    Welcome {
        minor: init.minor.min(proto::VERSION.1),
        max_readahead_bytes: init.max_readahead_bytes,
        flags: flags & init.flags,
        flags2: flags2 & init.flags2,
        max_background: MAX_BACKGROUND,
        max_write_bytes: MAX_TRANSFER_BYTES as u32,
        max_pages: (MAX_TRANSFER_BYTES / 4096) as u16,
    }
}
