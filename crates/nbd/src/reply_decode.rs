//! Decoding what a server says: replies to options, and to requests.
//!
//! Invariant: total functions over any bytes; what is accepted lies inside the
//! request that it answers, and no length is believed beyond the limits here.

use std::ops::Range;

use super::proto;
use super::request::Framing;
use super::wire::Cursor;

/// Length in bytes of the header of a reply to an option.
pub const OPTION_REPLY_BYTES: usize = 20;
/// Longest reply to an option in bytes that is taken.
pub const MAX_OPTION_REPLY_BYTES: u32 = 32 << 10;
/// Longest payload in bytes of a chunk that carries no data.
pub const MAX_CHUNK_BYTES: u64 = 32 << 10;
/// Length in bytes of what stands before the data of a read's chunk.
pub const DATA_OFFSET_BYTES: u64 = 8;
/// Most runs that a read's data may come in out of order.
const MAX_RUNS: usize = 1024;

/// The header of a reply to an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionReply {
    /// The option that is answered.
    pub option: u32,
    /// `REP_*`.
    pub kind: u32,
    /// How many bytes of data follow.
    pub len_bytes: u32,
}

impl OptionReply {
    /// Decodes a header; `None` if it is short or the magic is wrong.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut cursor = Cursor::new(bytes);
        if cursor.u64()? != proto::OPTION_REPLY_MAGIC {
            return None;
        }
        Some(OptionReply {
            option: cursor.u32()?,
            kind: cursor.u32()?,
            len_bytes: cursor.u32()?,
        })
    }
}

/// A piece of information about an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Info {
    /// Size in bytes and transmission flags.
    Export {
        /// The size.
        size_bytes: u64,
        /// `FLAG_*`.
        flags: u16,
    },
    /// Minimum, preferred and maximum block size in bytes.
    BlockSizes([u32; 3]),
    /// A description for people.
    Description(String),
    /// Something else.
    Other,
}

impl Info {
    /// Decodes the data of `REP_INFO`.
    pub fn decode(data: &[u8]) -> Option<Self> {
        let mut cursor = Cursor::new(data);
        Some(match cursor.u16()? {
            proto::INFO_EXPORT => Info::Export {
                size_bytes: cursor.u64()?,
                flags: cursor.u16()?,
            },
            proto::INFO_BLOCK_SIZE => {
                Info::BlockSizes([cursor.u32()?, cursor.u32()?, cursor.u32()?])
            }
            proto::INFO_DESCRIPTION => {
                Info::Description(String::from_utf8_lossy(data.get(2..)?).into_owned())
            }
            _ => Info::Other,
        })
    }
}

/// One export of a list: its name, and its description if there is one.
pub fn list_entry(data: &[u8]) -> Option<(String, Option<String>)> {
    let mut cursor = Cursor::new(data);
    let name = cursor.string(proto::MAX_STRING_BYTES)?.to_owned();
    let rest = data.get(4 + name.len()..)?;
    let description = (!rest.is_empty()).then(|| String::from_utf8_lossy(rest).into_owned());
    Some((name, description))
}

/// The number and the name of a metadata context.
pub fn meta_context(data: &[u8]) -> Option<(u32, String)> {
    let mut cursor = Cursor::new(data);
    let id = cursor.u32()?;
    let name = String::from_utf8_lossy(data.get(4..)?).into_owned();
    Some((id, name))
}

/// What a reply begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyHead {
    /// A simple reply; after the success of a read its data follows.
    Simple {
        /// The protocol's error number; 0 is success.
        error: u32,
        /// Which request is answered.
        cookie: u64,
    },
    /// A chunk; its payload follows.
    Chunk {
        /// Nothing more comes for this request.
        last: bool,
        /// `REPLY_TYPE_*`.
        kind: u16,
        /// Which request is answered.
        cookie: u64,
        /// Length of the payload in bytes.
        len_bytes: u64,
    },
}

/// Length in bytes of the magic number that a reply begins with.
pub const MAGIC_BYTES: usize = 4;

impl ReplyHead {
    /// How long a head is that begins with `magic`; `None` if none does.
    pub fn len_bytes(framing: Framing, magic: [u8; MAGIC_BYTES]) -> Option<usize> {
        match (u32::from_be_bytes(magic), framing) {
            (proto::SIMPLE_REPLY_MAGIC, Framing::Simple | Framing::Structured) => Some(16),
            (proto::STRUCTURED_REPLY_MAGIC, Framing::Structured) => Some(20),
            (proto::EXTENDED_REPLY_MAGIC, Framing::Extended) => Some(32),
            _ => None,
        }
    }

    /// Decodes a head; `None` if it is short or nothing begins like this.
    pub fn decode(framing: Framing, bytes: &[u8]) -> Option<Self> {
        Self::len_bytes(framing, *bytes.first_chunk()?)?;
        let mut cursor = Cursor::new(bytes);
        if cursor.u32()? == proto::SIMPLE_REPLY_MAGIC {
            return Some(ReplyHead::Simple {
                error: cursor.u32()?,
                cookie: cursor.u64()?,
            });
        }
        let flags = cursor.u16()?;
        let kind = cursor.u16()?;
        let cookie = cursor.u64()?;
        let len_bytes = match framing {
            Framing::Extended => {
                // The request's offset once more; the cookie says enough.
                cursor.u64()?;
                cursor.u64()?
            }
            _ => u64::from(cursor.u32()?),
        };
        Some(ReplyHead::Chunk {
            last: flags & proto::REPLY_FLAG_DONE != 0,
            kind,
            cookie,
            len_bytes,
        })
    }
}

/// What is known of the start of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusExtent {
    /// Length in bytes, not 0.
    pub len_bytes: u64,
    /// The context's flags.
    pub flags: u64,
}

/// A chunk without data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Chunk {
    /// Nothing to say.
    Nothing,
    /// A range of the export reads as zeroes.
    Hole(Range<u64>),
    /// The first extent of a metadata context.
    Status {
        /// The context's number.
        context: u32,
        /// The extent.
        first: StatusExtent,
    },
    /// The request has failed.
    Failed {
        /// The protocol's error number.
        error: u32,
        /// The server's words.
        message: String,
    },
}

impl Chunk {
    /// Decodes the payload of a chunk of any kind but [`proto::REPLY_TYPE_OFFSET_DATA`].
    pub fn decode(kind: u16, payload: &[u8]) -> Option<Self> {
        let mut cursor = Cursor::new(payload);
        match kind {
            proto::REPLY_TYPE_NONE => payload.is_empty().then_some(Chunk::Nothing),
            proto::REPLY_TYPE_OFFSET_HOLE => {
                let start = cursor.u64()?;
                let len_bytes = u64::from(cursor.u32()?);
                let hole = range(start, len_bytes)?;
                cursor.is_empty().then_some(Chunk::Hole(hole))
            }
            proto::REPLY_TYPE_BLOCK_STATUS => {
                let context = cursor.u32()?;
                let len_bytes = u64::from(cursor.u32()?);
                let flags = u64::from(cursor.u32()?);
                Self::status(context, StatusExtent { len_bytes, flags })
            }
            proto::REPLY_TYPE_BLOCK_STATUS_EXT => {
                let context = cursor.u32()?;
                cursor.u32()?;
                let len_bytes = cursor.u64()?;
                let flags = cursor.u64()?;
                Self::status(context, StatusExtent { len_bytes, flags })
            }
            // An error of a kind that is not known is an error all the same.
            error if error & (1 << 15) != 0 => {
                let error = cursor.u32()?;
                let len_bytes = usize::from(cursor.u16()?);
                let text = cursor.take(len_bytes)?;
                (error != 0).then(|| Chunk::Failed {
                    error,
                    message: String::from_utf8_lossy(text).into_owned(),
                })
            }
            _ => None,
        }
    }

    fn status(context: u32, first: StatusExtent) -> Option<Self> {
        (first.len_bytes > 0).then_some(Chunk::Status { context, first })
    }
}

/// The range of the data of a chunk of a read that is `len_bytes` long with its
/// offset, which stands at the start of `bytes`.
pub fn data_range(bytes: &[u8], len_bytes: u64) -> Option<Range<u64>> {
    let start = Cursor::new(bytes).u64()?;
    range(start, len_bytes.checked_sub(DATA_OFFSET_BYTES)?)
}

fn range(start: u64, len_bytes: u64) -> Option<Range<u64>> {
    let end = start.checked_add(len_bytes)?;
    (len_bytes > 0).then_some(start..end)
}

/// Which parts of a read have come: each once, and in the end all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    whole: Range<u64>,
    /// In order, apart from each other.
    runs: Vec<Range<u64>>,
}

impl Coverage {
    /// Nothing of `whole` has come.
    pub fn new(whole: Range<u64>) -> Self {
        Coverage {
            whole,
            runs: Vec::new(),
        }
    }

    /// Notes a part; `None` if it lies outside, has come before, or leaves more gaps
    /// than any server has a reason for.
    pub fn add(&mut self, part: Range<u64>) -> Option<()> {
        if part.is_empty() || part.start < self.whole.start || part.end > self.whole.end {
            return None;
        }
        let at = self.runs.partition_point(|run| run.end <= part.start);
        let next = self.runs.get(at).map_or(u64::MAX, |run| run.start);
        if part.end > next {
            return None;
        }
        let joins_before = at > 0 && self.runs[at - 1].end == part.start;
        let joins_after = part.end == next;
        match (joins_before, joins_after) {
            (true, true) => {
                self.runs[at - 1].end = self.runs[at].end;
                self.runs.remove(at);
            }
            (true, false) => self.runs[at - 1].end = part.end,
            (false, true) => self.runs[at].start = part.start,
            (false, false) if self.runs.len() < MAX_RUNS => self.runs.insert(at, part),
            (false, false) => return None,
        }
        Some(())
    }

    /// Whether everything has come.
    pub fn is_whole(&self) -> bool {
        self.whole.is_empty() || matches!(&self.runs[..], [only] if *only == self.whole)
    }
}

#[cfg(test)]
mod tests {
    use super::super::reply_encode::ReplyTo;
    use super::*;

    #[test]
    fn heads_of_our_server_are_read_back() {
        for framing in [Framing::Structured, Framing::Extended] {
            let address = ReplyTo {
                framing,
                cookie: 9,
                offset_bytes: 512,
            };
            let head = address.hole(512, 100, true);
            let bytes = head.as_bytes();
            let len = ReplyHead::len_bytes(framing, *bytes.first_chunk().unwrap()).unwrap();
            assert_eq!(
                ReplyHead::decode(framing, bytes),
                Some(ReplyHead::Chunk {
                    last: true,
                    kind: proto::REPLY_TYPE_OFFSET_HOLE,
                    cookie: 9,
                    len_bytes: 12
                })
            );
            assert_eq!(
                Chunk::decode(proto::REPLY_TYPE_OFFSET_HOLE, &bytes[len..]),
                Some(Chunk::Hole(512..612))
            );
            let data = address.data(512, 4, true);
            assert_eq!(data_range(&data.as_bytes()[len..], 12), Some(512..516));
        }
        let simple = ReplyTo {
            framing: Framing::Simple,
            cookie: 9,
            offset_bytes: 0,
        };
        let head = simple.simple(5);
        assert_eq!(
            ReplyHead::decode(Framing::Structured, head.as_bytes()),
            Some(ReplyHead::Simple {
                error: 5,
                cookie: 9
            })
        );
        assert_eq!(ReplyHead::decode(Framing::Extended, head.as_bytes()), None);
    }

    #[test]
    fn status_and_errors_are_taken_and_nonsense_is_not() {
        let status = [[0, 0, 0, 7], [0, 0, 2, 0], [0, 0, 0, 3]].concat();
        assert_eq!(
            Chunk::decode(proto::REPLY_TYPE_BLOCK_STATUS, &status),
            Some(Chunk::Status {
                context: 7,
                first: StatusExtent {
                    len_bytes: 512,
                    flags: 3
                }
            })
        );
        let error = [&[0, 0, 0, 28, 0, 2][..], b"no", &[0; 8]].concat();
        let failed = Chunk::Failed {
            error: 28,
            message: "no".to_owned(),
        };
        for kind in [proto::REPLY_TYPE_ERROR_OFFSET, (1 << 15) | 77] {
            assert_eq!(Chunk::decode(kind, &error), Some(failed.clone()));
        }
        for (kind, payload) in [
            (proto::REPLY_TYPE_NONE, &[0][..]),
            (proto::REPLY_TYPE_OFFSET_HOLE, &[0; 12]),
            (proto::REPLY_TYPE_BLOCK_STATUS, &[0; 12]),
            (proto::REPLY_TYPE_ERROR, &[0, 0, 0, 5, 0, 9, b'x']),
            (99, &[]),
        ] {
            assert_eq!(Chunk::decode(kind, payload), None, "{kind}");
        }
        assert_eq!(data_range(&[0xff; 8], 9), None);
        assert_eq!(data_range(&[0; 8], 7), None);
    }

    #[test]
    fn every_byte_must_come_once() {
        let mut coverage = Coverage::new(100..200);
        assert!(!coverage.is_whole());
        for (part, fits) in [
            (150..160, true),
            (99..101, false),
            (190..201, false),
            (155..156, false),
            (140..151, false),
            (160..200, true),
            (100..149, true),
            (149..150, true),
            (100..101, false),
        ] {
            assert_eq!(coverage.add(part.clone()).is_some(), fits, "{part:?}");
        }
        assert!(coverage.is_whole());
        assert!(Coverage::new(5..5).is_whole());
    }

    #[test]
    fn confetti_is_refused() {
        let mut coverage = Coverage::new(0..1 << 20);
        let taken = (0..1 << 19).take_while(|at| coverage.add(2 * at..2 * at + 1).is_some());
        assert_eq!(taken.count(), MAX_RUNS);
    }
}
