//! The memory of a guest, which the server maps too.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use anyhow::Result;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vhost::VhostUserMemoryRegionInfo;

/// Memory; places in it are told in bytes from its start, which is also how the guest sees it.
#[derive(Debug)]
pub struct Memory {
    file: File,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping stays where it is until this is dropped, and is used by atomics alone.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// So many bytes of zeroes.
    pub fn new(len: usize) -> Result<Self> {
        let file = memfd_create("torture", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, len as u64)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let place = std::ptr::null_mut();
        // SAFETY: the kernel chooses a place where nothing is.
        let start = unsafe { mmap(place, len, access, MapFlags::SHARED, &file, 0) }?;
        let start = NonNull::new(start.cast()).expect("no mapping begins at zero");
        Ok(Memory {
            file: file.into(),
            start,
            len,
        })
    }

    fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: so long is the mapping, all of it may be read and written, and nobody in this
        // process has another reference.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.len) }
    }

    fn number(&self, at: usize) -> &AtomicU16 {
        assert!(at.is_multiple_of(2) && at + 2 <= self.len);
        // SAFETY: it lies in the mapping, which begins with a page, and is aligned.
        unsafe { &*self.start.as_ptr().add(at).cast() }
    }

    /// Writes bytes.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        for (own, byte) in self.bytes()[at..].iter().zip(bytes) {
            own.store(*byte, Ordering::Relaxed);
        }
    }

    /// Reads bytes.
    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let own = self.bytes()[at..at + len].iter();
        own.map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    /// Writes a number after everything that was written before.
    pub fn store(&self, at: usize, number: u16) {
        self.number(at).store(number.to_le(), Ordering::SeqCst);
    }

    /// Reads a number before everything that is read after.
    pub fn load(&self, at: usize) -> u16 {
        u16::from_le(self.number(at).load(Ordering::SeqCst))
    }

    /// As the client sees it.
    pub fn address(&self, at: usize) -> u64 {
        (self.start.as_ptr().addr() + at) as u64
    }

    /// What a server is told of it.
    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: self.len as u64,
            userspace_addr: self.address(0),
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: all references to it are gone.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        unmapped.expect("it is mapped");
    }
}
