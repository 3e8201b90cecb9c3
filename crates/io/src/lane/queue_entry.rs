//! Entries of the queues in which `/dev/fuse` hands out requests over io_uring (Linux 6.14).
//!
//! An entry is memory that the kernel knows: it puts the next request there, and fetches the
//! answer from there when it is given the entry back, in one command for both. Needs a lane
//! with [`super::LaneOptions::commands`]. The layouts are those of `linux/fuse.h`.
//!
//! Invariants:
//! - The kernel writes to an entry's memory only between a command and its completion. The
//!   command keeps the memory mapped meanwhile, as does the [`HeldEntry`] that it gives: there
//!   is no other way to the next command for the same memory.
//! - Nobody but the kernel can end a command that waits for a request: it ends with the mount,
//!   or with the lane. Whoever drops the future of one gives it up for good.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;

use io_uring::opcode::UringCmd80;
use io_uring::squeue::Entry128;
use io_uring::types::Fd;

use super::message::MessageDevice;
use super::{Completion, Descriptor, Op, Request, submit};
use crate::shared_memory::{SharedBuffer, SharedBuffers, SharedMemory};
use crate::sys::IoVecs;
use crate::{Error, ErrorKind, Io, Result};

/// Gives the kernel an entry for the first time.
const REGISTER: u32 = 1;
/// Gives it back with an answer.
const COMMIT_AND_FETCH: u32 = 2;
/// Length in bytes of each of the first two parts of an entry's header: the header of a
/// request or answer, and what an operation says of itself.
const PART_BYTES: usize = 128;
/// Where in the third part the kernel says what it calls the request.
const COMMIT_ID_AT: usize = 2 * PART_BYTES + 8;
/// Where the length of the data stands.
const DATA_LEN_AT: usize = 2 * PART_BYTES + 16;
/// Length of an entry's header in bytes.
const HEADER_BYTES: usize = 2 * PART_BYTES + 32;
/// What an entry's memory has in front of its data, which so are aligned.
const HEADER_ROOM_BYTES: usize = 4096;
/// Where the number of iovecs stands in a submission.
const SUBMISSION_LEN_AT: usize = 24;

/// A command: which only this module makes, for an answer to a request that another entry holds
/// would give the kernel memory that is not there any more.
#[derive(Debug, Clone, Copy)]
pub struct EntryCommand {
    queue: u16,
    /// The request that the entry holds the answer of; 0 if there is none.
    answered: u64,
}

/// Memory for an entry, which no kernel knows yet.
#[derive(Debug)]
pub struct QueueEntry(SharedBuffer);

impl QueueEntry {
    /// `count` entries for requests with up to `data_bytes` bytes of data. Memory that no
    /// request ever reaches is not taken.
    ///
    /// # Errors
    /// What the system says.
    pub fn several(count: usize, data_bytes: usize) -> Result<Vec<QueueEntry>> {
        let entry_bytes = HEADER_ROOM_BYTES as u64 + data_bytes as u64;
        let memory = Arc::new(SharedMemory::anonymous(entry_bytes * count as u64)?);
        let entry = |number: u64| memory.range(number * entry_bytes, entry_bytes);
        Ok((0..count as u64)
            .filter_map(entry)
            .map(QueueEntry)
            .collect())
    }

    /// Gives the entry to queue number `queue` of a mount, and waits for a request.
    ///
    /// # Errors
    /// What the kernel says, which hands out requests over `device` itself then.
    pub fn register(self, device: &MessageDevice, queue: u16) -> Io<HeldEntry> {
        start(device.descriptor(), queue, 0, self.0)
    }
}

fn start(file: Arc<Descriptor>, queue: u16, answered: u64, memory: SharedBuffer) -> Io<HeldEntry> {
    let op = Op::FuseEntry(EntryCommand { queue, answered });
    let memory = SharedBuffers::from_iter([memory]);
    submit(Request::shared(file, op, memory), HeldEntry::take)
}

/// An entry with a request in it.
pub struct HeldEntry {
    file: Arc<Descriptor>,
    queue: u16,
    /// What the kernel calls the request.
    id: u64,
    memory: SharedBuffer,
}

impl HeldEntry {
    fn take(done: Completion) -> Result<HeldEntry> {
        done.value()?;
        let Request {
            file,
            op,
            mut shared,
            ..
        } = done.request;
        let (Op::FuseEntry(command), Some(memory)) = (op, shared.pop()) else {
            let message = "something else has ended";
            return Err(Error::new(ErrorKind::Io, "take an entry", message));
        };
        let mut id = [0; 8];
        memory.copy_to(COMMIT_ID_AT, &mut id);
        let id = u64::from_ne_bytes(id);
        Ok(HeldEntry {
            file,
            queue: command.queue,
            id,
            memory,
        })
    }

    /// Copies the beginning of the request's header, 128 bytes at most.
    pub fn copy_header(&self, bytes: &mut [u8]) {
        let len = bytes.len().min(PART_BYTES);
        self.memory.copy_to(0, &mut bytes[..len]);
    }

    /// Copies the beginning of what the operation says of itself, 128 bytes at most.
    pub fn copy_operation(&self, bytes: &mut [u8]) {
        let len = bytes.len().min(PART_BYTES);
        self.memory.copy_to(PART_BYTES, &mut bytes[..len]);
    }

    /// Length of the request's data in bytes.
    pub fn data_len_bytes(&self) -> usize {
        let mut len = [0; 4];
        self.memory.copy_to(DATA_LEN_AT, &mut len);
        (u32::from_ne_bytes(len) as usize).min(self.room_bytes())
    }

    /// How many bytes of data have room, of a request or an answer.
    pub fn room_bytes(&self) -> usize {
        self.memory.len() - HEADER_ROOM_BYTES
    }

    /// The memory of the first `len_bytes` bytes of the request's data, or the answer's. Whoever
    /// still moves bytes there when the entry is given back moves those of another request.
    ///
    /// # Panics
    /// If there is no room for so many.
    pub fn data(&self, len_bytes: usize) -> SharedBuffer {
        self.memory.piece(HEADER_ROOM_BYTES, len_bytes)
    }

    /// Answers with a header and as many bytes of data, and waits for the next request.
    ///
    /// # Errors
    /// What the kernel says. The entry is no use any more then.
    ///
    /// # Panics
    /// If the header has more than 128 bytes, or there is no room for the data.
    pub fn answer(self, header: &[u8], data_bytes: usize) -> Io<HeldEntry> {
        assert!(header.len() <= PART_BYTES && data_bytes <= self.room_bytes());
        self.memory.copy_from(0, header);
        let data_bytes = data_bytes as u32;
        self.memory
            .copy_from(DATA_LEN_AT, &data_bytes.to_ne_bytes());
        start(self.file, self.queue, self.id, self.memory)
    }
}

impl fmt::Debug for HeldEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeldEntry({} of queue {})", self.id, self.queue)
    }
}

/// Tells header and data apart in what the kernel is told of an entry's memory.
pub(super) fn tell_apart(vecs: &mut IoVecs) {
    if let [whole] = vecs[..] {
        let header = libc::iovec {
            iov_len: HEADER_BYTES,
            ..whole
        };
        let data = libc::iovec {
            iov_base: whole.iov_base.wrapping_byte_add(HEADER_ROOM_BYTES),
            iov_len: whole.iov_len.saturating_sub(HEADER_ROOM_BYTES),
        };
        *vecs = IoVecs::from_iter([header, data]);
    }
}

/// What the kernel is asked to do with an entry. The memory that `vecs` name is used until the
/// completion, `vecs` itself only when the command is handed over.
pub(super) fn submission(fd: RawFd, command: EntryCommand, vecs: &IoVecs) -> Entry128 {
    let EntryCommand { queue, answered } = command;
    // Flags, the request, the queue.
    let mut area = [0; 80];
    area[8..16].copy_from_slice(&answered.to_ne_bytes());
    area[16..18].copy_from_slice(&queue.to_ne_bytes());
    let number = match answered {
        0 => REGISTER,
        _ => COMMIT_AND_FETCH,
    };
    let mut command = UringCmd80::new(Fd(fd), number)
        .cmd(area)
        .addr(Some(vecs.as_ptr() as u64))
        .build();
    let count = vecs.len() as u32;
    // SAFETY: the builder has no setter for this number. A submission is 128 plain bytes, of
    // which `linux/io_uring.h` says where it stands; any value is valid.
    unsafe {
        let start: *mut u8 = (&raw mut command).cast();
        start
            .add(SUBMISSION_LEN_AT)
            .cast::<u32>()
            .write_unaligned(count);
    }
    command
}
