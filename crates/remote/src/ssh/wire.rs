//! What messages look like: plain bytes, no I/O. A server's bytes are not trusted (rule 12).

use vellum_io::{Error, ErrorKind, Result};

/// The version that is spoken.
pub(super) const VERSION: u32 = 3;
/// No message but data is longer.
pub(super) const MOST_MESSAGE_BYTES: u32 = 256 << 10;
/// What every server reads and writes at once.
pub(super) const SMALL_TRANSFER_BYTES: u32 = 32 << 10;
/// Nothing more is asked for at once, whatever the server says.
const MOST_TRANSFER_BYTES: u64 = 255 << 10;

pub(super) const OPEN_READ: u32 = 1;
pub(super) const OPEN_WRITE: u32 = 2;
pub(super) const OPEN_CREATE: u32 = 8;
pub(super) const OPEN_TRUNCATE: u32 = 16;

pub(super) const INIT: u8 = 1;
pub(super) const SERVER_VERSION: u8 = 2;
pub(super) const OPEN: u8 = 3;
pub(super) const CLOSE: u8 = 4;
pub(super) const READ: u8 = 5;
pub(super) const WRITE: u8 = 6;
pub(super) const FSTAT: u8 = 8;
pub(super) const FSETSTAT: u8 = 10;
pub(super) const STATUS: u8 = 101;
pub(super) const HANDLE: u8 = 102;
pub(super) const DATA: u8 = 103;
pub(super) const ATTRIBUTES: u8 = 105;
pub(super) const EXTENDED: u8 = 200;
pub(super) const EXTENDED_REPLY: u8 = 201;

pub(super) const FSYNC: &str = "fsync@openssh.com";
pub(super) const LIMITS: &str = "limits@openssh.com";

const STATUS_OK: u32 = 0;
const STATUS_END: u32 = 1;
const STATUS_NO_FILE: u32 = 2;
const STATUS_DENIED: u32 = 3;
const STATUS_UNSUPPORTED: u32 = 8;

const ATTRIBUTE_SIZE: u32 = 1;
const ATTRIBUTE_OWNER: u32 = 2;
const ATTRIBUTE_PERMISSIONS: u32 = 4;
const ATTRIBUTE_TIMES: u32 = 8;
/// Of a new file, before the server's mask.
const NEW_FILE_MODE: u32 = 0o644;
/// The kind of a file in its mode.
const MODE_KIND: u32 = 0o170_000;
const MODE_DIRECTORY: u32 = 0o040_000;

/// A message that is put together. Its length stands in front when it is done.
#[derive(Debug)]
pub(super) struct Message(Vec<u8>);

impl Message {
    pub(super) fn new(kind: u8, number: u32) -> Self {
        let mut bytes = vec![0, 0, 0, 0, kind];
        bytes.extend(number.to_be_bytes());
        Message(bytes)
    }

    pub(super) fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn text(self, value: &[u8]) -> Self {
        let mut message = self.u32(value.len() as u32);
        message.0.extend_from_slice(value);
        message
    }

    /// The attributes of a new file.
    pub(super) fn new_file(self) -> Self {
        self.u32(ATTRIBUTE_PERMISSIONS).u32(NEW_FILE_MODE)
    }

    /// The attributes that set a file's length.
    pub(super) fn size(self, len_bytes: u64) -> Self {
        self.u32(ATTRIBUTE_SIZE).u64(len_bytes)
    }

    /// Its bytes, of which `more_bytes` follow elsewhere.
    pub(super) fn done(mut self, more_bytes: u32) -> Vec<u8> {
        let len = (self.0.len() - 4) as u32 + more_bytes;
        self.0[..4].copy_from_slice(&len.to_be_bytes());
        self.0
    }
}

/// What a message says, read from front to back.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

fn broken() -> Error {
    let message = "the server does not keep to the SFTP protocol: a message ends too early";
    Error::new(ErrorKind::Protocol, "read", message)
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len).ok_or_else(broken)?;
        self.0 = rest;
        Ok(head)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        let bytes = self.take(4)?.try_into().map_err(|_| broken())?;
        Ok(u32::from_be_bytes(bytes))
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        let bytes = self.take(8)?.try_into().map_err(|_| broken())?;
        Ok(u64::from_be_bytes(bytes))
    }

    pub(super) fn text(&mut self) -> Result<&'a [u8]> {
        let len = self.u32()?;
        self.take(len as usize)
    }
}

/// What a server has said it can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Abilities {
    pub(super) fsync: bool,
    pub(super) limits: bool,
}

/// Reads what the server says at first.
pub(super) fn abilities(mut body: Reader<'_>) -> Result<Abilities> {
    let mut abilities = Abilities {
        fsync: false,
        limits: false,
    };
    let version = body.u32()?;
    if version != VERSION {
        let message = format!("the server speaks version {version} of SFTP, not {VERSION}");
        return Err(Error::new(ErrorKind::Protocol, "open", message));
    }
    while !body.0.is_empty() {
        let name = body.text()?;
        body.text()?;
        abilities.fsync |= name == FSYNC.as_bytes();
        abilities.limits |= name == LIMITS.as_bytes();
    }
    Ok(abilities)
}

/// How much may be read and written at once, from the answer to [`LIMITS`].
pub(super) fn limits(mut body: Reader<'_>) -> Result<[u32; 2]> {
    let _packet = body.u64()?;
    let mut limit = || -> Result<u32> {
        let told = body.u64()?;
        Ok(match told {
            0 => SMALL_TRANSFER_BYTES,
            // At most that, so it fits.
            told => told.clamp(4096, MOST_TRANSFER_BYTES) as u32,
        })
    };
    Ok([limit()?, limit()?])
}

/// What tells one state of a file from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileState {
    pub(super) len_bytes: u64,
    /// Seconds since 1970.
    pub(super) modified: Option<u32>,
}

pub(super) fn file_state(mut body: Reader<'_>) -> Result<FileState> {
    let refuse = |message| Err(Error::new(ErrorKind::Unsupported, "open", message));
    let present = body.u32()?;
    if present & ATTRIBUTE_SIZE == 0 {
        return refuse("the server does not tell the file's length");
    }
    let len_bytes = body.u64()?;
    if present & ATTRIBUTE_OWNER != 0 {
        body.u64()?;
    }
    if present & ATTRIBUTE_PERMISSIONS != 0 && body.u32()? & MODE_KIND == MODE_DIRECTORY {
        return refuse("it is a directory");
    }
    let modified = match present & ATTRIBUTE_TIMES {
        0 => None,
        _ => {
            body.u32()?;
            Some(body.u32()?)
        }
    };
    Ok(FileState {
        len_bytes,
        modified,
    })
}

/// Whether a status says that there is no more.
pub(super) fn is_end(mut body: Reader<'_>) -> bool {
    body.u32().is_ok_and(|code| code == STATUS_END)
}

/// What a status says of a request.
pub(super) fn status(operation: &'static str, mut body: Reader<'_>) -> Result<()> {
    let code = body.u32()?;
    // Old servers say no more.
    let said = body.text().map(String::from_utf8_lossy).unwrap_or_default();
    let said: String = said
        .chars()
        .filter(|letter| !letter.is_control())
        .take(200)
        .collect();
    let (kind, errno, message) = match code {
        STATUS_OK => return Ok(()),
        STATUS_NO_FILE => {
            let message = "there is no such file on the server".to_owned();
            (ErrorKind::NotFound, libc::ENOENT, message)
        }
        STATUS_DENIED => {
            let message = "the server does not permit it to this user".to_owned();
            (ErrorKind::PermissionDenied, libc::EACCES, message)
        }
        STATUS_UNSUPPORTED => {
            let message = format!("the server cannot do that: {said}");
            (ErrorKind::Unsupported, libc::ENOTSUP, message)
        }
        _ if operation == "write" => {
            let message = format!("the server could not write: {said} (its disk may be full)");
            (ErrorKind::Io, libc::EIO, message)
        }
        _ => (
            ErrorKind::Io,
            libc::EIO,
            format!("the server reports: {said}"),
        ),
    };
    Err(Error::new(kind, operation, message).with_errno(errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_their_length_in_front() {
        let message = Message::new(READ, 7).text(b"h").u64(3).u32(9).done(0);
        let wanted = [0, 0, 0, 22, 5, 0, 0, 0, 7, 0, 0, 0, 1, b'h'];
        assert_eq!(message[..14], wanted);
        assert_eq!(message.len(), 26);
        assert_eq!(Message::new(WRITE, 7).u32(5).done(5)[..4], [0, 0, 0, 14]);
    }

    #[test]
    fn what_ends_too_early_is_an_error() {
        let state = Message::new(ATTRIBUTES, 0)
            .u32(15)
            .u64(1 << 40)
            .u64(0)
            .u32(0o100_644);
        let state = state.u32(5).u32(6).done(0);
        let told = file_state(Reader(&state[9..])).unwrap();
        assert_eq!((told.len_bytes, told.modified), (1 << 40, Some(6)));
        for end in 9..state.len() {
            let error = file_state(Reader(&state[9..end])).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
        }
        let long = [0, 0, 0, 3, 0xff, 0xff, 0xff, 0xff];
        assert!(abilities(Reader(&long)).is_err());
    }

    #[test]
    fn abilities_and_limits_are_told() {
        let hello = Message::new(0, VERSION)
            .text(FSYNC.as_bytes())
            .text(b"1")
            .done(0);
        let told = abilities(Reader(&hello[5..])).unwrap();
        assert!(told.fsync && !told.limits);
        let told = Message::new(0, 0)
            .u64(1 << 18)
            .u64(261_120)
            .u64(0)
            .u64(9)
            .done(0);
        assert_eq!(limits(Reader(&told[9..])).unwrap(), [261_120, 32 << 10]);
    }

    #[test]
    fn statuses_become_errors() {
        let of = |code| {
            let message = Message::new(STATUS, 0).u32(code).text(b"Failure").text(b"");
            let message = message.done(0);
            status("write", Reader(&message[9..])).map_err(|error| error.kind())
        };
        assert_eq!(of(0), Ok(()));
        assert_eq!(of(2), Err(ErrorKind::NotFound));
        assert_eq!(of(3), Err(ErrorKind::PermissionDenied));
        assert_eq!(of(4), Err(ErrorKind::Io));
    }
}
