//! From a request to what io_uring is asked to do for it.

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};

use super::op::Op;
use super::queue_entry::command::{self, EntryCommand};
use super::request::Request;
use crate::sys::{self, IoVecs, MAX_TRANSFER_BYTES};

/// The offset that stands for none.
const CURRENT_POSITION: u64 = u64::MAX;

/// What a submission points into besides the request's buffers. It must stay in
/// place, like the request, until the completion.
pub(crate) struct Memory {
    vecs: IoVecs,
    header: libc::msghdr,
}

impl Memory {
    /// Memory that nothing points into yet.
    pub(crate) fn new() -> Self {
        Memory {
            vecs: IoVecs::new(),
            header: sys::message_header(&mut IoVecs::new()),
        }
    }

    /// Gives the kernel an entry of a queue.
    pub(crate) fn command(
        &mut self,
        request: &mut Request,
        command: EntryCommand,
    ) -> squeue::Entry128 {
        self.vecs = request.io_vecs();
        command::tell_apart(&mut self.vecs);
        command::submission(request.file.raw(), command, &self.vecs)
    }

    /// Waits until the request's descriptor is ready for it.
    pub(crate) fn readiness(request: &Request) -> squeue::Entry {
        let mut events = request.op.readiness().unwrap_or(libc::POLLIN) as u32;
        if matches!(request.op, Op::ReceiveMessage) {
            // All lanes of a mount wait for the next message, and one of them is to be woken. The
            // kernel would wake all of them for a read that waits.
            events |= libc::EPOLLEXCLUSIVE as u32;
        }
        opcode::PollAdd::new(Fd(request.file.raw()), events).build()
    }

    /// Does what is left of the request.
    pub(crate) fn rest(&mut self, request: &mut Request) -> squeue::Entry {
        let fd = Fd(request.file.raw());
        match request.op {
            Op::Read { offset_bytes } => {
                let offset = request.rest_offset_bytes(offset_bytes);
                self.read(fd, request, offset)
            }
            Op::Write {
                offset_bytes,
                durable,
            } => {
                let flags = if durable { libc::RWF_DSYNC } else { 0 };
                let offset = request.rest_offset_bytes(offset_bytes);
                self.write(fd, request, offset, flags)
            }
            Op::Sync { .. } => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
            Op::Fallocate {
                mode,
                offset_bytes,
                len_bytes,
            } => opcode::Fallocate::new(fd, len_bytes)
                .offset(offset_bytes)
                .mode(mode)
                .build(),
            Op::Receive => receive(fd, request),
            Op::Send => self.send(fd, request),
            Op::SendMessage => self.write(fd, request, CURRENT_POSITION, 0),
            Op::Accept => {
                let none = std::ptr::null_mut();
                opcode::Accept::new(fd, none, std::ptr::null_mut())
                    .flags(libc::SOCK_CLOEXEC)
                    .build()
            }
            Op::Poll { .. } => Self::readiness(request),
            // Calls go to the workers and never come here, nor do commands, nor messages but for
            // their readiness.
            Op::Call { .. } | Op::Connect { .. } | Op::FuseEntry(_) | Op::ReceiveMessage => {
                opcode::Nop::new().build()
            }
        }
    }

    fn read(&mut self, fd: Fd, request: &mut Request, offset_bytes: u64) -> squeue::Entry {
        self.vecs = request.io_vecs();
        match self.vecs[..] {
            [one] => opcode::Read::new(fd, one.iov_base.cast(), one.iov_len as u32)
                .offset(offset_bytes)
                .build(),
            ref many => opcode::Readv::new(fd, many.as_ptr(), many.len() as u32)
                .offset(offset_bytes)
                .build(),
        }
    }

    fn write(
        &mut self,
        fd: Fd,
        request: &mut Request,
        offset_bytes: u64,
        flags: i32,
    ) -> squeue::Entry {
        self.vecs = request.io_vecs();
        match self.vecs[..] {
            [one] => opcode::Write::new(fd, one.iov_base.cast(), one.iov_len as u32)
                .offset(offset_bytes)
                .rw_flags(flags)
                .build(),
            ref many => opcode::Writev::new(fd, many.as_ptr(), many.len() as u32)
                .offset(offset_bytes)
                .rw_flags(flags)
                .build(),
        }
    }

    fn send(&mut self, fd: Fd, request: &mut Request) -> squeue::Entry {
        self.vecs = request.io_vecs();
        // MSG_WAITALL: the kernel itself goes on after a partial send.
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        if let [one] = self.vecs[..] {
            let len = one.iov_len as u32;
            return opcode::Send::new(fd, one.iov_base.cast(), len)
                .flags(flags)
                .build();
        }
        self.header = sys::message_header(&mut self.vecs);
        opcode::SendMsg::new(fd, &raw const self.header)
            .flags(flags as u32)
            .build()
    }
}

fn receive(fd: Fd, request: &mut Request) -> squeue::Entry {
    match request.buffers.first_mut() {
        Some(buffer) => {
            let len = buffer.len().min(MAX_TRANSFER_BYTES) as u32;
            opcode::Recv::new(fd, buffer.as_mut_ptr(), len).build()
        }
        None => opcode::Nop::new().build(),
    }
}
