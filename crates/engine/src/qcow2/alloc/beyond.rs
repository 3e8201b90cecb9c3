//! [`Beyond`]: the host clusters beyond the end of the file that entries lead to, as far as they
//! are known (see [`beyond_end`](crate::qcow2::integrity::beyond_end)).

use crate::qcow2::alloc::free_index::FreeIndex;
use crate::qcow2::integrity::errors::corrupt;
use std::ops::Range;
use vellum_io::Result;

/// Extents of such clusters that are known, at most.
const MOST_EXTENTS: usize = 4096;

/// Host clusters beyond the end of the file that entries lead to.
#[derive(Debug)]
pub(crate) struct Beyond {
    pub(crate) extents: FreeIndex,
    /// From this cluster on not all of them are known.
    unknown_from: u64,
}

impl Default for Beyond {
    fn default() -> Self {
        Beyond {
            extents: FreeIndex::new(MOST_EXTENTS),
            unknown_from: u64::MAX,
        }
    }
}

impl Beyond {
    pub(crate) fn note(&mut self, clusters: Range<u64>) {
        if let Some(forgotten) = self.extents.insert(clusters) {
            self.unknown_from = self.unknown_from.min(forgotten.start);
        }
    }

    /// The first of these clusters that entries lead to.
    ///
    /// # Errors
    /// If that is not known.
    pub(crate) fn first_in(&self, clusters: &Range<u64>) -> Result<Option<Range<u64>>> {
        if clusters.end > self.unknown_from {
            return Err(corrupt(
                "allocate",
                "too many entries lead beyond the end of the file",
            ));
        }
        Ok(self.extents.first_in(clusters))
    }
}
