//! Which ranges of a file hold data, from `SEEK_DATA` and `SEEK_HOLE`.
//!
//! Invariant: a hole is remembered only while the file's locks keep writers away.

use std::ops::Range;

use parking_lot::{Mutex, MutexGuard};
use rustix::fs::SeekFrom;

use super::File;
use crate::sys;
use crate::{BlockStatus, StorageExtent};
use vellum_io::Result;

/// The last range that was found to hold data, and the last hole: walking a file in
/// small steps, or its parts in any order, then asks the kernel once per range.
///
/// Invariants:
/// - What this process turned into a hole is not among the data. (A hole that another
///   process makes is found late; taking it for data is always right.)
/// - A hole is remembered only while nobody can write to it: the file is open for
///   reading, and its locks keep writers away.
#[derive(Debug, Default)]
pub(super) struct ExtentCache(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    data: Option<Range<u64>>,
    hole: Option<Range<u64>>,
    keeps_holes: bool,
}

impl ExtentCache {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock()
    }

    /// Called before anything makes holes, and again after it.
    pub(super) fn forget(&self) {
        self.lock().data = None;
    }

    /// Called with every change of the locks: whether these keep holes what they are.
    pub(super) fn keep_holes(&self, keep: bool) {
        let mut known = self.lock();
        known.hole = None;
        known.keeps_holes = keep;
    }

    /// What is known of a place: its status, and where that ends.
    fn find(&self, offset_bytes: u64) -> Option<(BlockStatus, u64)> {
        let known = self.lock();
        let end = |range: &Option<Range<u64>>| {
            let range = range.as_ref().filter(|range| range.contains(&offset_bytes));
            range.map(|range| range.end)
        };
        let data = end(&known.data).map(|end| (BlockStatus::Data, end));
        data.or_else(|| end(&known.hole).map(|end| (BlockStatus::Hole, end)))
    }

    fn learn(&self, status: BlockStatus, range: Range<u64>) {
        let mut known = self.lock();
        match status {
            BlockStatus::Data => known.data = Some(range),
            BlockStatus::Hole if known.keeps_holes => known.hole = Some(range),
            _ => {}
        }
    }
}

impl File {
    /// The first run of one status.
    pub(super) fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Result<StorageExtent> {
        let (status, end) = match self.extents.find(offset_bytes) {
            Some(known) => known,
            None => self.seek_status(offset_bytes, len_bytes),
        };
        Ok(StorageExtent {
            status,
            len_bytes: (end - offset_bytes).min(len_bytes),
        })
    }

    /// Asks the kernel for the status of a place, and where that ends.
    fn seek_status(&self, offset_bytes: u64, len_bytes: u64) -> (BlockStatus, u64) {
        let fd = &*self.descriptor;
        let all = offset_bytes + len_bytes;
        let found = |status, end| {
            self.extents.learn(status, offset_bytes..end);
            (status, end)
        };
        match sys::seek(fd, SeekFrom::Data(offset_bytes)) {
            Ok(data) if data > offset_bytes => found(BlockStatus::Hole, data),
            Ok(_) => match sys::seek(fd, SeekFrom::Hole(offset_bytes)) {
                Ok(hole) if hole > offset_bytes => found(BlockStatus::Data, hole),
                // The data went away between the calls, or there is no answer.
                _ => (BlockStatus::Data, all),
            },
            // No data from here on, or beyond the end.
            Err(libc::ENXIO) => found(BlockStatus::Hole, u64::MAX),
            Err(_) => (BlockStatus::Data, all),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::{PermissionSet, Permissions};
    use crate::{FileOptions, FileStorage, Locks, Storage};
    use vellum_io::lane::block_on;

    #[test]
    fn holes_are_remembered_only_while_the_locks_keep_writers_away() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sparse");
        let content = std::fs::File::create(&path).unwrap();
        content.set_len(1 << 20).unwrap();
        let options = FileOptions {
            read_only: true,
            locks: Locks::Unlocked,
            ..FileOptions::default()
        };
        let file = FileStorage::open(&path, &options).unwrap();
        let status = || block_on(file.block_status(65536, 4096)).unwrap().status;
        let write = |byte: u8| {
            use std::os::unix::fs::FileExt;
            content.write_all_at(&[byte; 4096], 65536).unwrap();
        };
        let empty = || {
            content.set_len(0).unwrap();
            content.set_len(1 << 20).unwrap();
        };
        assert_eq!(status(), BlockStatus::Hole);
        write(1);
        assert_eq!(status(), BlockStatus::Data, "nobody said that holes stay");
        file.file.extents.forget();
        empty();
        file.set_permissions(Permissions::READER).unwrap();
        assert_eq!(status(), BlockStatus::Hole);
        write(2);
        assert_eq!(status(), BlockStatus::Hole, "who ignores locks is not seen");
        let lax = Permissions {
            shared: Permissions::READER.shared.with(PermissionSet::WRITE),
            ..Permissions::READER
        };
        file.set_permissions(lax).unwrap();
        assert_eq!(status(), BlockStatus::Data);
    }
}
