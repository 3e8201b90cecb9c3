//! Entries of the queues in which `/dev/fuse` hands out requests over io_uring (Linux 6.14).
//!
//! An entry is memory that the kernel knows: it puts the next request there, and fetches the
//! answer from there when it is given the entry back, in one command for both. Needs a lane
//! with [`super::LaneOptions::commands`].
//!
//! Invariants:
//! - The kernel writes to an entry's memory only between a command and its completion. The
//!   command keeps the memory mapped meanwhile, as does the [`HeldEntry`] that it gives: there
//!   is no other way to the next command for the same memory.
//! - Nobody but the kernel can end a command that waits for a request: it ends with the mount,
//!   or with the lane. Whoever drops the future of one gives it up for good.

pub(super) mod command;

use std::fmt;
use std::sync::Arc;

pub use command::EntryCommand;
use command::{COMMIT_ID_AT, DATA_LEN_AT, HEADER_ROOM_BYTES, PART_BYTES};

use super::message::MessageDevice;
use super::{Completion, Descriptor, Op, Request, submit};
use crate::shared_memory::{SharedBuffer, SharedBuffers, SharedMemory};
use crate::{Error, ErrorKind, Io, Result};

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
    let op = Op::FuseEntry(EntryCommand::new(queue, answered));
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
            queue: command.queue(),
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
