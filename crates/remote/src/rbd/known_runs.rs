//! Which parts of an image have data, as the cluster has told it last. Plain state, no I/O.

use std::ops::Range;

use vellum_storage::{BlockStatus, StorageExtent};

/// What is known of one window of the image.
#[derive(Debug, Default)]
pub(super) struct KnownRuns {
    window: Range<u64>,
    /// Those with data, in order.
    runs: Vec<Range<u64>>,
    /// The count of changes for which it holds.
    changes: u64,
}

impl KnownRuns {
    pub(super) fn new(window: Range<u64>, runs: Vec<Range<u64>>, changes: u64) -> Self {
        KnownRuns {
            window,
            runs,
            changes,
        }
    }

    /// The run at the begin of a range, if it is known and nothing has changed since.
    pub(super) fn find(&self, range: &Range<u64>, changes: u64) -> Option<StorageExtent> {
        if changes != self.changes || !self.window.contains(&range.start) {
            return None;
        }
        let next = self.runs.partition_point(|run| run.end <= range.start);
        let (status, end) = match self.runs.get(next) {
            Some(run) if run.start <= range.start => (BlockStatus::Data, run.end),
            Some(run) => (BlockStatus::Hole, run.start),
            None => (BlockStatus::Hole, self.window.end),
        };
        let end = end.min(self.window.end).min(range.end);
        Some(StorageExtent {
            status,
            len_bytes: end - range.start,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_while_nothing_has_changed() {
        let known = KnownRuns::new(8..100, vec![8..16, 20..200], 3);
        let find = |range| {
            let found = known.find(&range, 3);
            found.map(|extent| (extent.status, extent.len_bytes))
        };
        assert_eq!(find(8..50), Some((BlockStatus::Data, 8)));
        assert_eq!(find(16..50), Some((BlockStatus::Hole, 4)));
        assert_eq!(find(17..18), Some((BlockStatus::Hole, 1)));
        assert_eq!(find(30..40), Some((BlockStatus::Data, 10)));
        assert_eq!(find(30..400), Some((BlockStatus::Data, 70)));
        assert_eq!(find(0..50), None);
        assert_eq!(find(100..101), None);
        assert!(known.find(&(8..50), 4).is_none());
        let empty = KnownRuns::new(0..100, Vec::new(), 3);
        let hole = empty.find(&(5..1000), 3).map(|extent| extent.len_bytes);
        assert_eq!(hole, Some(95));
    }
}
