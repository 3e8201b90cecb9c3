//! Whatever a peer of the NBD protocol sends is taken or refused, within bounds.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use vellum_io::lane::{self, net::Stream};
use vellum_nbd::Channel;
use vellum_nbd::client::handshake::Handshake;
use vellum_nbd::client::list::list;
use vellum_nbd::client::{Connection, Outcome, Request, Session};
use vellum_nbd::option::{ClientOption, OPTION_HEADER_BYTES, OptionHeader};
use vellum_nbd::proto;
use vellum_nbd::receive_buffer::ReceiveBuffer;
use vellum_nbd::reply_decode::{Chunk, Coverage};
use vellum_nbd::request::{
    Command, ContextSelection, Framing, Range, RequestHeader, SessionLimits,
};

use vellum_io::{Buffer, Buffers};

const SIZE_BYTES: u64 = 3 << 30;
const FRAMINGS: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];

/// Invariants:
/// - no input makes a decoder panic;
/// - decoded strings keep within the protocol's limit;
/// - a request that is let through lies inside the export, and its payload is
///   no longer than what the server holds for one request;
/// - a client that lists a server's exports, negotiates, reads or asks for block status
///   ends with the server's bytes, and what it takes for an answer is a whole one.
pub fn check_nbd(data: &[u8]) {
    check_options(data);
    for framing in FRAMINGS {
        check_request(framing, data);
    }
    if let Some(selection) = ContextSelection::decode(data) {
        assert!(selection.contexts.len() * 4 < data.len());
    }
    for kind in 0..u16::from(u8::MAX) {
        if let Some(Chunk::Hole(range)) = Chunk::decode(kind, data) {
            assert!(Coverage::new(0..u64::MAX).add(range).is_some());
        }
    }
    check_client(data);
}

fn check_options(data: &[u8]) {
    if let Some(header) = data.first_chunk::<OPTION_HEADER_BYTES>() {
        let _ = OptionHeader::decode(header);
    }
    let Some((&option, rest)) = data.split_first() else {
        return;
    };
    let short = |text: &str| assert!(text.len() <= proto::MAX_STRING_BYTES);
    match ClientOption::decode(u32::from(option % 16), rest) {
        Ok(ClientOption::ExportName(name)) => short(name),
        Ok(ClientOption::Info(info) | ClientOption::Go(info)) => short(info.name),
        Ok(ClientOption::ListMetaContext(query) | ClientOption::SetMetaContext(query)) => {
            short(query.name);
            query.queries.iter().for_each(|query| short(query));
            assert!(query.queries.len() <= rest.len() / 4);
        }
        Ok(_) | Err(_) => {}
    }
}

fn check_request(framing: Framing, data: &[u8]) {
    let Some(header) = RequestHeader::decode(framing, data) else {
        return;
    };
    let limits = SessionLimits {
        size_bytes: SIZE_BYTES,
        read_only: header.cookie & 1 == 1,
        framing,
        has_contexts: header.cookie & 2 == 2,
    };
    let Ok(command) = Command::check(&header, &limits) else {
        return;
    };
    assert!(header.payload_bytes(framing) <= proto::MAX_PAYLOAD_BYTES);
    let inside = |range: Range| assert!(range.fits(SIZE_BYTES), "{command:?}");
    match command {
        Command::Write { range, .. } => {
            assert!(!limits.read_only);
            inside(range);
        }
        Command::Read { range, .. } => {
            assert!(range.len_bytes <= proto::MAX_PAYLOAD_BYTES);
            inside(range);
        }
        Command::Trim { range, .. } | Command::WriteZeroes { range, .. } => {
            assert!(!limits.read_only);
            inside(range);
        }
        Command::Cache { range }
        | Command::BlockStatus {
            range,
            selected: false,
            ..
        } => {
            inside(range);
        }
        Command::BlockStatus { selected: true, .. } | Command::Flush | Command::Disconnect => {}
    }
}

/// A server that says what it was given and hears nothing; the second socket is its.
fn canned(data: &[u8]) -> (Channel, UnixStream) {
    let (ours, mut theirs) = UnixStream::pair().expect("two sockets");
    // What does not fit into the socket is not said.
    theirs.set_nonblocking(true).expect("a socket");
    let _ = theirs.write(data);
    let _ = theirs.shutdown(Shutdown::Write);
    (Channel::from(Stream::from_fd(ours.into())), theirs)
}

fn check_client(data: &[u8]) {
    let (channel, _server) = canned(data);
    // Its result is as good as the server's word.
    let _ = lane::block_on(list(channel, None));
    let (channel, _server) = canned(data);
    let _ = lane::block_on(Handshake::new(channel).agree("", proto::CONTEXT_ALLOCATION));
    for framing in FRAMINGS {
        let (channel, _server) = canned(data);
        let session = Session {
            framing,
            size_bytes: SIZE_BYTES,
            flags: 0,
            block_sizes: None,
            context: Some(0),
        };
        let connection = Connection::new(channel, ReceiveBuffer::new(), session);
        lane::block_on(async {
            let read = connection.ask(question(proto::CMD_READ, Buffer::for_read(4096)));
            let status = connection.ask(question(proto::CMD_BLOCK_STATUS, Buffer::zeroed(0)));
            let (read, status) = futures_util::join!(read, status);
            if let Outcome::Done(answer) = read {
                assert_eq!(answer.buffers[0].len(), 4096);
            }
            if let Outcome::Done(answer) = status {
                assert!(answer.status.is_some_and(|extent| extent.len_bytes > 0));
            }
        });
    }
}

fn question(command: u16, buffer: Buffer) -> Request {
    Request {
        command,
        flags: 0,
        offset_bytes: 512,
        len_bytes: 4096,
        buffers: Buffers::from_iter([buffer]),
    }
}
