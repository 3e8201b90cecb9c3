//! System calls as safe functions: descriptors are borrowed, memory comes as
//! slices or [`Buffers`], failures are the bare error number.

use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

#[cfg(not(shuttle))]
use rustix::event::EventfdFlags;
#[cfg(not(shuttle))]
use rustix::io::retry_on_intr;
use rustix::net::sockopt;
use smallvec::SmallVec;

use crate::Buffers;
use crate::shared_memory::SharedBuffer;

/// A failed call's error number.
pub(crate) type Errno = i32;

/// Pieces of memory of one vectored call.
pub(crate) type IoVecs = SmallVec<[libc::iovec; 4]>;

/// The most bytes one read or write is asked to move; the kernel moves no more
/// than a little under 2 GiB.
pub(crate) const MAX_TRANSFER_BYTES: usize = 1 << 30;

/// The most pieces one vectored call takes (`IOV_MAX`).
const MAX_PIECES: usize = 1024;

/// The error number of the call that just failed.
fn errno() -> Errno {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

/// Turns a call's return value into a result.
fn check(value: i64) -> Result<i64, Errno> {
    if value < 0 { Err(errno()) } else { Ok(value) }
}

/// Runs a call until it is not interrupted by a signal.
fn retry(mut call: impl FnMut() -> i64) -> Result<i64, Errno> {
    loop {
        match check(call()) {
            Err(libc::EINTR) => {}
            result => return result,
        }
    }
}

/// The memory of `buffers`, and behind it of `shared`, from `skip_bytes` on, as far as one call
/// may take it.
pub(crate) fn io_vecs(
    buffers: &mut Buffers,
    shared: &[SharedBuffer],
    mut skip_bytes: usize,
) -> IoVecs {
    let own = buffers.iter_mut().map(|one| (one.as_mut_ptr(), one.len()));
    let pieces = own.chain(shared.iter().map(|one| (one.as_ptr(), one.len())));
    let mut vecs = IoVecs::new();
    let mut room_bytes = MAX_TRANSFER_BYTES;
    for (start, len_bytes) in pieces {
        if skip_bytes >= len_bytes {
            skip_bytes -= len_bytes;
            continue;
        }
        if room_bytes == 0 || vecs.len() == MAX_PIECES {
            break;
        }
        let skipped = std::mem::take(&mut skip_bytes);
        let len = (len_bytes - skipped).min(room_bytes);
        room_bytes -= len;
        vecs.push(libc::iovec {
            // Inside the piece, so the address does not wrap.
            iov_base: start.wrapping_add(skipped).cast(),
            iov_len: len,
        });
    }
    vecs
}

/// Reads into `buffers` and `shared` after their first `skip_bytes` bytes.
pub(crate) fn read_at(
    fd: RawFd,
    buffers: &mut Buffers,
    shared: &[SharedBuffer],
    skip_bytes: usize,
    offset_bytes: u64,
) -> Result<i64, Errno> {
    let vecs = io_vecs(buffers, shared, skip_bytes);
    // SAFETY: the vectors point into buffers borrowed exclusively for the call, and into mappings
    // that `shared` keeps, to which nobody has a reference.
    retry(|| unsafe {
        libc::preadv(fd, vecs.as_ptr(), vecs.len() as i32, offset_bytes as i64) as i64
    })
}

/// Writes `buffers` and `shared` from `skip_bytes` on; `durable` writes through to the medium.
pub(crate) fn write_at(
    fd: RawFd,
    buffers: &mut Buffers,
    shared: &[SharedBuffer],
    skip_bytes: usize,
    offset_bytes: u64,
    durable: bool,
) -> Result<i64, Errno> {
    let vecs = io_vecs(buffers, shared, skip_bytes);
    let (count, offset) = (vecs.len() as i32, offset_bytes as i64);
    // SAFETY: as in `read_at`.
    retry(|| unsafe {
        if durable {
            libc::pwritev2(fd, vecs.as_ptr(), count, offset, libc::RWF_DSYNC) as i64
        } else {
            libc::pwritev(fd, vecs.as_ptr(), count, offset) as i64
        }
    })
}

/// Makes data and the length durable. Never tried again: a failure is told only once.
pub(crate) fn sync_data(fd: RawFd) -> Result<i64, Errno> {
    // SAFETY: a call without pointers.
    check(i64::from(unsafe { libc::fdatasync(fd) }))
}

/// Whether a file lies on an NFS server.
pub(crate) fn is_on_nfs(fd: RawFd) -> bool {
    // SAFETY: all zeroes is a valid value of a structure of integers.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: it points to a live local.
    let told = unsafe { libc::fstatfs(fd, &raw mut system) };
    told == 0 && system.f_type == libc::NFS_SUPER_MAGIC
}

/// `fallocate(2)`.
pub(crate) fn fallocate(
    fd: RawFd,
    mode: i32,
    offset_bytes: u64,
    len_bytes: u64,
) -> Result<i64, Errno> {
    // SAFETY: a call without pointers.
    retry(|| i64::from(unsafe { libc::fallocate(fd, mode, offset_bytes as i64, len_bytes as i64) }))
}

/// Waits until a descriptor of `set` is ready or the time is over.
pub(crate) fn poll(set: &mut [libc::pollfd], timeout: Option<Duration>) -> Result<i64, Errno> {
    let time = timeout.map(|t| libc::timespec {
        tv_sec: t.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: i64::from(t.subsec_nanos()),
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the set and the time are live for the whole call; no signal mask.
    check(i64::from(unsafe {
        libc::ppoll(
            set.as_mut_ptr(),
            set.len() as libc::nfds_t,
            time,
            std::ptr::null(),
        )
    }))
}

/// Which of `events` a descriptor is ready for now; `EAGAIN`: none.
pub(crate) fn poll_once(fd: RawFd, events: i16) -> Result<i64, Errno> {
    let mut set = [libc::pollfd {
        fd,
        events,
        revents: 0,
    }];
    match poll(&mut set, Some(Duration::ZERO))? {
        0 => Err(libc::EAGAIN),
        _ => Ok(i64::from(set[0].revents)),
    }
}

/// Receives what is there, without waiting.
pub(crate) fn receive(fd: RawFd, buffer: &mut [u8]) -> Result<i64, Errno> {
    // SAFETY: the buffer is borrowed exclusively for the call.
    retry(|| unsafe {
        libc::recv(
            fd,
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            libc::MSG_DONTWAIT,
        ) as i64
    })
}

/// Sends `buffers` from `skip_bytes` on, as much as fits without waiting.
pub(crate) fn send(fd: RawFd, buffers: &mut Buffers, skip_bytes: usize) -> Result<i64, Errno> {
    let mut vecs = io_vecs(buffers, &[], skip_bytes);
    let header = message_header(&mut vecs);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the header points to `vecs`, and that into borrowed buffers.
    retry(|| unsafe { libc::sendmsg(fd, &raw const header, flags) as i64 })
}

/// Reads one message of a device that hands them out whole; without waiting if the descriptor
/// is non-blocking.
pub(crate) fn receive_message(fd: RawFd, buffers: &mut Buffers) -> Result<i64, Errno> {
    let vecs = io_vecs(buffers, &[], 0);
    // SAFETY: the vectors point into buffers borrowed exclusively for the call.
    retry(|| unsafe { libc::readv(fd, vecs.as_ptr(), vecs.len() as i32) as i64 })
}

/// Writes `buffers` as one message.
pub(crate) fn send_message(fd: RawFd, buffers: &mut Buffers) -> Result<i64, Errno> {
    let vecs = io_vecs(buffers, &[], 0);
    // SAFETY: the vectors point into buffers borrowed exclusively for the call.
    retry(|| unsafe { libc::writev(fd, vecs.as_ptr(), vecs.len() as i32) as i64 })
}

/// The header of a message made of `vecs`; valid as long as they stay in place.
pub(crate) fn message_header(vecs: &mut IoVecs) -> libc::msghdr {
    // SAFETY: `msghdr` is plain old data, for which zero bytes are a value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = vecs.as_mut_ptr();
    header.msg_iovlen = vecs.len() as _;
    header
}

/// Accepts a connection; waits only if the listener is in blocking mode.
pub(crate) fn accept(fd: RawFd) -> Result<i64, Errno> {
    // SAFETY: no address is asked for, so there are no pointers.
    retry(|| unsafe {
        let none = std::ptr::null_mut();
        i64::from(libc::accept4(
            fd,
            none,
            std::ptr::null_mut(),
            libc::SOCK_CLOEXEC,
        ))
    })
}

/// Takes ownership of a descriptor that a call just returned.
pub(crate) fn own(fd: RawFd) -> OwnedFd {
    debug_assert!(fd >= 0);
    // SAFETY: the kernel just made this descriptor for us; nobody else has it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Sets `O_NONBLOCK`.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::io::ioctl_fionbio(fd, true).map_err(rustix::io::Errno::raw_os_error)
}

/// Has small packets sent at once on TCP; sockets that are not TCP refuse.
pub(crate) fn set_no_delay(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(fd, true).map_err(rustix::io::Errno::raw_os_error)
}

/// `shutdown(2)`.
pub(crate) fn shutdown(fd: BorrowedFd<'_>, how: Shutdown) -> Result<(), Errno> {
    let how = match how {
        Shutdown::Read => rustix::net::Shutdown::Read,
        Shutdown::Write => rustix::net::Shutdown::Write,
        Shutdown::Both => rustix::net::Shutdown::Both,
    };
    rustix::net::shutdown(fd, how).map_err(rustix::io::Errno::raw_os_error)
}

/// Gives up every lock of an open file description.
pub(crate) fn unlock(fd: RawFd) {
    // SAFETY: `flock` is plain old data, for which zero bytes are a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_type = libc::F_UNLCK as i16;
    // A length of 0 reaches to the end of any file. What has no locks may refuse.
    // SAFETY: `lock` is a live local for the whole call.
    let _ = retry(|| i64::from(unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw mut lock) }));
}

/// Unmaps the pages of a range of addresses; what is used again is read from its file.
/// Refused, nothing happens.
///
/// # Safety
/// The range is a private mapping of a file, and stays one; nobody can write to it, and
/// all its pages are the file's.
pub(crate) unsafe fn discard_pages(range: Range<usize>) {
    let start = range.start as *mut libc::c_void;
    // SAFETY: by the contract the kernel drops only what it reads from the file again, so
    // no byte that anybody can see changes.
    unsafe { libc::madvise(start, range.len(), libc::MADV_DONTNEED) };
}

#[cfg(shuttle)]
pub(crate) use crate::sync::EventFd;

/// A counter that wakes whoever reads or polls it.
#[cfg(not(shuttle))]
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

#[cfg(not(shuttle))]
impl std::os::fd::AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(not(shuttle))]
impl EventFd {
    /// A new counter at zero.
    pub(crate) fn new() -> Result<Self, Errno> {
        let counter = rustix::event::eventfd(0, EventfdFlags::CLOEXEC);
        counter
            .map(EventFd)
            .map_err(rustix::io::Errno::raw_os_error)
    }

    /// The raw descriptor.
    pub(crate) fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Adds one.
    pub(crate) fn signal(&self) {
        // A failure would mean 2^64 - 1 unread signals, in which case the reader wakes anyway.
        let _ = retry_on_intr(|| rustix::io::write(&self.0, &1_u64.to_ne_bytes()));
    }

    /// Takes the count; call it only when the counter is known to be readable.
    pub(crate) fn drain(&self) {
        let mut count = [0; 8];
        let _ = retry_on_intr(|| rustix::io::read(&self.0, &mut count));
    }
}
