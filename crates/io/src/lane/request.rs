//! One request of a lane: what it is, what it owns, and how it goes on after the
//! kernel has done a part of it. Both backends share this state machine.

use std::fmt;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;

use super::descriptor::{Descriptor, RunningSync};
use super::op::Op;
use crate::align::SharedGuard;
use crate::buffer::total_len;
use crate::shared_memory::{self, SharedBuffers};
use crate::sys::{self, Errno, IoVecs};
use crate::{Buffers, Error};

/// A request and all that it needs until its completion.
pub struct Request {
    pub(crate) file: Arc<Descriptor>,
    pub(crate) op: Op,
    /// What is read into or written; given back with the completion.
    pub buffers: Buffers,
    /// What is read into or written without being looked at, behind the buffers. The kernel has it
    /// mapped as long as the request lives.
    pub(crate) shared: SharedBuffers,
    /// The connection that the request made.
    pub(crate) made: Option<OwnedFd>,
    /// Bytes of the buffers that are done.
    pub(crate) done_bytes: usize,
    /// The leave to change whole blocks.
    pub range_guard: Option<SharedGuard>,
    /// Present while it may learn of what could not be made durable.
    sync: Option<RunningSync>,
    len_bytes: usize,
}

/// How a request goes on.
pub(crate) enum Step {
    /// It is over, with this result.
    Finished(Result<i64, Errno>),
    /// Ask the kernel for the rest.
    Again,
    /// Ask again when the descriptor is ready.
    WhenReady,
}

/// A request that is over.
#[derive(Debug)]
pub struct Completion {
    /// What was asked for, with its buffers.
    pub request: Request,
    /// What the kernel said last, or the bytes moved.
    pub result: Result<i64, Errno>,
}

impl Request {
    /// A new request.
    pub fn new(file: Arc<Descriptor>, op: Op, buffers: Buffers) -> Self {
        let len_bytes = total_len(&buffers) as usize;
        Request {
            range_guard: None,
            sync: op.syncs().then(|| RunningSync::begin(&file)),
            file,
            op,
            buffers,
            shared: SharedBuffers::new(),
            made: None,
            done_bytes: 0,
            len_bytes,
        }
    }

    /// A new read or write of memory that others change meanwhile: what they see of it, or it of
    /// them, is any mixture. It stays mapped until the end.
    pub fn shared(file: Arc<Descriptor>, op: Op, shared: SharedBuffers) -> Self {
        let mut request = Request::new(file, op, Buffers::new());
        request.len_bytes = shared_memory::total_len(&shared);
        request.shared = shared;
        request
    }

    /// The memory that is left to fill or write.
    pub(crate) fn io_vecs(&mut self) -> IoVecs {
        sys::io_vecs(&mut self.buffers, &self.shared, self.done_bytes)
    }

    /// Offset where the rest of a read or write begins.
    pub(crate) fn rest_offset_bytes(&self, offset_bytes: u64) -> u64 {
        offset_bytes + self.done_bytes as u64
    }

    /// Takes the kernel's answer to the last try.
    pub(crate) fn advance(&mut self, answer: Result<i64, Errno>) -> Step {
        let step = self.step(answer);
        if matches!(step, Step::Finished(_)) {
            if self.op.changes() {
                // Even if it failed: a part may be done.
                self.file.syncs().changed();
            }
            // Only now: whoever waits for it asks then how it went.
            self.sync = None;
            self.range_guard = None;
        }
        step
    }

    fn step(&mut self, answer: Result<i64, Errno>) -> Step {
        match answer {
            // Not even so: nobody knows what became of the pages.
            Err(errno) if matches!(self.op, Op::Sync { .. }) => {
                Step::Finished(Err(self.note_failure(errno)))
            }
            Err(libc::EINTR) => Step::Again,
            Err(libc::EAGAIN) if self.op.readiness().is_some() => Step::WhenReady,
            // Files answer EAGAIN only when the kernel is short of something.
            Err(libc::EAGAIN) if !self.op.needs_worker() => Step::Again,
            Err(errno) => Step::Finished(Err(self.note_failure(errno))),
            Ok(value) => self.advance_by(value),
        }
    }

    fn advance_by(&mut self, value: i64) -> Step {
        match &self.op {
            Op::Read { .. } => self.advance_read(value as usize),
            Op::Write { .. } | Op::Send => {
                self.done_bytes += value as usize;
                match self.done_bytes >= self.len_bytes {
                    true => Step::Finished(self.check_syncs(self.len_bytes as i64)),
                    false if value == 0 => Step::Finished(Err(libc::ENOSPC)),
                    false => Step::Again,
                }
            }
            Op::Sync { .. } => Step::Finished(self.check_syncs(0)),
            Op::Accept | Op::Connect { .. } => {
                self.made = Some(sys::own(value as RawFd));
                Step::Finished(Ok(0))
            }
            _ => Step::Finished(Ok(value)),
        }
    }

    fn advance_read(&mut self, count: usize) -> Step {
        self.done_bytes += count;
        let at_end = count == 0 || !count.is_multiple_of(self.file.read_unit_bytes() as usize);
        if self.done_bytes < self.len_bytes && !at_end {
            return Step::Again;
        }
        let mut skip = self.done_bytes;
        for buffer in &mut self.buffers {
            let start = skip.min(buffer.len());
            buffer[start..].fill(0);
            skip -= start;
        }
        for buffer in &self.shared {
            let start = skip.min(buffer.len());
            buffer.zero_from(start);
            skip -= start;
        }
        Step::Finished(Ok(self.done_bytes as i64))
    }

    /// `value`, unless it claims that something is durable after a sync has failed.
    fn check_syncs(&self, value: i64) -> Result<i64, Errno> {
        match self.op.syncs() {
            true => self.file.syncs().check().map(|()| value),
            false => Ok(value),
        }
    }

    /// Remembers that a sync failed, or what may have been one.
    fn note_failure(&self, errno: Errno) -> Errno {
        let failed = match self.op {
            Op::Sync { .. } => true,
            // Around the page cache a full disk is met by the write itself, before anything is
            // synced. Through it nobody can tell which of the two has failed.
            Op::Write { durable: true, .. } => self.file.is_buffered() || !is_full(errno),
            // NFS tells a write what became of earlier ones, and a sync nothing of it then.
            Op::Write { .. } => {
                self.file.is_buffered() && is_full(errno) && sys::is_on_nfs(self.file.raw())
            }
            _ => false,
        };
        if failed {
            self.file.syncs().failed(errno);
        }
        errno
    }

    /// Tries the request once by plain system calls: blocking for files and
    /// calls, without waiting for sockets.
    pub(crate) fn attempt(&mut self) -> Result<i64, Errno> {
        let (fd, skip) = (self.file.raw(), self.done_bytes);
        match &mut self.op {
            Op::Read { offset_bytes } => {
                let at = *offset_bytes + skip as u64;
                sys::read_at(fd, &mut self.buffers, &self.shared, skip, at)
            }
            Op::Write {
                offset_bytes,
                durable,
            } => {
                let at = *offset_bytes + skip as u64;
                sys::write_at(fd, &mut self.buffers, &self.shared, skip, at, *durable)
            }
            Op::Sync { .. } => sys::sync_data(fd),
            Op::Fallocate {
                mode,
                offset_bytes,
                len_bytes,
            } => sys::fallocate(fd, *mode, *offset_bytes, *len_bytes),
            Op::Receive => match self.buffers.first_mut() {
                Some(buffer) => sys::receive(fd, buffer),
                None => Ok(0),
            },
            Op::Send => sys::send(fd, &mut self.buffers, skip),
            Op::ReceiveMessage => sys::receive_message(fd, &mut self.buffers),
            Op::SendMessage => sys::send_message(fd, &mut self.buffers),
            // There is no system call for it.
            Op::FuseEntry(_) => Err(libc::EOPNOTSUPP),
            Op::Accept => sys::accept(fd),
            Op::Poll { events } => sys::poll_once(fd, *events),
            Op::Call { work, .. } | Op::Connect { work } => {
                work.take().map_or(Ok(0), |work| work())
            }
        }
    }

    /// Runs a file request or a call to its end.
    pub(crate) fn run(mut self) -> Completion {
        loop {
            let answer = self.attempt();
            match self.advance(answer) {
                Step::Finished(result) => {
                    return Completion {
                        request: self,
                        result,
                    };
                }
                Step::Again | Step::WhenReady => {}
            }
        }
    }
}

/// Whether there is no space left, of whatever kind.
fn is_full(errno: Errno) -> bool {
    matches!(errno, libc::ENOSPC | libc::EDQUOT | libc::EFBIG)
}

impl Completion {
    /// The error that a failed request shows.
    pub fn error(&self, errno: Errno) -> Error {
        let error =
            Error::from_errno(self.request.op.name(), errno).target(self.request.file.name());
        // From then on no sync of the file succeeds: room does not help what waits for one.
        let error = match self.request.file.syncs().check().is_err() {
            true => error.of_failed_sync(),
            false => error,
        };
        match self.request.op {
            Op::Read { offset_bytes }
            | Op::Write { offset_bytes, .. }
            | Op::Fallocate { offset_bytes, .. } => error.at(offset_bytes),
            _ => error,
        }
    }

    /// The value of the request, or its error.
    ///
    /// # Errors
    /// What the system said, with the operation, the file, and the offset where there is one.
    pub fn value(&self) -> crate::Result<i64> {
        self.result.map_err(|errno| self.error(errno))
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} ({} bytes)",
            self.op.name(),
            self.file.name(),
            self.len_bytes
        )
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::Buffer;

    fn request(op: Op, len_bytes: usize, read_unit_bytes: u32) -> Request {
        let fd = std::fs::File::open("/dev/null").unwrap().into();
        let file = Arc::new(Descriptor::direct(fd, "null", read_unit_bytes));
        let mut buffer = Buffer::for_read(len_bytes);
        buffer.fill(1);
        let tail = buffer.split_to(len_bytes / 2);
        Request::new(file, op, Buffers::from_iter([tail, buffer]))
    }

    fn read(len_bytes: usize, read_unit_bytes: u32) -> Request {
        request(Op::Read { offset_bytes: 0 }, len_bytes, read_unit_bytes)
    }

    fn bytes(request: &Request) -> Vec<u8> {
        request
            .buffers
            .iter()
            .flat_map(|buffer| buffer.iter().copied())
            .collect()
    }

    #[test]
    fn a_short_read_goes_on_until_the_end_of_the_file() {
        let mut request = read(2048, 1);
        assert!(matches!(request.advance(Ok(100)), Step::Again));
        assert_eq!(request.rest_offset_bytes(0), 100);
        assert!(matches!(request.advance(Err(libc::EINTR)), Step::Again));
        assert!(matches!(request.advance(Err(libc::EAGAIN)), Step::Again));
        assert!(matches!(request.advance(Ok(1000)), Step::Again));
        assert!(matches!(request.advance(Ok(0)), Step::Finished(Ok(1100))));
        assert_eq!(bytes(&request), [[1; 1100].as_slice(), &[0; 948]].concat());
    }

    #[test]
    fn a_read_into_shared_memory_ends_in_zeroes_where_the_file_does() {
        use std::os::fd::AsFd;
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let memory = shared_memory::SharedMemory::map(file.as_fd(), 0, 4096).unwrap();
        let memory = Arc::new(memory);
        let pieces = [(0, 512), (1024, 512)].map(|(at, len)| memory.range(at, len).unwrap());
        pieces
            .iter()
            .for_each(|piece| piece.copy_from(0, &[1; 512]));
        let fd = std::fs::File::open("/dev/null").unwrap().into();
        let file = Arc::new(Descriptor::new(fd, "null"));
        let op = Op::Read { offset_bytes: 0 };
        let mut request = Request::shared(file, op, SharedBuffers::from_iter(pieces.clone()));
        assert!(matches!(request.advance(Ok(500)), Step::Again));
        let rest: Vec<usize> = request.io_vecs().iter().map(|vec| vec.iov_len).collect();
        assert_eq!(rest, [12, 512]);
        assert!(matches!(request.advance(Ok(20)), Step::Again));
        assert!(matches!(request.advance(Ok(0)), Step::Finished(Ok(520))));
        drop((request, memory));
        let mut bytes = [0; 512];
        pieces[0].copy_to(0, &mut bytes);
        assert_eq!(bytes, [1; 512]);
        pieces[1].copy_to(0, &mut bytes);
        assert_eq!(bytes[..8], [1; 8]);
        assert_eq!(bytes[8..], [0; 504]);
    }

    #[test]
    fn a_short_direct_read_that_is_not_whole_blocks_met_the_end() {
        let mut request = read(2048, 512);
        assert!(matches!(request.advance(Ok(512)), Step::Again));
        assert!(matches!(request.advance(Ok(7)), Step::Finished(Ok(519))));
        assert_eq!(bytes(&request), [[1; 519].as_slice(), &[0; 1529]].concat());
    }

    #[test]
    fn a_short_write_goes_on_and_an_empty_one_is_no_space() {
        let op = || Op::Write {
            offset_bytes: 0,
            durable: false,
        };
        let mut short = request(op(), 2048, 1);
        assert!(matches!(short.advance(Ok(2047)), Step::Again));
        assert!(matches!(short.advance(Ok(1)), Step::Finished(Ok(2048))));
        let mut full = request(op(), 2048, 1);
        assert!(matches!(
            full.advance(Ok(0)),
            Step::Finished(Err(libc::ENOSPC))
        ));
    }

    #[test]
    fn sockets_wait_where_files_try_again() {
        let mut receive = request(Op::Receive, 100, 1);
        assert!(matches!(
            receive.advance(Err(libc::EAGAIN)),
            Step::WhenReady
        ));
        assert!(matches!(receive.advance(Ok(0)), Step::Finished(Ok(0))));
    }

    #[test]
    fn a_flush_is_left_out_only_if_one_has_covered_every_change() {
        let op = || Op::Write {
            offset_bytes: 0,
            durable: true,
        };
        let mut write = request(op(), 2048, 1);
        let file = write.file.clone();
        let flush = || {
            let op = file.flush()?;
            Some(Request::new(file.clone(), op, Buffers::new()))
        };
        // Others may have left something behind.
        let mut first = flush().expect("nothing was flushed yet");
        // This one ends while the flush is under way, and may be too late for it.
        assert!(matches!(write.advance(Ok(2048)), Step::Finished(Ok(_))));
        assert_eq!(end(&mut first, Ok(0)), Ok(()));
        let mut second = flush().expect("a write is not durable");
        // A late answer of an older flush takes nothing back.
        let mut old = Request::new(file.clone(), Op::Sync { changes: 1 }, Buffers::new());
        assert!(matches!(second.advance(Ok(0)), Step::Finished(Ok(_))));
        assert_eq!(end(&mut old, Ok(0)), Ok(()));
        assert!(flush().is_some(), "the older one covers less");
        assert_eq!(end(&mut second, Ok(0)), Ok(()));
        assert!(flush().is_none());
        assert_eq!(end(&mut old, Ok(0)), Ok(()));
        assert!(flush().is_none());
        let op = Op::Write {
            offset_bytes: 0,
            durable: false,
        };
        let mut failed = Request::new(file.clone(), op, Buffers::from_iter([Buffer::zeroed(8)]));
        assert!(matches!(
            failed.advance(Err(libc::EIO)),
            Step::Finished(Err(_))
        ));
        assert!(flush().is_some(), "a part of it may have been written");
    }

    /// Gives a sync the kernel's answer, and waits until it may be believed.
    fn end(request: &mut Request, answer: Result<i64, Errno>) -> Result<(), Errno> {
        let Op::Sync { changes } = request.op else {
            panic!("not a sync");
        };
        match request.advance(answer) {
            Step::Finished(Ok(_)) => {}
            Step::Finished(Err(errno)) => return Err(errno),
            Step::Again | Step::WhenReady => panic!("a sync is not tried again"),
        }
        let accepted = request.file.accept_sync("flush", changes).now_or_never();
        let accepted = accepted.expect("nothing runs beside it");
        accepted.map_err(|error| error.errno())
    }

    #[test]
    fn after_a_failed_sync_none_succeeds_whatever_the_errno() {
        let errnos = [
            libc::EIO,
            libc::ENOSPC,
            libc::EDQUOT,
            libc::ESTALE,
            libc::EROFS,
            libc::ETIMEDOUT,
            libc::EINTR,
            libc::EAGAIN,
            libc::ECANCELED,
        ];
        let sync = || Op::Sync { changes: 1 };
        for (errno, unit) in errnos
            .into_iter()
            .flat_map(|errno| [(errno, 1), (errno, 512)])
        {
            let mut failed = request(sync(), 0, unit);
            let file = failed.file.clone();
            assert_eq!(end(&mut failed, Err(errno)), Err(errno));
            assert!(file.flush().is_some(), "nothing is durable");
            let mut next = Request::new(file.clone(), sync(), Buffers::new());
            assert_eq!(end(&mut next, Ok(0)), Err(errno));
            // The first reason is told.
            let mut next = Request::new(file.clone(), sync(), Buffers::new());
            assert_eq!(end(&mut next, Err(libc::ENODEV)), Err(libc::ENODEV));
            let mut next = Request::new(file.clone(), sync(), Buffers::new());
            assert_eq!(end(&mut next, Ok(0)), Err(errno));
            let durable = Op::Write {
                offset_bytes: 0,
                durable: true,
            };
            let mut write = Request::new(file, durable, Buffers::from_iter([Buffer::zeroed(512)]));
            assert!(matches!(
                write.advance(Ok(512)),
                Step::Finished(Err(found)) if found == errno
            ));
        }
    }

    #[test]
    fn a_durable_write_that_failed_may_have_been_a_failed_sync() {
        let durable = || Op::Write {
            offset_bytes: 0,
            durable: true,
        };
        for (errno, unit, failed) in [
            (libc::EIO, 1, true),
            (libc::EIO, 512, true),
            (libc::ENOSPC, 1, true),
            // Around the page cache the write itself has met the full disk.
            (libc::ENOSPC, 512, false),
        ] {
            let mut write = request(durable(), 1024, unit);
            assert!(matches!(
                write.advance(Err(errno)),
                Step::Finished(Err(found)) if found == errno
            ));
            let op = Op::Sync { changes: 1 };
            let mut sync = Request::new(write.file.clone(), op, Buffers::new());
            assert_eq!(end(&mut sync, Ok(0)).is_err(), failed, "{errno} {unit}");
        }
    }

    #[test]
    fn a_write_that_failed_may_be_tried_again() {
        let op = Op::Write {
            offset_bytes: 0,
            durable: false,
        };
        let mut write = request(op, 1024, 1);
        assert!(matches!(
            write.advance(Err(libc::ENOSPC)),
            Step::Finished(Err(libc::ENOSPC))
        ));
        let op = Op::Sync { changes: 1 };
        let mut sync = Request::new(write.file.clone(), op, Buffers::new());
        assert_eq!(end(&mut sync, Ok(0)), Ok(()));
    }

    #[test]
    fn of_syncs_side_by_side_none_counts_before_all_have_ended() {
        let mut good = request(Op::Sync { changes: 1 }, 0, 1);
        let file = good.file.clone();
        let sync = || Request::new(file.clone(), Op::Sync { changes: 1 }, Buffers::new());
        let mut bad = sync();
        // The kernel has told the loss to the other one, whose answer comes later.
        assert!(matches!(good.advance(Ok(0)), Step::Finished(Ok(_))));
        let mut accepted = Box::pin(file.accept_sync("flush", 1));
        assert!(accepted.as_mut().now_or_never().is_none());
        assert!(file.flush().is_some(), "it does not count yet");
        // One that begins now is not waited for.
        let later = sync();
        assert!(matches!(
            bad.advance(Err(libc::ENOSPC)),
            Step::Finished(Err(_))
        ));
        let refused = accepted.as_mut().now_or_never().expect("all have ended");
        assert_eq!(refused.unwrap_err().errno(), libc::ENOSPC);
        drop(later);
    }
}
