//! The messages between the kernel and a FUSE server: those that a single file needs.
//!
//! Numbers and layouts are those of `linux/fuse.h`, protocol 7.36; all of them are in the
//! machine's own byte order. A message of the kernel is a header and what belongs to its
//! operation; an answer is a header and a body.
//!
//! Invariant: a message that is too short for its operation is told from all others, and
//! nothing is read beyond it.

/// The protocol that the server speaks.
pub(super) const VERSION: (u32, u32) = (7, 36);
/// The oldest minor version whose greeting has the layout of today's.
pub(super) const MINOR_MIN: u32 = 23;
/// The only file.
pub(super) const ROOT_ID: u64 = 1;

/// Length of the header of a message of the kernel in bytes.
pub(super) const HEADER_BYTES: usize = 40;
/// Length of what a read or write says of itself in bytes.
const TRANSFER_BYTES: usize = 40;
/// Length in bytes of a message of a read, and of one of a write up to its data.
pub(super) const HEAD_BYTES: usize = HEADER_BYTES + TRANSFER_BYTES;
/// Length of the header of an answer in bytes.
pub(super) const REPLY_HEADER_BYTES: usize = 16;

/// Most that one request reads or writes, in bytes: what the kernel has at most.
pub(super) const MAX_TRANSFER_BYTES: usize = 1 << 20;

/// Reads may be answered in any order.
pub(super) const INIT_ASYNC_READ: u32 = 1 << 0;
/// An open with `O_TRUNC` comes as one request; else the kernel sets the size to 0 before it opens.
pub(super) const INIT_ATOMIC_O_TRUNC: u32 = 1 << 3;
/// Writes may be longer than a page.
pub(super) const INIT_BIG_WRITES: u32 = 1 << 5;
/// Direct reads and writes may run side by side.
pub(super) const INIT_ASYNC_DIO: u32 = 1 << 15;
/// The greeting's answer says how many pages a request may have.
pub(super) const INIT_MAX_PAGES: u32 = 1 << 22;
/// The second word of flags counts.
pub(super) const INIT_EXT: u32 = 1 << 30;
/// In the second word: files around the page cache may be mapped into memory.
pub(super) const INIT2_DIRECT_IO_ALLOW_MMAP: u32 = 1 << 4;
/// In the second word: requests come over io_uring, too.
pub(super) const INIT2_OVER_IO_URING: u32 = 1 << 9;

/// The page cache is left out.
pub(super) const OPEN_DIRECT_IO: u32 = 1 << 0;
/// Writes that do not make the file longer run side by side.
pub(super) const OPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

/// What of a file's attributes is to be set.
pub(super) mod set {
    pub(in super::super) const MODE: u32 = 1 << 0;
    pub(in super::super) const UID: u32 = 1 << 1;
    pub(in super::super) const GID: u32 = 1 << 2;
    pub(in super::super) const SIZE: u32 = 1 << 3;
    pub(in super::super) const ATIME: u32 = 1 << 4;
    pub(in super::super) const MTIME: u32 = 1 << 5;
    pub(in super::super) const HANDLE: u32 = 1 << 6;
    pub(in super::super) const ATIME_NOW: u32 = 1 << 7;
    pub(in super::super) const MTIME_NOW: u32 = 1 << 8;
    pub(in super::super) const LOCK_OWNER: u32 = 1 << 9;
    pub(in super::super) const CTIME: u32 = 1 << 10;
    pub(in super::super) const KILL_SUIDGID: u32 = 1 << 11;
}

/// What the kernel asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    /// The greeting.
    Init(Init),
    /// The attributes.
    GetAttributes,
    /// Other attributes.
    SetAttributes(SetAttributes),
    /// With the flags of `open(2)`.
    Open(u32),
    Read(Transfer),
    /// The data follows.
    Write(Transfer),
    /// The size of the file system, and what of it is free.
    StatFs,
    Release,
    Sync,
    /// A descriptor is closed, of what was opened with this handle.
    Flush(u64),
    Allocate(Allocate),
    /// Where the next data or hole begins.
    Seek(Seek),
    /// It waits for no answer.
    Silent,
    /// Nothing that this server knows.
    Unknown,
}

/// The header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Of the whole message in bytes.
    pub(super) len_bytes: u32,
    opcode: u32,
    /// The request's number, which its answer repeats.
    pub(super) unique: u64,
    /// The file.
    pub(super) node: u64,
}

/// The kernel's greeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Init {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) max_readahead_bytes: u32,
    pub(super) flags: u32,
    pub(super) flags2: u32,
}

/// A read or a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u32,
    /// Those of `open(2)`, and of the request itself.
    pub(super) open_flags: u32,
}

/// Attributes to be set: those that `valid` names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SetAttributes {
    pub(super) valid: u32,
    pub(super) size_bytes: u64,
    pub(super) atime: Time,
    pub(super) mtime: Time,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// A call of `fallocate(2)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Allocate {
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
    pub(super) mode: u32,
}

impl Allocate {
    /// Whether bytes become zeroes, rather than get space ahead of their use.
    pub(super) fn zeroes(&self) -> bool {
        let zeroing = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE;
        self.mode as i32 & zeroing != 0
    }
}

/// A call of `lseek(2)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seek {
    pub(super) offset_bytes: u64,
    pub(super) whence: u32,
}

/// Since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Time {
    pub(super) seconds: u64,
    pub(super) nanoseconds: u32,
}

/// Takes a message apart from its beginning.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }
}

impl Header {
    /// The header at the beginning of a message; `None` if that is too short.
    pub(super) fn decode(message: &[u8]) -> Option<Header> {
        let mut reader = Reader(message.get(..HEADER_BYTES)?);
        Some(Header {
            len_bytes: reader.u32()?,
            opcode: reader.u32()?,
            unique: reader.u64()?,
            node: reader.u64()?,
        })
    }

    /// Whether data follows, which belongs to a write.
    pub(super) fn is_write(&self) -> bool {
        self.opcode == opcode::WRITE
    }

    /// What is asked for; `body` is what follows the header, of a write only up to its data.
    /// `None` if it is too short.
    pub(super) fn operation(&self, body: &[u8]) -> Option<Operation> {
        let mut reader = Reader(body);
        Some(match self.opcode {
            opcode::INIT => Operation::Init(Init::decode(&mut reader)?),
            opcode::GETATTR => Operation::GetAttributes,
            opcode::SETATTR => Operation::SetAttributes(SetAttributes::decode(&mut reader)?),
            opcode::OPEN => Operation::Open(reader.u32()?),
            opcode::READ => Operation::Read(Transfer::decode(&mut reader)?),
            opcode::WRITE => Operation::Write(Transfer::decode(&mut reader)?),
            opcode::STATFS => Operation::StatFs,
            opcode::RELEASE => Operation::Release,
            opcode::FSYNC => Operation::Sync,
            opcode::FLUSH => Operation::Flush(reader.u64()?),
            opcode::FALLOCATE => Operation::Allocate(Allocate::decode(&mut reader)?),
            opcode::LSEEK => Operation::Seek(Seek::decode(&mut reader)?),
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => Operation::Silent,
            _ => Operation::Unknown,
        })
    }
}

mod opcode {
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const BATCH_FORGET: u32 = 42;
    pub(super) const FALLOCATE: u32 = 43;
    pub(super) const LSEEK: u32 = 46;
}

impl Init {
    fn decode(reader: &mut Reader<'_>) -> Option<Init> {
        let mut init = Init {
            major: reader.u32()?,
            minor: reader.u32()?,
            max_readahead_bytes: reader.u32()?,
            flags: reader.u32()?,
            flags2: 0,
        };
        // Older kernels end here.
        if init.flags & INIT_EXT != 0 {
            init.flags2 = reader.u32()?;
        }
        Some(init)
    }
}

impl Transfer {
    fn decode(reader: &mut Reader<'_>) -> Option<Transfer> {
        let _handle = reader.u64()?;
        let (offset_bytes, len_bytes) = (reader.u64()?, reader.u32()?);
        let (_transfer_flags, _lock_owner) = (reader.u32()?, reader.u64()?);
        Some(Transfer {
            offset_bytes,
            len_bytes,
            open_flags: reader.u32()?,
        })
    }
}

impl SetAttributes {
    fn decode(reader: &mut Reader<'_>) -> Option<SetAttributes> {
        let (valid, _padding, _handle) = (reader.u32()?, reader.u32()?, reader.u64()?);
        let (size_bytes, _lock_owner) = (reader.u64()?, reader.u64()?);
        let seconds = [reader.u64()?, reader.u64()?, reader.u64()?];
        let nanoseconds = [reader.u32()?, reader.u32()?, reader.u32()?];
        let time = |at: usize| Time {
            seconds: seconds[at],
            nanoseconds: nanoseconds[at],
        };
        let (mode, _unused) = (reader.u32()?, reader.u32()?);
        Some(SetAttributes {
            valid,
            size_bytes,
            atime: time(0),
            mtime: time(1),
            mode,
            uid: reader.u32()?,
            gid: reader.u32()?,
        })
    }
}

impl Allocate {
    fn decode(reader: &mut Reader<'_>) -> Option<Allocate> {
        let _handle = reader.u64()?;
        Some(Allocate {
            offset_bytes: reader.u64()?,
            len_bytes: reader.u64()?,
            mode: reader.u32()?,
        })
    }
}

impl Seek {
    fn decode(reader: &mut Reader<'_>) -> Option<Seek> {
        let _handle = reader.u64()?;
        Some(Seek {
            offset_bytes: reader.u64()?,
            whence: reader.u32()?,
        })
    }
}

/// The header of an answer with a body of `body_bytes` bytes; `errno` is 0, or why there is none.
pub(super) fn reply_header(unique: u64, errno: i32, body_bytes: usize) -> [u8; REPLY_HEADER_BYTES] {
    let mut header = [0; REPLY_HEADER_BYTES];
    let len_bytes = (REPLY_HEADER_BYTES + body_bytes) as u32;
    header[..4].copy_from_slice(&len_bytes.to_ne_bytes());
    header[4..8].copy_from_slice(&(-errno).to_ne_bytes());
    header[8..].copy_from_slice(&unique.to_ne_bytes());
    header
}

/// The body of an answer.
#[derive(Debug, Default)]
pub(super) struct Body(Vec<u8>);

impl Body {
    fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    /// Zeroes up to a length of `len_bytes` bytes.
    fn pad(mut self, len_bytes: usize) -> Self {
        self.0.resize(len_bytes, 0);
        self
    }

    /// Its bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// What the server wants.
#[derive(Debug, Clone, Copy)]
pub(super) struct Welcome {
    pub(super) minor: u32,
    pub(super) max_readahead_bytes: u32,
    pub(super) flags: u32,
    pub(super) flags2: u32,
    /// Requests that nobody waits for, such as asynchronous ones, at once.
    pub(super) max_background: u16,
    pub(super) max_write_bytes: u32,
    pub(super) max_pages: u16,
}

impl Welcome {
    /// The answer to the greeting.
    pub(super) fn encode(&self) -> Body {
        Body::default()
            .u32(VERSION.0)
            .u32(self.minor)
            .u32(self.max_readahead_bytes)
            .u32(self.flags)
            .u16(self.max_background)
            .u16(self.max_background / 4 * 3)
            .u32(self.max_write_bytes)
            // Times are exact to the nanosecond.
            .u32(1)
            .u16(self.max_pages)
            .u16(0)
            .u32(self.flags2)
            .pad(64)
    }
}

/// The attributes of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attributes {
    pub(super) size_bytes: u64,
    /// Space that it takes, in units of 512 bytes.
    pub(super) blocks: u64,
    pub(super) atime: Time,
    pub(super) mtime: Time,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) block_size_bytes: u32,
}

impl Attributes {
    /// The answer to who asks for attributes: they hold for `valid_seconds`.
    pub(super) fn encode(&self, valid_seconds: u64) -> Body {
        Body::default()
            .u64(valid_seconds)
            .u64(0)
            .u64(ROOT_ID)
            .u64(self.size_bytes)
            .u64(self.blocks)
            .u64(self.atime.seconds)
            .u64(self.mtime.seconds)
            .u64(self.mtime.seconds)
            .u32(self.atime.nanoseconds)
            .u32(self.mtime.nanoseconds)
            .u32(self.mtime.nanoseconds)
            .u32(self.mode)
            .u32(1)
            .u32(self.uid)
            .u32(self.gid)
            .u32(0)
            .u32(self.block_size_bytes)
            .u32(0)
    }
}

/// The answer to an open; later requests repeat the handle.
pub(super) fn opened(handle: u64, flags: u32) -> Body {
    Body::default().u64(handle).u32(flags).u32(0)
}

/// The answer to a write.
pub(super) fn written(len_bytes: u32) -> Body {
    Body::default().u32(len_bytes).u32(0)
}

/// The answer to a seek.
pub(super) fn sought(offset_bytes: u64) -> Body {
    Body::default().u64(offset_bytes)
}

/// The answer to who asks for the file system, in blocks of `block_bytes`.
pub(super) fn file_system(blocks: u64, free_blocks: u64, block_bytes: u32) -> Body {
    let longest_name_bytes = 255;
    Body::default()
        .u64(blocks)
        .u64(free_blocks)
        .u64(free_blocks)
        .u64(1)
        .u64(0)
        .u32(block_bytes)
        .u32(longest_name_bytes)
        .u32(block_bytes)
        .pad(80)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(((HEADER_BYTES + body.len()) as u32).to_ne_bytes());
        bytes.extend(opcode.to_ne_bytes());
        bytes.extend(7_u64.to_ne_bytes());
        bytes.extend(ROOT_ID.to_ne_bytes());
        bytes.resize(HEADER_BYTES, 0);
        bytes.extend(body);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Operation> {
        let header = Header::decode(bytes)?;
        header.operation(&bytes[HEADER_BYTES..])
    }

    #[test]
    fn a_read_is_taken_apart() {
        let body = Body::default().u64(1).u64(512).u32(4096).u32(0).u64(2);
        let body = body.u32(libc::O_DSYNC as u32).u32(0);
        let bytes = message(opcode::READ, body.bytes());
        assert_eq!(bytes.len(), HEAD_BYTES);
        let expected = Transfer {
            offset_bytes: 512,
            len_bytes: 4096,
            open_flags: libc::O_DSYNC as u32,
        };
        assert_eq!(decode(&bytes), Some(Operation::Read(expected)));
        assert_eq!(Header::decode(&bytes).map(|header| header.unique), Some(7));
    }

    #[test]
    fn messages_that_end_early_are_told_and_unknown_ones_too() {
        let known = [
            opcode::INIT,
            opcode::SETATTR,
            opcode::READ,
            opcode::WRITE,
            opcode::FALLOCATE,
            opcode::LSEEK,
        ];
        for opcode in known {
            for len_bytes in 0..16 {
                let bytes = message(opcode, &vec![0; len_bytes]);
                assert_eq!(decode(&bytes), None, "{opcode} {len_bytes}");
            }
        }
        assert_eq!(decode(&message(9999, &[])), Some(Operation::Unknown));
        assert_eq!(Header::decode(&[0; HEADER_BYTES - 1]), None);
    }

    #[test]
    fn answers_have_the_lengths_that_the_kernel_expects() {
        let attributes = Attributes {
            size_bytes: 1,
            blocks: 1,
            atime: Time::default(),
            mtime: Time::default(),
            mode: 0,
            uid: 0,
            gid: 0,
            block_size_bytes: 4096,
        };
        assert_eq!(attributes.encode(1).bytes().len(), 104);
        assert_eq!(opened(0, 0).bytes().len(), 16);
        assert_eq!(written(0).bytes().len(), 8);
        assert_eq!(sought(0).bytes().len(), 8);
        assert_eq!(file_system(1, 1, 4096).bytes().len(), 80);
        let header = reply_header(7, libc::EIO, 8);
        assert_eq!(header[..4], 24_u32.to_ne_bytes());
        assert_eq!(header[4..8], (-libc::EIO).to_ne_bytes());
    }
}
