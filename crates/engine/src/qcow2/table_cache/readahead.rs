//! Reading ahead of scans: a miss that follows on an earlier one also loads the
//! slices behind it.
//!
//! Detection costs nothing on hits and a few comparisons on misses. Random reads
//! are taken for a scan once in (slices of the image / [`STREAMS`]) misses, and
//! then read two slices instead of one.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Scans that are told apart at the same time.
const STREAMS: usize = 4;
/// Slices that one miss loads at most.
const MAX_WINDOW: u64 = 16;
const WINDOW_BITS: u32 = 8;

/// Where the latest scans stand, in numbers of slices of the guest's device.
#[derive(Debug, Default)]
pub(crate) struct Readahead {
    /// The first slice behind a stream's window, and the window's length below it;
    /// 0: no stream. Each is one word, so that no lock is needed: what a race
    /// loses is speed.
    ends: [AtomicU64; STREAMS],
    next_victim: AtomicUsize,
}

impl Readahead {
    /// How many slices to load after a miss of slice `slice`, `most` at most.
    pub(crate) fn window(&self, slice: u64, most: u64) -> u64 {
        for stream in &self.ends {
            let packed = stream.load(Ordering::Relaxed);
            let (end, window) = (packed >> WINDOW_BITS, packed & ((1 << WINDOW_BITS) - 1));
            if window == 0 || slice > end || slice + window < end {
                continue;
            }
            if slice < end {
                // Another request of the same scan is loading it.
                return 1;
            }
            let window = (2 * window).min(MAX_WINDOW).min(most).max(1);
            stream.store((slice + window) << WINDOW_BITS | window, Ordering::Relaxed);
            return window;
        }
        let victim = self.next_victim.fetch_add(1, Ordering::Relaxed) % STREAMS;
        self.ends[victim].store((slice + 1) << WINDOW_BITS | 1, Ordering::Relaxed);
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scan_reads_ahead_further_and_further() {
        let streams = Readahead::default();
        assert_eq!(streams.window(10, 16), 1);
        assert_eq!(streams.window(11, 16), 2);
        assert_eq!(streams.window(12, 16), 1, "is being loaded");
        assert_eq!(streams.window(13, 16), 4);
        assert_eq!(streams.window(17, 16), 8);
        assert_eq!(streams.window(25, 16), 16);
        assert_eq!(streams.window(41, 16), 16);
    }

    #[test]
    fn a_small_cache_is_filled_again_where_it_ended() {
        let streams = Readahead::default();
        let mut slice = 0;
        let windows = std::array::from_fn(|_| {
            let window = streams.window(slice, 8);
            slice += window;
            window
        });
        assert_eq!(windows, [1, 2, 4, 8, 8, 8]);
        assert_eq!(streams.window(slice, 0), 1);
    }

    #[test]
    fn scans_are_told_apart_and_from_random_reads() {
        let streams = Readahead::default();
        for slice in (0..1000).step_by(7) {
            assert_eq!(streams.window(slice, 16), 1);
        }
        for (a, b) in [(100, 500), (101, 501), (103, 503)] {
            let windows = (streams.window(a, 16), streams.window(b, 16));
            assert_eq!(windows.0, windows.1);
            assert!(a == 100 || windows.0 > 1);
        }
    }
}
