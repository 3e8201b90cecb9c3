//! Whatever a peer of the NBD protocol sends is taken or refused, within bounds.

use std::io::{self, Read, Write};

use vellum_export::nbd::client;
use vellum_export::nbd::option::{ClientOption, OPTION_HEADER_BYTES, OptionHeader};
use vellum_export::nbd::proto;
use vellum_export::nbd::request::{
    Command, Framing, Range, RequestHeader, Selection, SessionLimits,
};

const SIZE_BYTES: u64 = 3 << 30;
const FRAMINGS: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];

/// Invariants:
/// - no input makes a decoder panic;
/// - decoded strings keep within the protocol's limit;
/// - a request that is let through lies inside the export, and its payload is
///   no longer than what the server holds for one request;
/// - a client that lists a server's exports ends with the server's bytes.
pub fn check_nbd(data: &[u8]) {
    check_options(data);
    for framing in FRAMINGS {
        check_request(framing, data);
    }
    if let Some(selection) = Selection::decode(data) {
        assert!(selection.contexts.len() * 4 < data.len());
    }
    // Its result is as good as the server's word.
    let _ = client::list(Canned { rest: data });
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

/// A server that says what it was given and hears nothing.
struct Canned<'a> {
    rest: &'a [u8],
}

impl Read for Canned<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.rest.read(buffer)
    }
}

impl Write for Canned<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
