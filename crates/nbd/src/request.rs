//! Decoding requests of the transmission phase, and refusing what makes no sense.
//!
//! Invariant: total functions over any bytes; a [`Command`] lies inside the
//! export and within the limits of the protocol.

use super::proto;
use super::wire::Cursor;

/// Length in bytes of a compact request header.
pub const COMPACT_HEADER_BYTES: usize = 28;
/// Length in bytes of an extended request header.
pub const EXTENDED_HEADER_BYTES: usize = 32;

/// How requests and replies look on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Framing {
    /// Compact requests, simple replies.
    Simple,
    /// Compact requests, structured reply chunks.
    Structured,
    /// Extended requests and reply chunks.
    Extended,
}

impl Framing {
    /// Length in bytes of a request header.
    pub fn request_header_bytes(self) -> usize {
        match self {
            Framing::Extended => EXTENDED_HEADER_BYTES,
            _ => COMPACT_HEADER_BYTES,
        }
    }
}

/// A request header as it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    /// `CMD_FLAG_*`.
    pub flags: u16,
    /// `CMD_*`.
    pub command: u16,
    /// The client's name for the request, given back in its reply.
    pub cookie: u64,
    /// Offset in bytes.
    pub offset_bytes: u64,
    /// Length in bytes, of the range or (see [`RequestHeader::payload_bytes`]) the payload.
    pub len_bytes: u64,
}

impl RequestHeader {
    /// Decodes a header; `None` if it is short or its magic is wrong.
    pub fn decode(framing: Framing, bytes: &[u8]) -> Option<Self> {
        let mut cursor = Cursor::new(bytes);
        let magic = match framing {
            Framing::Extended => proto::EXTENDED_REQUEST_MAGIC,
            _ => proto::REQUEST_MAGIC,
        };
        if cursor.u32()? != magic {
            return None;
        }
        Some(RequestHeader {
            flags: cursor.u16()?,
            command: cursor.u16()?,
            cookie: cursor.u64()?,
            offset_bytes: cursor.u64()?,
            len_bytes: match framing {
                Framing::Extended => cursor.u64()?,
                _ => u64::from(cursor.u32()?),
            },
        })
    }

    /// Encodes a header; a compact one needs a length below 4 GiB.
    pub fn encode(&self, framing: Framing, bytes: &mut Vec<u8>) {
        let magic = match framing {
            Framing::Extended => proto::EXTENDED_REQUEST_MAGIC,
            _ => proto::REQUEST_MAGIC,
        };
        bytes.extend(magic.to_be_bytes());
        bytes.extend(self.flags.to_be_bytes());
        bytes.extend(self.command.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(self.offset_bytes.to_be_bytes());
        match framing {
            Framing::Extended => bytes.extend(self.len_bytes.to_be_bytes()),
            _ => {
                debug_assert!(self.len_bytes <= u64::from(u32::MAX));
                bytes.extend((self.len_bytes as u32).to_be_bytes());
            }
        }
    }

    /// How many bytes of payload follow the header.
    pub fn payload_bytes(&self, framing: Framing) -> u64 {
        // A write always has one: QEMU's client leaves out the flag that the
        // specification of extended headers asks for.
        let flagged = framing == Framing::Extended && self.flags & proto::CMD_FLAG_PAYLOAD_LEN != 0;
        let follows = flagged || self.command == proto::CMD_WRITE;
        if follows { self.len_bytes } else { 0 }
    }
}

/// What a session allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionLimits {
    /// Size of the export in bytes.
    pub size_bytes: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// How messages look.
    pub framing: Framing,
    /// A metadata context was chosen, so block status may be asked for.
    pub has_contexts: bool,
}

/// A range of the export in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

/// A request that can be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Read.
    Read {
        /// What to read.
        range: Range,
        /// Answer in one chunk.
        whole: bool,
    },
    /// Write the payload.
    Write {
        /// Where to write it.
        range: Range,
        /// Durable when answered.
        fua: bool,
    },
    /// End the session.
    Disconnect,
    /// Make completed writes durable.
    Flush,
    /// Give space back.
    Trim {
        /// The space.
        range: Range,
        /// Durable when answered.
        fua: bool,
    },
    /// Bring a range into the cache.
    Cache {
        /// The range.
        range: Range,
    },
    /// Make a range read as zeroes.
    WriteZeroes {
        /// The range.
        range: Range,
        /// Durable when answered.
        fua: bool,
        /// Space may be given back.
        may_unmap: bool,
        /// Fail rather than write zeroes out.
        fast: bool,
    },
    /// Tell what is known of a range.
    BlockStatus {
        /// The range; its true length comes with the payload if `selected`.
        range: Range,
        /// The first extent is enough.
        one: bool,
        /// The payload names the contexts and the length.
        selected: bool,
    },
}

/// Why a request is not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestError {
    /// The protocol's error number.
    pub error: u32,
    /// What is wrong, for the client's log.
    pub message: &'static str,
}

const fn refuse<T>(error: u32, message: &'static str) -> Result<T, RequestError> {
    Err(RequestError { error, message })
}

impl Command {
    /// Checks a header against what the session allows.
    ///
    /// # Errors
    /// What the client is answered: `EINVAL` for commands, flags and lengths that are unknown
    /// or not agreed on, `EPERM` for a change of a read-only export, `EINVAL` or `ENOSPC`
    /// beyond its end.
    pub fn check(header: &RequestHeader, limits: &SessionLimits) -> Result<Command, RequestError> {
        let flags = header.flags;
        check_flags(header, limits)?;
        let range = Range {
            offset_bytes: header.offset_bytes,
            len_bytes: header.len_bytes,
        };
        let fua = flags & proto::CMD_FLAG_FUA != 0;
        let command = match header.command {
            proto::CMD_READ => {
                check_payload_len(header.len_bytes)?;
                Command::Read {
                    range,
                    whole: flags & proto::CMD_FLAG_DF != 0,
                }
            }
            proto::CMD_WRITE => {
                check_payload_len(header.len_bytes)?;
                Command::Write { range, fua }
            }
            proto::CMD_DISC => Command::Disconnect,
            proto::CMD_FLUSH => Command::Flush,
            proto::CMD_TRIM => Command::Trim { range, fua },
            proto::CMD_CACHE => Command::Cache { range },
            proto::CMD_WRITE_ZEROES => Command::WriteZeroes {
                range,
                fua,
                may_unmap: flags & proto::CMD_FLAG_NO_HOLE == 0,
                fast: flags & proto::CMD_FLAG_FAST_ZERO != 0,
            },
            proto::CMD_BLOCK_STATUS => {
                let selected = flags & proto::CMD_FLAG_PAYLOAD_LEN != 0;
                check_block_status(header, limits, selected)?;
                let one = flags & proto::CMD_FLAG_REQ_ONE != 0;
                Command::BlockStatus {
                    range,
                    one,
                    selected,
                }
            }
            _ => return refuse(proto::EINVAL, "unknown command"),
        };
        command.check_access(limits)?;
        command.check_range(limits)?;
        Ok(command)
    }

    fn writes(&self) -> bool {
        matches!(
            self,
            Command::Write { .. } | Command::Trim { .. } | Command::WriteZeroes { .. }
        )
    }

    fn check_access(&self, limits: &SessionLimits) -> Result<(), RequestError> {
        if limits.read_only && self.writes() {
            return refuse(proto::EPERM, "the export is read-only");
        }
        Ok(())
    }

    fn check_range(&self, limits: &SessionLimits) -> Result<(), RequestError> {
        let (range, error) = match self {
            Command::Disconnect | Command::Flush => return Ok(()),
            // The true length comes with the payload.
            Command::BlockStatus { selected: true, .. } => return Ok(()),
            Command::Write { range, .. } | Command::WriteZeroes { range, .. } => {
                (range, proto::ENOSPC)
            }
            Command::Read { range, .. }
            | Command::Trim { range, .. }
            | Command::Cache { range }
            | Command::BlockStatus { range, .. } => (range, proto::EINVAL),
        };
        if !range.fits(limits.size_bytes) {
            return refuse(error, "the request goes beyond the end of the export");
        }
        Ok(())
    }
}

impl Range {
    /// Whether the range ends within `size_bytes`.
    pub fn fits(&self, size_bytes: u64) -> bool {
        self.offset_bytes
            .checked_add(self.len_bytes)
            .is_some_and(|end| end <= size_bytes)
    }
}

fn check_payload_len(len_bytes: u64) -> Result<(), RequestError> {
    if len_bytes > proto::MAX_PAYLOAD_BYTES {
        return refuse(
            proto::EINVAL,
            "the request is longer than the maximum block size",
        );
    }
    Ok(())
}

fn check_flags(header: &RequestHeader, limits: &SessionLimits) -> Result<(), RequestError> {
    let extended = limits.framing == Framing::Extended;
    let valid = proto::CMD_FLAG_FUA
        | match header.command {
            proto::CMD_READ if limits.framing >= Framing::Structured => proto::CMD_FLAG_DF,
            proto::CMD_WRITE if extended => proto::CMD_FLAG_PAYLOAD_LEN,
            proto::CMD_WRITE_ZEROES => proto::CMD_FLAG_NO_HOLE | proto::CMD_FLAG_FAST_ZERO,
            proto::CMD_BLOCK_STATUS if extended => {
                proto::CMD_FLAG_REQ_ONE | proto::CMD_FLAG_PAYLOAD_LEN
            }
            proto::CMD_BLOCK_STATUS => proto::CMD_FLAG_REQ_ONE,
            _ => 0,
        };
    if header.flags & !valid != 0 {
        return refuse(proto::EINVAL, "unsupported flags");
    }
    Ok(())
}

fn check_block_status(
    header: &RequestHeader,
    limits: &SessionLimits,
    selected: bool,
) -> Result<(), RequestError> {
    if !limits.has_contexts {
        return refuse(proto::EINVAL, "block status without a metadata context");
    }
    if header.len_bytes == 0 {
        return refuse(proto::EINVAL, "block status of nothing");
    }
    if selected && header.len_bytes > MAX_SELECTION_BYTES {
        return refuse(proto::EINVAL, "the selection of contexts is too long");
    }
    Ok(())
}

/// Longest payload in bytes of a block status request.
pub const MAX_SELECTION_BYTES: u64 = 8 + 4 * 64;

/// The payload of a block status request that selects contexts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextSelection {
    /// Length in bytes of the range asked about.
    pub len_bytes: u64,
    /// The contexts' numbers.
    pub contexts: Vec<u32>,
}

impl ContextSelection {
    /// Decodes the payload.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut cursor = Cursor::new(bytes);
        let len_bytes = cursor.u64()?;
        let mut contexts = Vec::new();
        while !cursor.is_empty() {
            contexts.push(cursor.u32()?);
        }
        let sensible = len_bytes > 0 && !contexts.is_empty();
        sensible.then_some(ContextSelection {
            len_bytes,
            contexts,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: SessionLimits = SessionLimits {
        size_bytes: 1 << 20,
        read_only: false,
        framing: Framing::Structured,
        has_contexts: true,
    };

    fn header(command: u16, flags: u16, offset_bytes: u64, len_bytes: u64) -> RequestHeader {
        RequestHeader {
            flags,
            command,
            cookie: 1,
            offset_bytes,
            len_bytes,
        }
    }

    fn error_of(header: RequestHeader, limits: SessionLimits) -> Option<u32> {
        Command::check(&header, &limits)
            .err()
            .map(|refusal| refusal.error)
    }

    #[test]
    fn headers_of_both_kinds_decode() {
        let mut compact = Vec::new();
        compact.extend(proto::REQUEST_MAGIC.to_be_bytes());
        compact.extend([0, 1, 0, 3]);
        compact.extend(7u64.to_be_bytes());
        compact.extend(4096u64.to_be_bytes());
        compact.extend(512u32.to_be_bytes());
        let decoded = RequestHeader::decode(Framing::Simple, &compact).unwrap();
        assert_eq!(
            decoded,
            RequestHeader {
                cookie: 7,
                ..header(3, 1, 4096, 512)
            }
        );
        assert_eq!(RequestHeader::decode(Framing::Extended, &compact), None);
        assert_eq!(RequestHeader::decode(Framing::Simple, &compact[..27]), None);
        compact[..4].copy_from_slice(&proto::EXTENDED_REQUEST_MAGIC.to_be_bytes());
        compact.extend([0; 4]);
        let decoded = RequestHeader::decode(Framing::Extended, &compact).unwrap();
        assert_eq!(decoded.len_bytes, 512 << 32);
    }

    #[test]
    fn the_end_is_guarded_even_against_overflow() {
        let size = LIMITS.size_bytes;
        for (command, error) in [
            (proto::CMD_READ, proto::EINVAL),
            (proto::CMD_WRITE, proto::ENOSPC),
            (proto::CMD_TRIM, proto::EINVAL),
            (proto::CMD_WRITE_ZEROES, proto::ENOSPC),
            (proto::CMD_CACHE, proto::EINVAL),
            (proto::CMD_BLOCK_STATUS, proto::EINVAL),
        ] {
            assert_eq!(error_of(header(command, 0, size - 512, 512), LIMITS), None);
            assert_eq!(
                error_of(header(command, 0, size - 512, 513), LIMITS),
                Some(error)
            );
            assert_eq!(
                error_of(header(command, 0, u64::MAX, 2), LIMITS),
                Some(error)
            );
        }
    }

    #[test]
    fn read_only_exports_refuse_changes_and_allow_flush() {
        let limits = SessionLimits {
            read_only: true,
            ..LIMITS
        };
        for command in [proto::CMD_WRITE, proto::CMD_TRIM, proto::CMD_WRITE_ZEROES] {
            assert_eq!(
                error_of(header(command, 0, 0, 512), limits),
                Some(proto::EPERM)
            );
        }
        assert_eq!(error_of(header(proto::CMD_FLUSH, 0, 0, 0), limits), None);
    }

    #[test]
    fn flags_belong_to_their_commands() {
        let df = proto::CMD_FLAG_DF;
        assert_eq!(error_of(header(proto::CMD_READ, df, 0, 512), LIMITS), None);
        let simple = SessionLimits {
            framing: Framing::Simple,
            ..LIMITS
        };
        assert_eq!(
            error_of(header(proto::CMD_READ, df, 0, 512), simple),
            Some(proto::EINVAL)
        );
        assert_eq!(
            error_of(header(proto::CMD_WRITE, df, 0, 512), LIMITS),
            Some(proto::EINVAL)
        );
        assert_eq!(error_of(header(99, 0, 0, 0), LIMITS), Some(proto::EINVAL));
        let extended = SessionLimits {
            framing: Framing::Extended,
            ..LIMITS
        };
        let payload = proto::CMD_FLAG_PAYLOAD_LEN;
        assert_eq!(
            error_of(header(proto::CMD_WRITE, 0, 0, 512), extended),
            None
        );
        for flags in [0, payload] {
            let write = header(proto::CMD_WRITE, flags, 0, 512);
            assert_eq!(write.payload_bytes(Framing::Extended), 512);
        }
        assert_eq!(
            error_of(header(proto::CMD_WRITE, payload, 0, 512), extended),
            None
        );
    }

    #[test]
    fn selections_are_exact() {
        let mut bytes = 4096u64.to_be_bytes().to_vec();
        assert_eq!(ContextSelection::decode(&bytes), None);
        bytes.extend(1u32.to_be_bytes());
        let selection = ContextSelection {
            len_bytes: 4096,
            contexts: vec![1],
        };
        assert_eq!(ContextSelection::decode(&bytes), Some(selection));
        bytes.push(0);
        assert_eq!(ContextSelection::decode(&bytes), None);
    }
}
