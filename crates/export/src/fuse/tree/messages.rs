//! The messages that a tree of files needs beside those of one file, in the same form.
//!
//! Invariant: as in `proto`, nothing is read beyond a message's end.

use vellum_files::{Attributes, Id, Kind};

use super::super::proto::{Body, Header, Init, Reader, Welcome};
use super::super::{MAX_BACKGROUND, MAX_TRANSFER_BYTES, proto};

/// How long the kernel may rely on what it is told: files do not change.
const VALID_SECONDS: u64 = 24 * 3600;
/// Nothing is written; the kernel counts with a page at least.
const WRITE_BYTES: u32 = 4096;
/// Memory that every message of the kernel fits in, with room for what it may add, in bytes.
pub(super) const MESSAGE_BYTES: usize = 64 << 10;
/// Length of an entry of a directory without its name, and what entries are aligned to.
const ENTRY_HEAD_BYTES: usize = 24;
const ENTRY_ALIGNMENT: usize = 8;
/// Length of what is said of a file that was looked up.
const FOUND_BYTES: usize = 128;

const DO_READDIRPLUS: u32 = 1 << 13;
const READDIRPLUS_AUTO: u32 = 1 << 14;
const PARALLEL_DIRECTORIES: u32 = 1 << 18;
const CACHE_LINKS: u32 = 1 << 23;
/// What the page cache has of a file may stay.
const OPEN_KEEP_CACHE: u32 = 1 << 1;
/// What the kernel has of a directory may stay.
const OPEN_CACHE_DIRECTORY: u32 = 1 << 3;

mod opcode {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const READLINK: u32 = 5;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const READDIR: u32 = 28;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const BATCH_FORGET: u32 = 42;
    pub(super) const READDIRPLUS: u32 = 44;
}

/// What the kernel asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation<'a> {
    Lookup(&'a [u8]),
    GetAttributes,
    ReadLink,
    Open,
    Read(Piece),
    StatFs,
    Release,
    OpenDirectory,
    ReadDirectory(Piece),
    /// With attributes.
    ReadDirectoryPlus(Piece),
    ReleaseDirectory,
    /// It waits for no answer.
    Silent,
    Unknown,
}

/// What is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Of a directory: where the name before said that it goes on.
    pub(super) offset: u64,
    pub(super) len_bytes: usize,
}

impl Piece {
    fn decode(body: &[u8]) -> Option<Piece> {
        let mut reader = Reader(body);
        let _handle = reader.u64()?;
        let (offset, len_bytes) = (reader.u64()?, reader.u32()? as usize);
        let len_bytes = len_bytes.min(MAX_TRANSFER_BYTES);
        Some(Piece { offset, len_bytes })
    }
}

/// What a message asks for; `body` is what follows its header. `None` if it is too short.
pub(super) fn operation<'a>(header: &Header, body: &'a [u8]) -> Option<Operation<'a>> {
    Some(match header.opcode {
        opcode::LOOKUP => Operation::Lookup(body.split(|byte| *byte == 0).next()?),
        opcode::GETATTR => Operation::GetAttributes,
        opcode::READLINK => Operation::ReadLink,
        opcode::OPEN => Operation::Open,
        opcode::READ => Operation::Read(Piece::decode(body)?),
        opcode::STATFS => Operation::StatFs,
        opcode::RELEASE => Operation::Release,
        opcode::OPENDIR => Operation::OpenDirectory,
        opcode::READDIR => Operation::ReadDirectory(Piece::decode(body)?),
        opcode::READDIRPLUS => Operation::ReadDirectoryPlus(Piece::decode(body)?),
        opcode::RELEASEDIR => Operation::ReleaseDirectory,
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::DESTROY => {
            Operation::Silent
        }
        _ => Operation::Unknown,
    })
}

/// What the kernel's greeting is answered with.
pub(super) fn welcome(init: &Init) -> Welcome {
    let flags = proto::INIT_ASYNC_READ
        | proto::INIT_MAX_PAGES
        | DO_READDIRPLUS
        | READDIRPLUS_AUTO
        | PARALLEL_DIRECTORIES
        | CACHE_LINKS;
    Welcome {
        minor: init.minor.min(proto::VERSION.1),
        max_readahead_bytes: init.max_readahead_bytes,
        flags: flags & init.flags,
        flags2: 0,
        max_background: MAX_BACKGROUND,
        max_write_bytes: WRITE_BYTES,
        max_pages: (MAX_TRANSFER_BYTES / 4096) as u16,
    }
}

/// Whom files belong to where the file system does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) user: u32,
    pub(super) group: u32,
}

impl Body {
    fn attributes(self, of: &Attributes, owner: Owner) -> Body {
        let (user, group) = of.owner.unwrap_or((owner.user, owner.group));
        let times = [of.accessed, of.modified, of.changed];
        let body = self.u64(of.inode).u64(of.size_bytes).u64(of.blocks);
        // What was before 1970 is negative, also for the kernel.
        let body = times
            .iter()
            .fold(body, |body, time| body.u64(time.seconds as u64));
        let body = times
            .iter()
            .fold(body, |body, time| body.u32(time.nanoseconds));
        body.u32(of.kind.mode() | of.permissions)
            .u32(of.links)
            .u32(user)
            .u32(group)
            .u32(of.device)
            .u32(4096)
            .u32(0)
    }
}

/// The answer to who asks for attributes.
pub(super) fn attributes(of: &Attributes, owner: Owner) -> Body {
    let body = Body::default().u64(VALID_SECONDS).u64(0);
    body.attributes(of, owner)
}

/// The answer to who looks for a name that is there.
pub(super) fn found(id: Id, of: &Attributes, owner: Owner) -> Body {
    let generation = 0;
    let body = Body::default().u64(id).u64(generation);
    let body = body.u64(VALID_SECONDS).u64(VALID_SECONDS).u64(0);
    body.attributes(of, owner)
}

/// The answer to who looks for a name that is not there, and will not be.
pub(super) fn not_found() -> Body {
    let body = Body::default().u64(0).u64(0).u64(VALID_SECONDS);
    body.pad(FOUND_BYTES)
}

/// The answer to an open.
pub(super) fn opened() -> Body {
    proto::opened(0, OPEN_KEEP_CACHE)
}

/// The answer to an open of a directory.
pub(super) fn opened_directory() -> Body {
    proto::opened(0, OPEN_KEEP_CACHE | OPEN_CACHE_DIRECTORY)
}

/// The names of a directory that fit in an answer.
#[derive(Debug)]
pub(super) struct Names {
    body: Body,
    room_bytes: usize,
    with_attributes: bool,
}

impl Names {
    pub(super) fn new(room_bytes: usize, with_attributes: bool) -> Names {
        Names {
            body: Body::default(),
            room_bytes,
            with_attributes,
        }
    }

    /// Whether a name fits.
    pub(super) fn has_room(&self, name: &[u8]) -> bool {
        let len = (ENTRY_HEAD_BYTES + name.len()).next_multiple_of(ENTRY_ALIGNMENT);
        let len = if self.with_attributes {
            len + FOUND_BYTES
        } else {
            len
        };
        self.body.bytes().len() + len <= self.room_bytes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.body.bytes().is_empty()
    }

    /// Adds a name that fits. `file` is what is known of it, if attributes are wanted; nothing, if
    /// the kernel is to ask for it.
    pub(super) fn add(
        &mut self,
        name: &[u8],
        (inode, kind): (u64, Option<Kind>),
        next: u64,
        file: Option<&Body>,
    ) {
        let mut body = std::mem::take(&mut self.body);
        if self.with_attributes {
            body = match file {
                Some(file) => body.with(file.bytes()),
                None => body.with(&[0; FOUND_BYTES]),
            };
        }
        let kind = kind.map_or(0, |kind| kind.mode() >> 12);
        body = body.u64(inode).u64(next).u32(name.len() as u32).u32(kind);
        body = body.with(name);
        let len = body.bytes().len().next_multiple_of(ENTRY_ALIGNMENT);
        self.body = body.pad(len);
    }

    pub(super) fn finish(self) -> Body {
        self.body
    }
}

#[cfg(test)]
mod tests {
    use vellum_files::Time;

    use super::*;

    fn header(opcode: u32) -> Header {
        Header {
            len_bytes: 0,
            opcode,
            unique: 1,
            node: 1,
        }
    }

    #[test]
    fn messages_that_end_early_are_told() {
        for opcode in [opcode::READ, opcode::READDIR, opcode::READDIRPLUS] {
            for len_bytes in 0..20 {
                assert_eq!(operation(&header(opcode), &vec![0; len_bytes]), None);
            }
            assert!(operation(&header(opcode), &[0; 20]).is_some());
        }
        let looked_up = operation(&header(opcode::LOOKUP), b"name\0rest");
        assert_eq!(looked_up, Some(Operation::Lookup(b"name")));
        assert_eq!(operation(&header(999), &[]), Some(Operation::Unknown));
    }

    #[test]
    fn answers_have_the_lengths_that_the_kernel_expects() {
        let of = Attributes {
            kind: Kind::File,
            permissions: 0o644,
            inode: 12,
            links: 1,
            owner: None,
            device: 0,
            size_bytes: 1,
            blocks: 8,
            accessed: Time::default(),
            modified: Time::default(),
            changed: Time::default(),
        };
        let owner = Owner { user: 1, group: 2 };
        assert_eq!(attributes(&of, owner).bytes().len(), 104);
        assert_eq!(found(12, &of, owner).bytes().len(), FOUND_BYTES);
        assert_eq!(not_found().bytes().len(), FOUND_BYTES);
        let mut names = Names::new(200, true);
        assert!(names.has_room(b"123456789") && !names.has_room(&[b'x'; 49]));
        names.add(b"123456789", (12, None), 1, None);
        assert_eq!(names.finish().bytes().len(), FOUND_BYTES + 24 + 16);
    }
}
