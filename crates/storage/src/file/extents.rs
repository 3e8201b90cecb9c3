//! Which ranges of a file hold data, from `SEEK_DATA` and `SEEK_HOLE`.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::File;
use crate::sys;
use crate::{BlockStatus, Result, StorageExtent};

/// The last range that was found to hold data: walking a file in small steps
/// then asks the kernel once per range.
///
/// Invariant: what this process turned into a hole is not in here. (A hole that
/// another process makes is found late; taking it for data is always right.)
#[derive(Debug, Default)]
pub(super) struct DataCache(Mutex<Option<Range<u64>>>);

impl DataCache {
    fn lock(&self) -> MutexGuard<'_, Option<Range<u64>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called before anything makes holes, and again after it.
    pub(super) fn forget(&self) {
        *self.lock() = None;
    }

    fn end_of_data(&self, offset_bytes: u64) -> Option<u64> {
        let known = self.lock();
        known
            .as_ref()
            .filter(|range| range.contains(&offset_bytes))
            .map(|range| range.end)
    }

    fn learn(&self, range: Range<u64>) {
        *self.lock() = Some(range);
    }
}

impl File {
    /// The first run of one status.
    pub(super) fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Result<StorageExtent> {
        let extent = |status, end: u64| StorageExtent {
            status,
            len_bytes: (end - offset_bytes).min(len_bytes),
        };
        if let Some(end) = self.extents.end_of_data(offset_bytes) {
            return Ok(extent(BlockStatus::Data, end));
        }
        let fd = self.descriptor.raw();
        let all = offset_bytes + len_bytes;
        Ok(match sys::seek(fd, offset_bytes, libc::SEEK_DATA) {
            Ok(data) if data > offset_bytes => extent(BlockStatus::Hole, data),
            Ok(_) => match sys::seek(fd, offset_bytes, libc::SEEK_HOLE) {
                Ok(hole) if hole > offset_bytes => {
                    self.extents.learn(offset_bytes..hole);
                    extent(BlockStatus::Data, hole)
                }
                // The data went away between the calls, or there is no answer.
                _ => extent(BlockStatus::Data, all),
            },
            // No data from here on, or beyond the end.
            Err(libc::ENXIO) => extent(BlockStatus::Hole, all),
            Err(_) => extent(BlockStatus::Data, all),
        })
    }
}
