//! [`LiveChunks`]: of which parts of the disk there are live records.
//!
//! A write that is already in the place that the mapping on disk leads to need not be appended: a
//! barrier makes it durable. Unless a live record overlaps it: that would come back over it.

use std::collections::HashMap;
use std::ops::Range;

use super::ring::Mark;

/// Finer than this nobody asks.
const MIN_CHUNK_BYTES: u64 = 64 << 10;

/// See the module's head.
#[derive(Debug)]
pub(super) struct LiveChunks {
    chunk_bytes: u64,
    /// Where in the ring the last record ends that speaks of a chunk.
    last: HashMap<u64, Mark>,
}

impl LiveChunks {
    /// No record is live of a disk with clusters of `cluster_bytes`.
    pub(super) fn new(cluster_bytes: u64) -> LiveChunks {
        LiveChunks {
            // Records of one cluster tell of its mapping, so a chunk is a cluster at least.
            chunk_bytes: cluster_bytes.max(MIN_CHUNK_BYTES),
            last: HashMap::new(),
        }
    }

    fn chunks_of(&self, guest: &Range<u64>) -> Range<u64> {
        guest.start / self.chunk_bytes..guest.end.div_ceil(self.chunk_bytes)
    }

    /// A record of a guest range in bytes is appended, which ends before `end`.
    pub(super) fn note(&mut self, guest: &Range<u64>, end: Mark) {
        for chunk in self.chunks_of(guest) {
            self.last.insert(chunk, end);
        }
    }

    /// Whether a record may be live that overlaps a guest range.
    pub(super) fn touches(&self, guest: &Range<u64>) -> bool {
        self.chunks_of(guest)
            .any(|chunk| self.last.contains_key(&chunk))
    }

    /// Nothing before `mark` is live any more.
    pub(super) fn release(&mut self, mark: Mark) {
        self.last.retain(|_, end| !end.is_before(mark));
        if self.last.is_empty() {
            // After a burst its memory goes as well.
            self.last = HashMap::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ring::Ring;
    use super::*;

    #[test]
    fn chunks_are_live_until_their_last_record_is_released() {
        let mut ring = Ring::new(1 << 20);
        let mut append = || {
            let at = ring.place(4096).expect("room");
            ring.take(at, 4096);
            ring.mark()
        };
        let mut live = LiveChunks::new(512);
        let chunk = MIN_CHUNK_BYTES;
        let first = append();
        live.note(&(chunk - 512..chunk + 512), first);
        let second = append();
        live.note(&(chunk..chunk + 512), second);
        assert!(live.touches(&(0..1)) && live.touches(&(2 * chunk - 1..2 * chunk)));
        assert!(!live.touches(&(2 * chunk..3 * chunk)));
        live.release(first);
        assert!(!live.touches(&(0..chunk)) && live.touches(&(chunk..chunk + 1)));
        live.release(second);
        assert!(!live.touches(&(0..4 * chunk)));
    }

    #[test]
    fn a_chunk_has_whole_clusters() {
        let mut live = LiveChunks::new(2 << 20);
        let mut ring = Ring::new(1 << 20);
        ring.take(8192, 4096);
        live.note(&(0..512), ring.mark());
        assert!(live.touches(&((2 << 20) - 512..2 << 20)));
        assert!(!live.touches(&(2 << 20..3 << 20)));
    }
}
