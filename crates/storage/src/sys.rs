//! System calls on files as safe functions: descriptors are borrowed, failures are the
//! bare error number.

use std::ffi::CStr;
use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// A failed call's error number.
pub(crate) type Errno = i32;

/// The most bytes one copy is asked to move.
const MAX_COPY_BYTES: usize = 1 << 30;

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

/// Reads the first bytes of a file.
pub(crate) fn read_first(fd: RawFd, buffer: &mut [u8]) -> Result<i64, Errno> {
    // SAFETY: the buffer is borrowed exclusively for the call.
    retry(|| unsafe { libc::pread(fd, buffer.as_mut_ptr().cast(), buffer.len(), 0) as i64 })
}

/// The memory of the machine; 0 if that is not to be found out.
pub(crate) fn memory_bytes() -> u64 {
    // SAFETY: a call without pointers.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    u64::try_from(pages).unwrap_or(0) * page_bytes()
}

fn page_bytes() -> u64 {
    // SAFETY: a call without pointers.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

/// How much of a range is in the page cache (`cachestat(2)`, Linux 6.5).
pub(crate) fn cached_bytes(fd: RawFd, range: Range<u64>) -> Result<u64, Errno> {
    /// The number on every architecture: system calls since Linux 5.1 have one.
    const SYS_CACHESTAT: libc::c_long = 451;
    let asked = [range.start, range.end - range.start];
    // Pages in the cache, dirty, being written, evicted, and recently so.
    let mut counts = [0_u64; 5];
    // SAFETY: both point to live locals of the sizes that the call knows.
    check(unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            fd,
            asked.as_ptr(),
            counts.as_mut_ptr(),
            0_u32,
        )
    })?;
    Ok(counts[0] * page_bytes())
}

/// Takes what is clean of a range out of the page cache.
pub(crate) fn drop_cached(fd: RawFd, range: Range<u64>) -> Result<i64, Errno> {
    let (offset, len) = (range.start as i64, (range.end - range.start) as i64);
    // SAFETY: a call without pointers.
    match unsafe { libc::posix_fadvise(fd, offset, len, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(0),
        errno => Err(errno),
    }
}

/// `ftruncate(2)`.
pub(crate) fn truncate(fd: RawFd, len_bytes: u64) -> Result<i64, Errno> {
    // SAFETY: a call without pointers.
    retry(|| i64::from(unsafe { libc::ftruncate(fd, len_bytes as i64) }))
}

/// What `FICLONERANGE` takes.
#[repr(C)]
struct CloneRange {
    source_fd: i64,
    source_offset_bytes: u64,
    len_bytes: u64,
    target_offset_bytes: u64,
}

/// Has a range of the file `to` share the blocks of one of the file `from`.
pub(crate) fn clone_range(
    from: RawFd,
    from_bytes: u64,
    to: RawFd,
    to_bytes: u64,
    len_bytes: u64,
) -> Result<i64, Errno> {
    /// `_IOW(0x94, 13, struct file_clone_range)`
    const FICLONERANGE: libc::Ioctl = 0x4020_940d;
    let range = CloneRange {
        source_fd: i64::from(from),
        source_offset_bytes: from_bytes,
        len_bytes,
        target_offset_bytes: to_bytes,
    };
    // SAFETY: the request reads one such struct, which is live for the whole call.
    retry(|| i64::from(unsafe { libc::ioctl(to, FICLONERANGE, &raw const range) }))
}

/// Copies a range of a file to another, or to elsewhere in it; returns the bytes copied.
pub(crate) fn copy_file_range(
    source_fd: RawFd,
    from_bytes: u64,
    fd: RawFd,
    to_bytes: u64,
    len_bytes: u64,
) -> Result<i64, Errno> {
    let (mut from, mut to) = (from_bytes as i64, to_bytes as i64);
    let len = (len_bytes as usize).min(MAX_COPY_BYTES);
    // SAFETY: both offsets are live locals for the whole call.
    retry(|| unsafe { libc::copy_file_range(source_fd, &mut from, fd, &mut to, len, 0) as i64 })
}

/// `lseek(2)`; used with `SEEK_DATA`, `SEEK_HOLE` and `SEEK_END` only, as nothing
/// here depends on a descriptor's position.
pub(crate) fn seek(fd: RawFd, offset_bytes: u64, whence: i32) -> Result<u64, Errno> {
    // SAFETY: a call without pointers.
    retry(|| unsafe { libc::lseek(fd, offset_bytes as i64, whence) }).map(|at| at as u64)
}

/// What `fstat(2)` says.
pub(crate) fn stat(fd: RawFd) -> Result<libc::stat, Errno> {
    // SAFETY: `stat` is plain old data, for which zero bytes are a value.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is a live local for the whole call.
    retry(|| i64::from(unsafe { libc::fstat(fd, &mut stat) }))?;
    Ok(stat)
}

/// Opens a file; one that is made may be read by all and written by its owner,
/// less the process's mask.
pub(crate) fn open(path: &CStr, flags: i32) -> Result<OwnedFd, Errno> {
    // SAFETY: the path is a live C string.
    let fd = retry(|| i64::from(unsafe { libc::open(path.as_ptr(), flags, 0o644) }))?;
    Ok(own(fd as RawFd))
}

/// The alignment that direct I/O wants of memory and of offsets, if the kernel
/// tells (Linux 6.1).
pub(crate) fn direct_alignment(fd: RawFd) -> Option<(u32, u32)> {
    // SAFETY: `statx` is plain old data, for which zero bytes are a value.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    let (flags, mask) = (libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN);
    // SAFETY: an empty C string and a live local.
    retry(|| i64::from(unsafe { libc::statx(fd, c"".as_ptr(), flags, mask, &mut stat) })).ok()?;
    let told = stat.stx_mask & mask != 0 && stat.stx_dio_offset_align != 0;
    told.then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align))
}

/// An `ioctl(2)` that fills one `u64`.
pub(crate) fn ioctl_get_u64(fd: RawFd, request: libc::Ioctl) -> Result<u64, Errno> {
    let mut value = 0_u64;
    // SAFETY: the requests used here (`BLKGETSIZE64`) write one u64.
    retry(|| i64::from(unsafe { libc::ioctl(fd, request, &raw mut value) }))?;
    Ok(value)
}

/// An `ioctl(2)` that fills one `i32`.
pub(crate) fn ioctl_get_i32(fd: RawFd, request: libc::Ioctl) -> Result<i32, Errno> {
    let mut value = 0_i32;
    // SAFETY: the requests used here (`BLKSSZGET`) write one int.
    retry(|| i64::from(unsafe { libc::ioctl(fd, request, &raw mut value) }))?;
    Ok(value)
}

/// An `ioctl(2)` that takes a byte range (`BLKDISCARD`, `BLKZEROOUT`).
pub(crate) fn ioctl_range(
    fd: RawFd,
    request: libc::Ioctl,
    offset_bytes: u64,
    len_bytes: u64,
) -> Result<i64, Errno> {
    let range = [offset_bytes, len_bytes];
    // SAFETY: the requests used here read two u64 from the live array.
    retry(|| i64::from(unsafe { libc::ioctl(fd, request, range.as_ptr()) }))
}

/// Takes ownership of a descriptor that a call just returned.
pub(crate) fn own(fd: RawFd) -> OwnedFd {
    debug_assert!(fd >= 0);
    // SAFETY: the kernel just made this descriptor for us; nobody else has it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// What to do with a byte range's lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LockAction {
    /// Take it shared with other readers of the range.
    Share,
    /// Give it up.
    Release,
    /// Ask whether taking it exclusively would conflict.
    TestExclusive,
}

/// An open-file-description lock on one byte. `Err(EAGAIN)` means a conflict.
pub(crate) fn lock_byte(fd: RawFd, at_bytes: u64, action: LockAction) -> Result<(), Errno> {
    // SAFETY: `flock` is plain old data, for which zero bytes are a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = at_bytes as i64;
    lock.l_len = 1;
    let (kind, command) = match action {
        LockAction::Share => (libc::F_RDLCK, libc::F_OFD_SETLK),
        LockAction::Release => (libc::F_UNLCK, libc::F_OFD_SETLK),
        LockAction::TestExclusive => (libc::F_WRLCK, libc::F_OFD_GETLK),
    };
    lock.l_type = kind as i16;
    // SAFETY: `lock` is a live local for the whole call.
    retry(|| i64::from(unsafe { libc::fcntl(fd, command, &raw mut lock) }))?;
    let free = i32::from(lock.l_type) == libc::F_UNLCK;
    if action == LockAction::TestExclusive && !free {
        Err(libc::EAGAIN)
    } else {
        Ok(())
    }
}
