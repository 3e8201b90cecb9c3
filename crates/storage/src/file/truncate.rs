//! Another length for a file.
//!
//! Invariant: with direct I/O no write behind the end of a file is in flight while that is made longer. XFS zeroes what lies
//! behind the old end then, and with it what such writes have written: they are accounted for only once they are complete.

use std::sync::Arc;

use vellum_io::lane::{self, finish_unit};
use vellum_io::{Io, Result};

use super::File;
use super::held_locks::ResizeGuard;
use crate::sys;

/// The page in which a file ends may change with its length.
const PAGE_BYTES: u64 = 64 << 10;

impl File {
    /// Gives a regular file another length; `resizing` is held until that is done.
    pub(super) fn truncate(
        self: &Arc<Self>,
        len_bytes: u64,
        resizing: Option<ResizeGuard>,
    ) -> Io<()> {
        self.extents.forget();
        let file = self.clone();
        match self.alignment.request_bytes {
            1 => file.call_truncate(len_bytes, resizing),
            _ => lane::task(async move { file.truncate_alone(len_bytes, resizing).await }),
        }
    }

    async fn truncate_alone(&self, len_bytes: u64, resizing: Option<ResizeGuard>) -> Result<()> {
        let first = self.len_bytes()?.min(len_bytes) / PAGE_BYTES * PAGE_BYTES;
        let _alone = self.ranges.lock_exclusive(first..u64::MAX).await;
        self.call_truncate(len_bytes, resizing).await
    }

    fn call_truncate(&self, len_bytes: u64, resizing: Option<ResizeGuard>) -> Io<()> {
        let fd = self.descriptor.clone();
        let work = move || {
            let truncated = sys::truncate(&*fd, len_bytes).map(|()| 0);
            drop(resizing);
            truncated
        };
        lane::call(&self.descriptor, "truncate", work, finish_unit)
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::lane::{block_on, yield_now};
    use vellum_io::spawn;

    use crate::Storage;
    use crate::file::{Create, FileOptions, FileStorage};

    /// In the build folder: a temporary one may be in memory, which has no direct I/O.
    fn direct_file(name: &str) -> std::sync::Arc<FileStorage> {
        let path = std::env::current_exe()
            .expect("a path")
            .with_extension(name);
        let options = FileOptions::default().create(Create::Truncate).direct(true);
        let file = FileStorage::open(&path, &options).expect("direct I/O");
        std::fs::remove_file(path).expect("it was made");
        file
    }

    #[test]
    fn a_file_is_made_longer_between_direct_writes() {
        block_on(async {
            let file = direct_file("longer");
            let writing = file.file.ranges.try_lock_shared().expect("nobody else");
            let grown = spawn(file.truncate(1 << 20));
            for _ in 0..100 {
                yield_now().await;
            }
            assert_eq!(file.len_bytes().expect("a length"), 0);
            assert!(
                file.file.ranges.try_lock_shared().is_none(),
                "no write begins"
            );
            drop(writing);
            grown.await.expect("room");
            assert_eq!(file.len_bytes().expect("a length"), 1 << 20);
        });
    }
}
