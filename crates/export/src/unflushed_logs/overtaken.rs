//! What other exports change of a disk before its guest has handed over the log of the server before.
//!
//! The log holds older writes: written again later, they would undo what is newer. So the ranges are noted from
//! the start of the export on, and the guest's writes are only written again outside of them.
//!
//! Invariant: a range is noted before its change begins, and no write from a log is in flight meanwhile.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_lock::{Mutex, MutexGuard};

/// Ranges that are noted at most: 64 bytes each. What is changed beyond them may be undone.
const MOST_RANGES: usize = 1 << 20;

/// Ranges of a disk that were changed before a guest came back to it.
#[derive(Debug)]
pub(crate) struct Overtaken {
    /// Starts and ends, apart from each other.
    ranges: Mutex<BTreeMap<u64, u64>>,
    is_over: AtomicBool,
    awaited: Arc<AtomicUsize>,
}

impl Overtaken {
    /// Begins to note ranges; `awaited` is how many do.
    pub(super) fn new(awaited: Arc<AtomicUsize>) -> Overtaken {
        awaited.fetch_add(1, Ordering::SeqCst);
        Overtaken {
            ranges: Mutex::default(),
            is_over: AtomicBool::new(false),
            awaited,
        }
    }

    /// Notes a change that is about to begin.
    pub(super) async fn add(&self, offset_bytes: u64, len_bytes: u64) {
        if self.is_over.load(Ordering::SeqCst) {
            return;
        }
        let mut ranges = self.ranges.lock().await;
        if ranges.len() < MOST_RANGES {
            join(
                &mut ranges,
                offset_bytes,
                offset_bytes.saturating_add(len_bytes),
            );
        }
    }

    /// Holds changes up, for a write from the log.
    pub(crate) async fn stop_changes(&self) -> StoppedChanges<'_> {
        StoppedChanges(self.ranges.lock().await)
    }

    /// For a log that no guest has to hand over.
    pub(crate) fn over() -> Overtaken {
        let overtaken = Overtaken::new(Arc::default());
        overtaken.end();
        overtaken
    }

    /// Drops the ranges: the guest is there, with its log or without one.
    pub(crate) fn end(&self) {
        if self.count_down()
            && let Some(mut ranges) = self.ranges.try_lock()
        {
            ranges.clear();
        }
    }

    fn count_down(&self) -> bool {
        let ends = !self.is_over.swap(true, Ordering::SeqCst);
        if ends {
            self.awaited.fetch_sub(1, Ordering::SeqCst);
        }
        ends
    }
}

impl Drop for Overtaken {
    fn drop(&mut self) {
        self.count_down();
    }
}

/// While it lives, no change begins.
pub(crate) struct StoppedChanges<'a>(MutexGuard<'a, BTreeMap<u64, u64>>);

impl StoppedChanges<'_> {
    /// The parts of a range that nothing has changed.
    pub(crate) fn parts_left(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut left = Vec::new();
        // The log of a guest may say so, and maps refuse a range that ends before its start.
        if range.is_empty() {
            return left;
        }
        let mut at = range.start;
        let before = self.0.range(..=range.start).next_back();
        let after = self.0.range(range.start.saturating_add(1)..range.end);
        for (&start, &end) in before.into_iter().chain(after) {
            if start > at {
                left.push(at..start);
            }
            at = at.max(end);
        }
        if at < range.end {
            left.push(at..range.end);
        }
        left
    }
}

/// Adds a range, and makes one of all that it touches.
fn join(ranges: &mut BTreeMap<u64, u64>, mut start: u64, mut end: u64) {
    while let Some((&at, &until)) = ranges.range(..=end).next_back()
        && until >= start
    {
        ranges.remove(&at);
        (start, end) = (start.min(at), end.max(until));
    }
    ranges.insert(start, end);
}

#[cfg(test)]
mod tests {
    use vellum_io::lane::block_on;

    use super::*;

    #[test]
    fn parts_are_what_a_plain_list_of_bytes_says() {
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..300 {
            let overtaken = Overtaken::new(Arc::default());
            let mut changed = [false; 64];
            for _ in 0..random.usize(0..12) {
                let start = random.usize(..64);
                let len = random.usize(1..=64 - start);
                block_on(overtaken.add(start as u64, len as u64));
                changed[start..start + len].fill(true);
            }
            let start = random.u64(..64);
            let end = random.u64(start..=64);
            let parts = block_on(overtaken.stop_changes()).parts_left(start..end);
            let is_left = |byte: u64| parts.iter().any(|part| part.contains(&byte));
            for byte in 0..64 {
                let expected = (start..end).contains(&byte) && !changed[byte as usize];
                assert_eq!(
                    is_left(byte),
                    expected,
                    "{byte} of {start}..{end}: {parts:?}"
                );
            }
        }
    }

    #[test]
    fn nothing_is_noted_once_the_guest_is_there() {
        let awaited = Arc::<AtomicUsize>::default();
        let overtaken = Overtaken::new(awaited.clone());
        block_on(async {
            overtaken.add(0, 512).await;
            overtaken.end();
            overtaken.add(0, 512).await;
            let left = overtaken.stop_changes().await.parts_left(0..512);
            assert_eq!(left, [0..512]);
        });
        drop(overtaken);
        assert_eq!(awaited.load(Ordering::SeqCst), 0);
    }
}
