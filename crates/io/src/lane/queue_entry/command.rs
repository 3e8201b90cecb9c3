//! Commands for entries, and where things stand in an entry's memory: the layouts of
//! `linux/fuse.h`.

use std::os::fd::RawFd;

use io_uring::opcode::UringCmd80;
use io_uring::squeue::Entry128;
use io_uring::types::Fd;

use crate::sys::IoVecs;

/// Gives the kernel an entry for the first time.
const REGISTER: u32 = 1;
/// Gives it back with an answer.
const COMMIT_AND_FETCH: u32 = 2;
/// Length in bytes of each of the first two parts of an entry's header: the header of a
/// request or answer, and what an operation says of itself.
pub(super) const PART_BYTES: usize = 128;
/// Where in the third part the kernel says what it calls the request.
pub(super) const COMMIT_ID_AT: usize = 2 * PART_BYTES + 8;
/// Where the length of the data stands.
pub(super) const DATA_LEN_AT: usize = 2 * PART_BYTES + 16;
/// Length of an entry's header in bytes.
const HEADER_BYTES: usize = 2 * PART_BYTES + 32;
/// What an entry's memory has in front of its data, which so are aligned.
pub(super) const HEADER_ROOM_BYTES: usize = 4096;
/// Where the number of iovecs stands in a submission.
const SUBMISSION_LEN_AT: usize = 24;

/// A command for one entry. Only the module of entries makes one: an answer to a request that
/// another entry holds would give the kernel memory that is not there any more.
#[derive(Debug, Clone, Copy)]
pub struct EntryCommand {
    queue: u16,
    /// The request that the entry holds the answer of; 0 if there is none.
    answered: u64,
}

impl EntryCommand {
    /// For an entry of queue number `queue`, with the answer of the request `answered`, or with
    /// none (0).
    pub(super) fn new(queue: u16, answered: u64) -> Self {
        EntryCommand { queue, answered }
    }

    /// Number of the entry's queue.
    pub(super) fn queue(self) -> u16 {
        self.queue
    }
}

/// Tells header and data apart in what the kernel is told of an entry's memory.
pub(in crate::lane) fn tell_apart(vecs: &mut IoVecs) {
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
pub(in crate::lane) fn submission(fd: RawFd, command: EntryCommand, vecs: &IoVecs) -> Entry128 {
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
