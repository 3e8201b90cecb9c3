//! Memory that others change at any time: a guest, or the kernel.
//!
//! A [`SharedMemory`] is a mapped piece of a file that somebody else has mapped too, or memory
//! that the kernel was told of. A [`SharedBuffer`] is a range of one and keeps it mapped.
//!
//! Invariants:
//! - Nothing here gives out a reference to such memory: bytes are copied in and out, and one, two
//!   or eight at a time are read or written as one. Whoever looks at bytes twice looks at a copy.
//! - A range lies inside its mapping, which stays until the last range of it is gone: so does the
//!   memory of a request that the kernel reads from or writes to ([`crate::lane::Request::shared`]).
//!
//! A [`SharedBuffer`] is no [`crate::Buffer`]: whoever has one cannot look at its bytes without a
//! copy, so what decrypts, decompresses, compares or sums up is never handed bytes that change.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use smallvec::SmallVec;

use crate::{Error, ErrorKind, Result};

/// Mappings begin at a multiple of this in their file.
const PAGE_BYTES: u64 = 4096;

/// A piece of a file in memory, shared with whoever maps it too. Clones are the same mapping.
///
/// Whoever can shorten the file can end this process: bytes that are gone cannot be touched
/// (`SIGBUS`). A memfd that is sealed against that is safe, and so is every guest: only the
/// process that made the file has it.
#[derive(Clone)]
pub struct SharedMemory(Arc<Mapping>);

/// What is mapped. It begins at the page that holds the first byte.
struct Mapping {
    start: NonNull<u8>,
    mapped_bytes: usize,
    /// Bytes of the first page that were not asked for.
    skipped_bytes: usize,
}

// SAFETY: plain memory of the kernel's; what touches it does so with atomic operations or
// copies, from any thread.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and no range of it is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}

impl SharedMemory {
    /// Maps `len_bytes` bytes of `file` from `offset_bytes` on, for reading and writing.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if the file does not have so many bytes; what the system
    /// says if it cannot be mapped.
    pub fn map(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: u64) -> Result<Self> {
        const OPERATION: &str = "map memory";
        let failed = |errno: rustix::io::Errno| Error::from_errno(OPERATION, errno.raw_os_error());
        let found = rustix::fs::fstat(file.as_fd()).map_err(failed)?;
        let end = offset_bytes.checked_add(len_bytes);
        let file_bytes = u64::try_from(found.st_size).unwrap_or(0);
        let skipped = offset_bytes % PAGE_BYTES;
        let mapped = usize::try_from(len_bytes.saturating_add(skipped));
        let (true, Ok(mapped_bytes)) = (
            len_bytes > 0 && end.is_some_and(|end| end <= file_bytes),
            mapped,
        ) else {
            let message = format!(
                "{len_bytes} bytes from {offset_bytes} on are not in the file, which has {file_bytes}"
            );
            return Err(Error::new(ErrorKind::InvalidArgument, OPERATION, message));
        };
        // SAFETY: a new mapping at a place of the kernel's choice harms nothing.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                offset_bytes - skipped,
            )
        };
        let start = NonNull::new(start.map_err(failed)?.cast());
        let start = start.ok_or_else(|| Error::from_errno(OPERATION, libc::ENOMEM))?;
        Ok(SharedMemory(Arc::new(Mapping {
            start,
            mapped_bytes,
            skipped_bytes: skipped as usize,
        })))
    }

    /// `len_bytes` bytes that no other process has, each page of which takes memory only once it
    /// is touched: for the kernel, which changes them at any time.
    ///
    /// # Errors
    /// What the system says if there is no room for them.
    pub fn anonymous(len_bytes: u64) -> Result<Self> {
        const OPERATION: &str = "map memory";
        let failed = |errno: rustix::io::Errno| Error::from_errno(OPERATION, errno.raw_os_error());
        let none = || Error::from_errno(OPERATION, libc::ENOMEM);
        let mapped_bytes = usize::try_from(len_bytes).map_err(|_| none())?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at a place of the kernel's choice harms nothing.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), mapped_bytes, protection, flags) };
        let start = NonNull::new(start.map_err(failed)?.cast()).ok_or_else(none)?;
        let mapping = Mapping {
            start,
            mapped_bytes,
            skipped_bytes: 0,
        };
        // Huge pages would take memory that is never touched. A kernel without them refuses.
        // SAFETY: it changes nothing but how pages come to the mapping, which is nobody else's.
        let _ = unsafe { madvise(start.as_ptr().cast(), mapped_bytes, Advice::LinuxNoHugepage) };
        Ok(SharedMemory(Arc::new(mapping)))
    }

    /// How many bytes were asked for.
    pub fn len(&self) -> usize {
        self.0.mapped_bytes - self.0.skipped_bytes
    }

    /// Never: a mapping has bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `len_bytes` bytes from `offset_bytes` on; `None` if they are not all there. The counter
    /// that keeps the mapping is `self`'s: lanes that have one each share none.
    pub fn range(self: &Arc<Self>, offset_bytes: u64, len_bytes: u64) -> Option<SharedBuffer> {
        let end = offset_bytes.checked_add(len_bytes)?;
        if end > self.len() as u64 {
            return None;
        }
        // SAFETY: not beyond the end of the mapping, by the check above.
        let start = unsafe {
            let skipped = self.0.skipped_bytes;
            self.0.start.add(skipped + offset_bytes as usize)
        };
        Some(SharedBuffer {
            memory: self.clone(),
            start,
            len_bytes: len_bytes as usize,
        })
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedMemory({} bytes)", self.len())
    }
}

/// Ranges of shared memory, in order.
pub type SharedBuffers = SmallVec<[SharedBuffer; 1]>;

/// How many bytes the ranges have in all.
pub fn total_len(buffers: &[SharedBuffer]) -> usize {
    buffers.iter().map(SharedBuffer::len).sum()
}

/// A range of shared memory, which it keeps mapped. Clones are the same bytes.
#[derive(Clone)]
pub struct SharedBuffer {
    memory: Arc<SharedMemory>,
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: as `Mapping`, which it keeps.
unsafe impl Send for SharedBuffer {}
// SAFETY: as above.
unsafe impl Sync for SharedBuffer {}

impl SharedBuffer {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len_bytes
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// The address of the first byte: to be told apart by alignment, and for the kernel.
    pub fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// Splits off and returns the first `at_bytes` bytes; `self` keeps the rest.
    ///
    /// # Panics
    /// If `at_bytes` is beyond the end.
    #[must_use]
    pub fn split_to(&mut self, at_bytes: usize) -> SharedBuffer {
        self.check(0, at_bytes);
        let head = SharedBuffer {
            memory: self.memory.clone(),
            start: self.start,
            len_bytes: at_bytes,
        };
        // SAFETY: not beyond the end, by the check above.
        self.start = unsafe { self.start.add(at_bytes) };
        self.len_bytes -= at_bytes;
        head
    }

    /// `len_bytes` bytes from `at_bytes` on.
    ///
    /// # Panics
    /// If they are not all there.
    #[must_use]
    pub fn piece(&self, at_bytes: usize, len_bytes: usize) -> SharedBuffer {
        self.check(at_bytes, len_bytes);
        SharedBuffer {
            memory: self.memory.clone(),
            // SAFETY: not beyond the end, by the check above.
            start: unsafe { self.start.add(at_bytes) },
            len_bytes,
        }
    }

    /// Copies as many bytes as `bytes` has, from `at_bytes` on, out of the memory.
    ///
    /// # Panics
    /// If they are not all there.
    pub fn copy_to(&self, at_bytes: usize, bytes: &mut [u8]) {
        self.check(at_bytes, bytes.len());
        // SAFETY: inside the mapping, by the check above. Others may write there meanwhile:
        // then the copy holds some of their bytes, each old or new, and every byte is a value.
        unsafe {
            let from = self.start.as_ptr().add(at_bytes);
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
        }
    }

    /// Copies `bytes` into the memory from `at_bytes` on.
    ///
    /// # Panics
    /// If there is no room for all of them.
    pub fn copy_from(&self, at_bytes: usize, bytes: &[u8]) {
        self.check(at_bytes, bytes.len());
        // SAFETY: inside the mapping, by the check above, to which nobody has a reference.
        unsafe {
            let to = self.start.as_ptr().add(at_bytes);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// Makes all bytes from `at_bytes` on zeroes.
    ///
    /// # Panics
    /// If `at_bytes` is beyond the end.
    pub fn zero_from(&self, at_bytes: usize) {
        self.check(at_bytes, 0);
        let len_bytes = self.len_bytes - at_bytes;
        // SAFETY: inside the mapping, by the check above, to which nobody has a reference.
        unsafe {
            let to = self.start.as_ptr().add(at_bytes);
            std::ptr::write_bytes(to, 0, len_bytes);
        }
    }

    /// The first byte, for the kernel.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Reads the two bytes at `at_bytes` as one number, least significant byte first.
    ///
    /// # Panics
    /// If they are not there, or do not begin at an even address.
    pub fn load_u16(&self, at_bytes: usize, order: Ordering) -> u16 {
        u16::from_le(self.atomic(at_bytes).load(order))
    }

    /// Writes the two bytes at `at_bytes` as one number, least significant byte first.
    ///
    /// # Panics
    /// As [`SharedBuffer::load_u16`].
    pub fn store_u16(&self, at_bytes: usize, value: u16, order: Ordering) {
        self.atomic(at_bytes).store(value.to_le(), order);
    }

    /// As [`SharedBuffer::load_u16`], of eight bytes.
    ///
    /// # Panics
    /// If they are not there, or do not begin at a multiple of eight.
    pub fn load_u64(&self, at_bytes: usize, order: Ordering) -> u64 {
        u64::from_le(self.atomic_u64(at_bytes).load(order))
    }

    /// As [`SharedBuffer::store_u16`], of eight bytes.
    ///
    /// # Panics
    /// As [`SharedBuffer::load_u64`].
    pub fn store_u64(&self, at_bytes: usize, value: u64, order: Ordering) {
        self.atomic_u64(at_bytes).store(value.to_le(), order);
    }

    /// Sets bits of the byte at `at_bytes`, whoever sets others of them meanwhile.
    ///
    /// # Panics
    /// If it is not there.
    pub fn set_bits(&self, at_bytes: usize, bits: u8, order: Ordering) {
        self.check(at_bytes, 1);
        // SAFETY: inside the mapping, by the check above.
        let place = unsafe { self.start.as_ptr().add(at_bytes) };
        // SAFETY: as in `atomic`.
        let byte = unsafe { AtomicU8::from_ptr(place) };
        byte.fetch_or(bits, order);
    }

    fn atomic_u64(&self, at_bytes: usize) -> &AtomicU64 {
        self.check(at_bytes, 8);
        // SAFETY: inside the mapping, by the check above; aligned, by the one below.
        let place = unsafe { self.start.as_ptr().add(at_bytes) };
        assert!((place as usize).is_multiple_of(8), "not aligned");
        // SAFETY: as in `atomic`.
        unsafe { AtomicU64::from_ptr(place.cast()) }
    }

    fn atomic(&self, at_bytes: usize) -> &AtomicU16 {
        self.check(at_bytes, 2);
        // SAFETY: inside the mapping, by the check above; aligned, by the one below.
        let place = unsafe { self.start.as_ptr().add(at_bytes) };
        assert!((place as usize).is_multiple_of(2), "an odd address");
        // SAFETY: valid as long as `self` keeps the mapping. That others in other processes
        // write there is what an atomic is for; in this one nothing else refers to it.
        unsafe { AtomicU16::from_ptr(place.cast()) }
    }

    fn check(&self, at_bytes: usize, len_bytes: usize) {
        let end = at_bytes.checked_add(len_bytes);
        assert!(
            end.is_some_and(|end| end <= self.len_bytes),
            "{len_bytes} bytes at {at_bytes} of {}",
            self.len_bytes
        );
    }
}

impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBuffer({} bytes)", self.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    fn file_of(len_bytes: u64) -> std::fs::File {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(len_bytes).expect("a length");
        file
    }

    #[test]
    fn what_is_written_is_seen_by_others_and_the_other_way_round() {
        let mut file = file_of(3 * 4096);
        let memory = SharedMemory::map(file.as_fd(), 4096 + 16, 4096).expect("a mapping");
        let range = Arc::new(memory).range(8, 100).expect("a range");
        range.copy_from(0, b"hello");
        range.store_u16(6, 0x1234, Ordering::Release);
        file.seek(std::io::SeekFrom::Start(4096 + 24))
            .expect("sought");
        let mut bytes = [0; 8];
        file.read_exact(&mut bytes).expect("read");
        assert_eq!(&bytes, b"hello\0\x34\x12");
        file.write_all(b"back").expect("written");
        let mut back = [0; 4];
        range.copy_to(8, &mut back);
        assert_eq!(&back, b"back");
        assert_eq!(range.load_u16(6, Ordering::Acquire), 0x1234);
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let file = file_of(8192);
        for (offset, len) in [(0, 8193), (8192, 1), (0, 0), (u64::MAX, 2), (1, u64::MAX)] {
            let refused = SharedMemory::map(file.as_fd(), offset, len);
            assert_eq!(
                refused.expect_err("refused").kind(),
                ErrorKind::InvalidArgument
            );
        }
        let memory = Arc::new(SharedMemory::map(file.as_fd(), 1, 8191).expect("a mapping"));
        assert!(memory.range(0, 8191).is_some());
        assert!(memory.range(8191, 0).is_some());
        for (offset, len) in [(0, 8192), (8191, 1), (u64::MAX, 1), (1, u64::MAX)] {
            assert!(memory.range(offset, len).is_none(), "{offset} {len}");
        }
    }

    #[test]
    fn a_range_keeps_the_mapping() {
        let memory = SharedMemory::map(file_of(4096).as_fd(), 0, 4096).expect("a mapping");
        let mut rest = Arc::new(memory).range(0, 4096).expect("a range");
        let head = rest.split_to(96);
        drop(rest);
        head.copy_from(0, &[7; 96]);
        let mut bytes = [0; 96];
        head.copy_to(0, &mut bytes);
        assert_eq!((bytes, head.len()), ([7; 96], 96));
    }
}
