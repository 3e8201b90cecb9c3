//! System calls on files as safe functions: descriptors are borrowed, failures are the
//! bare error number. Calls that rustix has come from there; those here with `unsafe` it lacks:
//! `cachestat`, the requests to block devices and file systems, and locks of open file
//! descriptions.

use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use rustix::fs::{Advice, AtFlags, Mode, OFlags, SeekFrom, Stat, StatxFlags};
use rustix::io::retry_on_intr;

/// A failed call's error number.
pub(crate) type Errno = i32;

/// The most bytes one copy is asked to move.
const MAX_COPY_BYTES: usize = 1 << 30;

/// The error number of the call of libc that just failed.
fn errno() -> Errno {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

/// Turns the return value of a call of libc into a result.
fn check(value: i64) -> Result<i64, Errno> {
    if value < 0 { Err(errno()) } else { Ok(value) }
}

/// Runs a call of libc until it is not interrupted by a signal.
fn retry(mut call: impl FnMut() -> i64) -> Result<i64, Errno> {
    loop {
        match check(call()) {
            Err(libc::EINTR) => {}
            result => return result,
        }
    }
}

/// Runs a call of rustix until it is not interrupted by a signal.
fn retried<T>(call: impl FnMut() -> rustix::io::Result<T>) -> Result<T, Errno> {
    retry_on_intr(call).map_err(rustix::io::Errno::raw_os_error)
}

/// Reads the first bytes of a file.
pub(crate) fn read_first(fd: impl AsFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    retried(|| rustix::io::pread(&fd, &mut *buffer, 0))
}

/// The memory of the machine.
pub(crate) fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit)
}

/// How much the file system of a file can take; -1 where it has no bound, or does not say.
pub(crate) fn free_bytes(fd: impl AsFd) -> Result<i64, Errno> {
    let counts = retried(|| rustix::fs::fstatvfs(&fd))?;
    if counts.f_blocks == 0 {
        return Ok(-1);
    }
    let free = counts.f_bavail.saturating_mul(counts.f_frsize);
    Ok(i64::try_from(free).unwrap_or(i64::MAX))
}

fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// How much of a range is in the page cache (`cachestat(2)`, Linux 6.5).
pub(crate) fn cached_bytes(fd: impl AsFd, range: Range<u64>) -> Result<u64, Errno> {
    /// The number on every architecture: system calls since Linux 5.1 have one.
    const SYS_CACHESTAT: libc::c_long = 451;
    let asked = [range.start, range.end - range.start];
    // Pages in the cache, dirty, being written, evicted, and recently so.
    let mut counts = [0_u64; 5];
    // SAFETY: both point to live locals of the sizes that the call knows.
    check(unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            fd.as_fd().as_raw_fd(),
            asked.as_ptr(),
            counts.as_mut_ptr(),
            0_u32,
        )
    })?;
    Ok(counts[0] * page_bytes())
}

/// Takes what is clean of a range out of the page cache.
pub(crate) fn drop_cached(fd: impl AsFd, range: Range<u64>) -> Result<(), Errno> {
    let len_bytes = NonZeroU64::new(range.end - range.start);
    rustix::fs::fadvise(fd, range.start, len_bytes, Advice::DontNeed)
        .map_err(rustix::io::Errno::raw_os_error)
}

/// `ftruncate(2)`.
pub(crate) fn truncate(fd: impl AsFd, len_bytes: u64) -> Result<(), Errno> {
    retried(|| rustix::fs::ftruncate(&fd, len_bytes))
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
    from: impl AsFd,
    from_bytes: u64,
    to: impl AsFd,
    to_bytes: u64,
    len_bytes: u64,
) -> Result<i64, Errno> {
    /// `_IOW(0x94, 13, struct file_clone_range)`
    const FICLONERANGE: libc::Ioctl = 0x4020_940d;
    let range = CloneRange {
        source_fd: i64::from(from.as_fd().as_raw_fd()),
        source_offset_bytes: from_bytes,
        len_bytes,
        target_offset_bytes: to_bytes,
    };
    let to = to.as_fd().as_raw_fd();
    // SAFETY: the request reads one such struct, which is live for the whole call.
    retry(|| i64::from(unsafe { libc::ioctl(to, FICLONERANGE, &raw const range) }))
}

/// Copies a range of a file to another, or to elsewhere in it; returns the bytes copied.
pub(crate) fn copy_file_range(
    source: impl AsFd,
    from_bytes: u64,
    target: impl AsFd,
    to_bytes: u64,
    len_bytes: u64,
) -> Result<u64, Errno> {
    let (mut from, mut to) = (from_bytes, to_bytes);
    let len = (len_bytes as usize).min(MAX_COPY_BYTES);
    let copied = retried(|| {
        rustix::fs::copy_file_range(&source, Some(&mut from), &target, Some(&mut to), len)
    });
    copied.map(|count| count as u64)
}

/// `lseek(2)`; not used with `SEEK_SET` and `SEEK_CUR`, as nothing here depends on a
/// descriptor's position.
pub(crate) fn seek(fd: impl AsFd, to: SeekFrom) -> Result<u64, Errno> {
    retried(|| rustix::fs::seek(&fd, to))
}

/// What `fstat(2)` says.
pub(crate) fn stat(fd: impl AsFd) -> Result<Stat, Errno> {
    retried(|| rustix::fs::fstat(&fd))
}

/// Opens a file; one that is made may be read by all and written by its owner,
/// less the process's mask.
pub(crate) fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
    retried(|| rustix::fs::open(path, flags, mode))
}

/// The alignment that direct I/O wants of memory and of offsets, if the kernel
/// tells (Linux 6.1).
pub(crate) fn direct_alignment(fd: impl AsFd) -> Option<(u32, u32)> {
    let mask = StatxFlags::DIOALIGN;
    let stat = retried(|| rustix::fs::statx(&fd, c"", AtFlags::EMPTY_PATH, mask)).ok()?;
    let known = stat.stx_mask & mask.bits() != 0 && stat.stx_dio_offset_align != 0;
    known.then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align))
}

/// The logical block size of a block device.
pub(crate) fn logical_block_bytes(fd: impl AsFd) -> Result<u32, Errno> {
    retried(|| rustix::fs::ioctl_blksszget(&fd))
}

/// An `ioctl(2)` that fills one `u64`, or the first bytes of one.
pub(crate) fn ioctl_get_u64(fd: impl AsFd, request: libc::Ioctl) -> Result<u64, Errno> {
    let fd = fd.as_fd().as_raw_fd();
    let mut value = 0_u64;
    // SAFETY: the requests used here write one u64 (`BLKGETSIZE64`) or one int (`BLKROGET`).
    retry(|| i64::from(unsafe { libc::ioctl(fd, request, &raw mut value) }))?;
    Ok(value)
}

/// An `ioctl(2)` that takes a byte range (`BLKDISCARD`, `BLKZEROOUT`).
pub(crate) fn ioctl_range(
    fd: impl AsFd,
    request: libc::Ioctl,
    offset_bytes: u64,
    len_bytes: u64,
) -> Result<i64, Errno> {
    let fd = fd.as_fd().as_raw_fd();
    let range = [offset_bytes, len_bytes];
    // SAFETY: the requests used here read two u64 from the live array.
    retry(|| i64::from(unsafe { libc::ioctl(fd, request, range.as_ptr()) }))
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

/// What is to become of the lock on a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RangeLock {
    /// Nobody else has it.
    Exclusive,
    /// Others may share it.
    Shared,
    /// It is given up.
    None,
}

/// An open-file-description lock on a range. `Err(EAGAIN)` or `Err(EACCES)` means a conflict.
pub(crate) fn lock_range(fd: RawFd, range: &Range<u64>, kind: RangeLock) -> Result<(), Errno> {
    // SAFETY: `flock` is plain old data, for which zero bytes are a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = range.start as i64;
    lock.l_len = (range.end - range.start) as i64;
    lock.l_type = match kind {
        RangeLock::Exclusive => libc::F_WRLCK,
        RangeLock::Shared => libc::F_RDLCK,
        RangeLock::None => libc::F_UNLCK,
    } as i16;
    // SAFETY: `lock` is a live local for the whole call.
    retry(|| i64::from(unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw mut lock) }))?;
    Ok(())
}
