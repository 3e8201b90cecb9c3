//! A thread that answers the kernel.
//!
//! Invariants:
//! - Whatever a request does, it is answered, and the next one is taken: one that panics fails.
//! - Memory is bounded by the longest message and the longest answer.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use vellum_files::{Error as FileError, FileSystem, Id, Kind, ROOT};
use vellum_io::{Error, Result};

use super::super::proto::{self, Body, HEADER_BYTES, Header};
use super::answer_greeting;
use super::messages::{self, MESSAGE_BYTES, Names, Operation, Owner, Piece};

/// Names that a directory has in any case, and that file systems do not list.
const OWN_NAMES: [&[u8]; 2] = [b".", b".."];

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Stopped,
    Unmounted,
}

/// What is answered.
enum Answer {
    Body(Body),
    /// The first bytes of the thread's memory.
    Data(usize),
    Errno(i32),
    None,
}

impl From<FileError> for Answer {
    fn from(error: FileError) -> Answer {
        Answer::Errno(match error {
            FileError::Io(error) => error.raw_os_error().unwrap_or(libc::EIO),
            FileError::Unsupported(_) => libc::EOPNOTSUPP,
            FileError::NotFound => libc::ENOENT,
            FileError::NotADirectory => libc::ENOTDIR,
            FileError::IsADirectory => libc::EISDIR,
            FileError::WrongKind => libc::EINVAL,
            _ => libc::EIO,
        })
    }
}

/// Answers the kernel's greeting, which comes before everything else.
pub(super) fn greet(kernel: &OwnedFd) -> Result<()> {
    let failed = |errno: Errno| Error::from_errno("mount", errno.raw_os_error());
    let mut message = vec![0; MESSAGE_BYTES];
    let len = loop {
        match rustix::io::read(kernel, &mut message[..]) {
            Err(Errno::INTR) => {}
            read => break read.map_err(failed)?,
        }
    };
    let reply = answer_greeting(&message[..len], messages::welcome)?;
    rustix::io::write(kernel, &reply).map_err(failed)?;
    Ok(())
}

/// Answers until `stop` is readable or the mount is gone.
pub(super) fn serve(kernel: &OwnedFd, stop: &OwnedFd, files: &dyn FileSystem) -> End {
    let mut message = vec![0; MESSAGE_BYTES];
    let mut data = Vec::new();
    let owner = Owner {
        user: rustix::process::getuid().as_raw(),
        group: rustix::process::getgid().as_raw(),
    };
    loop {
        let mut polled = [
            PollFd::new(kernel, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        match poll(&mut polled, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return End::Unmounted,
        }
        if !polled[1].revents().is_empty() {
            return End::Stopped;
        }
        let len = match rustix::io::read(kernel, &mut message[..]) {
            Ok(len) => len,
            // Another thread was faster, or who asked has given up.
            Err(Errno::AGAIN | Errno::INTR | Errno::NOENT) => continue,
            Err(_) => return End::Unmounted,
        };
        let message = &message[..len];
        let Some(header) = Header::decode(message) else {
            continue;
        };
        let operation = messages::operation(&header, &message[HEADER_BYTES..]);
        let operation = operation.filter(|_| header.len_bytes as usize == len);
        let answered = catch_unwind(AssertUnwindSafe(|| match operation {
            None => Answer::Errno(libc::EINVAL),
            Some(operation) => answer(files, header.node, operation, owner, &mut data),
        }));
        let answer = answered.unwrap_or(Answer::Errno(libc::EIO));
        send(kernel, header.unique, &answer, &data);
    }
}

/// Sends an answer. That it finds nobody who waits is no matter.
fn send(kernel: &OwnedFd, unique: u64, answer: &Answer, data: &[u8]) {
    let (errno, body) = match answer {
        Answer::None => return,
        Answer::Errno(errno) => (*errno, &[][..]),
        Answer::Body(body) => (0, body.bytes()),
        Answer::Data(len) => (0, &data[..*len]),
    };
    let header = proto::reply_header(unique, errno, body.len());
    let _ = rustix::io::writev(kernel, &[IoSlice::new(&header), IoSlice::new(body)]);
}

fn answer(
    files: &dyn FileSystem,
    node: Id,
    operation: Operation<'_>,
    owner: Owner,
    data: &mut Vec<u8>,
) -> Answer {
    let done = match operation {
        Operation::Silent => return Answer::None,
        Operation::Unknown => return Answer::Errno(libc::ENOSYS),
        Operation::Release | Operation::ReleaseDirectory => Ok(Body::default()),
        Operation::Open => opened(files, node),
        Operation::OpenDirectory => Ok(messages::opened_directory()),
        Operation::GetAttributes => {
            let attributes = files.attributes(node);
            attributes.map(|of| messages::attributes(&of, owner))
        }
        Operation::Lookup(name) => looked_up(files, node, name, owner),
        Operation::ReadLink => {
            let target = files.read_link(node);
            target.map(|target| Body::default().with(&target))
        }
        Operation::StatFs => {
            let (block_bytes, blocks, free) = files.blocks();
            Ok(proto::file_system(blocks, free, block_bytes))
        }
        Operation::ReadDirectory(piece) => names(files, node, piece, false, owner),
        Operation::ReadDirectoryPlus(piece) => names(files, node, piece, true, owner),
        Operation::Read(Piece { offset, len_bytes }) => {
            data.resize(len_bytes, 0);
            return match files.read(node, offset, data) {
                Ok(len) => Answer::Data(len),
                Err(error) => error.into(),
            };
        }
    };
    done.map_or_else(Answer::from, Answer::Body)
}

/// Tells who opens a file that cannot be read, and not only who reads it.
fn opened(files: &dyn FileSystem, node: Id) -> vellum_files::Result<Body> {
    files.read(node, 0, &mut [0])?;
    Ok(messages::opened())
}

fn looked_up(
    files: &dyn FileSystem,
    node: Id,
    name: &[u8],
    owner: Owner,
) -> vellum_files::Result<Body> {
    let Some(id) = files.lookup(node, name)? else {
        return Ok(messages::not_found());
    };
    Ok(messages::found(id, &files.attributes(id)?, owner))
}

/// The names from one on, as many as fit. The first two are the directory's own; the file
/// system's places follow these.
fn names(
    files: &dyn FileSystem,
    node: Id,
    piece: Piece,
    with_attributes: bool,
    owner: Owner,
) -> vellum_files::Result<Body> {
    let mut names = Names::new(piece.len_bytes, with_attributes);
    let own = OWN_NAMES.len() as u64;
    for (name, next) in OWN_NAMES.into_iter().zip(1..) {
        if next > piece.offset && names.has_room(name) {
            names.add(name, (node, Some(Kind::Directory)), next, None);
        }
    }
    let listed = files.list(node, piece.offset.saturating_sub(own), &mut |entry| {
        if !names.has_room(entry.name) {
            return false;
        }
        // What is damaged has a name nevertheless.
        let known = match with_attributes && entry.id != ROOT {
            true => files.attributes(entry.id).ok(),
            false => None,
        };
        let kind = known.as_ref().map(|known| known.kind).or(entry.kind);
        let inode = known.as_ref().map_or(entry.id, |known| known.inode);
        let file = known.map(|known| messages::found(entry.id, &known, owner));
        names.add(entry.name, (inode, kind), entry.next + own, file.as_ref());
        true
    });
    match listed {
        // What comes before the damage is shown; whoever goes on from there is told.
        Err(error) if names.is_empty() => Err(error),
        _ => Ok(names.finish()),
    }
}
