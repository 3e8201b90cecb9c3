//! [`Ring`]: where in the log the next batch goes.
//!
//! Batches follow each other; one that does not fit before the end goes to the ring's start.
//! A reader looks for the next batch where the last one ended, and then at the start.
//!
//! Invariant: a place that is handed out holds no live record.

use vellum_format::write_log::RING_START_BYTES;

/// A moment in the life of a ring: everything appended before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark {
    /// Where the next batch would begin.
    pub(super) offset_bytes: u64,
    /// Bytes appended, and left out at the end, since the ring was made.
    total_bytes: u64,
}

impl Mark {
    /// Whether everything before this moment is before `other` as well.
    pub(super) fn is_before(self, other: Mark) -> bool {
        self.total_bytes <= other.total_bytes
    }
}

/// See the module's head. In bytes of the log's file.
#[derive(Debug)]
pub(super) struct Ring {
    end_bytes: u64,
    head: Mark,
    tail: Mark,
}

impl Ring {
    /// An empty ring in a log of `len_bytes`.
    pub(super) fn new(len_bytes: u64) -> Ring {
        let start = Mark {
            offset_bytes: RING_START_BYTES,
            total_bytes: 0,
        };
        Ring {
            end_bytes: len_bytes,
            head: start,
            tail: start,
        }
    }

    /// Bytes that all batches may take together.
    pub(super) fn capacity_bytes(&self) -> u64 {
        self.end_bytes - RING_START_BYTES
    }

    /// Bytes that must not be overwritten.
    pub(super) fn live_bytes(&self) -> u64 {
        self.head.total_bytes - self.tail.total_bytes
    }

    /// Where all begins that is appended from now on.
    pub(super) fn mark(&self) -> Mark {
        self.head
    }

    /// The place of a batch of `len_bytes`, which is not taken yet; `None`: there is no room.
    pub(super) fn place(&self, len_bytes: u64) -> Option<u64> {
        let free_bytes = self.capacity_bytes() - self.live_bytes();
        let to_end = self.end_bytes - self.head.offset_bytes;
        if len_bytes <= to_end {
            return (len_bytes <= free_bytes).then_some(self.head.offset_bytes);
        }
        (to_end + len_bytes <= free_bytes).then_some(RING_START_BYTES)
    }

    /// Takes a place that [`Ring::place`] has found.
    pub(super) fn take(&mut self, at_bytes: u64, len_bytes: u64) {
        if at_bytes != self.head.offset_bytes {
            self.head.total_bytes += self.end_bytes - self.head.offset_bytes;
        }
        self.head.total_bytes += len_bytes;
        self.head.offset_bytes = at_bytes + len_bytes;
    }

    /// Whether nothing before `mark` is live.
    pub(super) fn is_released(&self, mark: Mark) -> bool {
        mark.is_before(self.tail)
    }

    /// Nothing before `mark` is live any more.
    pub(super) fn release(&mut self, mark: Mark) {
        if !self.is_released(mark) {
            self.tail = mark;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 4096;

    fn append(ring: &mut Ring, blocks: u64) -> Option<u64> {
        let at = ring.place(blocks * BLOCK)?;
        ring.take(at, blocks * BLOCK);
        Some((at - RING_START_BYTES) / BLOCK)
    }

    #[test]
    fn batches_follow_each_other_and_go_on_at_the_start() {
        let mut ring = Ring::new(RING_START_BYTES + 10 * BLOCK);
        assert_eq!(append(&mut ring, 4), Some(0));
        let first = ring.mark();
        assert_eq!(append(&mut ring, 4), Some(4));
        assert_eq!(
            append(&mut ring, 3),
            None,
            "neither at the end nor at the start"
        );
        ring.release(first);
        assert_eq!(append(&mut ring, 3), Some(0));
        assert_eq!(ring.live_bytes(), 9 * BLOCK, "two blocks were left out");
        assert_eq!(append(&mut ring, 2), None);
        assert_eq!(append(&mut ring, 1), Some(3));
        assert_eq!(append(&mut ring, 1), None, "the ring is full");
    }

    #[test]
    fn a_full_ring_is_not_an_empty_one() {
        let mut ring = Ring::new(RING_START_BYTES + 10 * BLOCK);
        assert_eq!(append(&mut ring, 10), Some(0));
        assert_eq!(append(&mut ring, 1), None);
        let all = ring.mark();
        ring.release(all);
        assert!(ring.is_released(all));
        assert_eq!(append(&mut ring, 10), Some(0));
    }

    #[test]
    fn no_place_is_live() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut ring = Ring::new(RING_START_BYTES + 50 * BLOCK);
        let mut live: std::collections::VecDeque<(u64, u64, Mark)> = Default::default();
        for _ in 0..10_000 {
            let blocks = random.u64(1..20);
            match append(&mut ring, blocks) {
                Some(at) => {
                    let overlaps =
                        |(from, to, _): &(u64, u64, Mark)| *from < at + blocks && at < *to;
                    assert!(!live.iter().any(overlaps));
                    assert!(at + blocks <= 50);
                    live.push_back((at, at + blocks, ring.mark()));
                }
                None => {
                    let (.., mark) = live.pop_front().expect("an empty ring has room");
                    ring.release(mark);
                }
            }
        }
    }
}
