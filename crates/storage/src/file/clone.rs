//! Copies that the kernel makes: shared blocks where the file system has them
//! (`FICLONERANGE`), and `copy_file_range`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::File;
use crate::sys;
use vellum_io::Result;
use vellum_io::lane::{self, finish_unit};

/// Why the kernel does not copy between two files.
const CANNOT_COPY: [i32; 5] = [
    libc::EXDEV,
    libc::EINVAL,
    libc::ENOSYS,
    libc::EOPNOTSUPP,
    libc::EPERM,
];

impl File {
    /// Whether cloning from `source` into this file has not failed for good yet;
    /// `None`: there is no need to try.
    pub(super) fn clone_support(&self, source: &File) -> Option<&AtomicBool> {
        if self.device.is_some() || source.device.is_some() {
            return None;
        }
        Some(match Arc::ptr_eq(&self.descriptor, &source.descriptor) {
            true => &self.supports.clone_inside,
            false => &self.supports.clone_across,
        })
    }

    /// Has a range share the blocks of one of `source`.
    pub(super) async fn clone_range(
        &self,
        source: &File,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Result<()> {
        // A length of 0 would mean "up to the end".
        let supported = self.clone_support(source).filter(|_| len_bytes > 0);
        let Some(supported) = supported.filter(|flag| flag.load(Ordering::Relaxed)) else {
            return Err(self.cannot("clone range"));
        };
        let _held = self
            .ranges
            .lock_for_write(self.alignment, to_bytes, len_bytes)
            .await;
        let (from, to) = (source.descriptor.clone(), self.descriptor.clone());
        let work = move || sys::clone_range(&*from, from_bytes, &*to, to_bytes, len_bytes);
        let result = lane::call(&self.descriptor, "clone range", work, finish_unit).await;
        self.extents.forget();
        let Err(error) = result else { return Ok(()) };
        match error.errno() {
            // This file system, or these two.
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY | libc::EXDEV => {
                supported.store(false, Ordering::Relaxed);
                Err(self.cannot("clone range"))
            }
            // Ranges that are not made of whole blocks, or beyond the source's end.
            libc::EINVAL => Err(self.cannot("clone range")),
            _ => Err(error),
        }
    }

    /// Copies a range of `source`. Around the page cache that is no gain: the kernel
    /// would copy through it.
    pub(super) async fn copy_range(
        &self,
        source: &File,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Result<()> {
        if self.alignment.request_bytes > 1 {
            return Err(self.cannot("copy range"));
        }
        let (from, fd) = (source.descriptor.clone(), self.descriptor.clone());
        let work = move || {
            let mut done = 0;
            while done < len_bytes {
                let rest = len_bytes - done;
                let at = (from_bytes + done, to_bytes + done);
                match sys::copy_file_range(&*from, at.0, &*fd, at.1, rest)? {
                    // The source ended early: the caller must copy zeroes.
                    0 => return Err(libc::EOPNOTSUPP),
                    count => done += count,
                }
            }
            Ok(0)
        };
        self.extents.forget();
        let result = lane::call(&self.descriptor, "copy range", work, finish_unit).await;
        match result {
            // These two files, or this kernel, copy only through memory.
            Err(error) if CANNOT_COPY.contains(&error.errno()) => Err(self.cannot("copy range")),
            result => result,
        }
    }
}
