//! Requests that are not aligned as direct I/O wants them: they go through an
//! aligned copy, and a write that ends inside a block first reads the rest of it.
//!
//! Invariant: of two such writes that share a block, the second reads it only
//! after the first has written it ([`RangeLocks`]). Aligned writes need no lock:
//! what shares a block with one of them overlaps it, and the caller keeps
//! overlapping requests apart.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use event_listener::Event;

use crate::buffer::total_len;
use crate::{Buffer, Buffers};

/// What direct I/O on a file wants; all 1 for buffered I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// Of offsets and lengths, in bytes; a power of two.
    pub(crate) request_bytes: u32,
    /// Of memory, in bytes; a power of two.
    pub(crate) memory_bytes: u32,
}

impl Alignment {
    /// No wishes.
    pub(crate) const NONE: Alignment = Alignment {
        request_bytes: 1,
        memory_bytes: 1,
    };

    /// Whether a range may go to the kernel as it is.
    pub(crate) fn fits_range(self, offset_bytes: u64, len_bytes: u64) -> bool {
        (offset_bytes | len_bytes) & u64::from(self.request_bytes - 1) == 0
    }

    /// Whether a request may go to the kernel as it is.
    pub(crate) fn fits(self, offset_bytes: u64, buffers: &[Buffer]) -> bool {
        if self == Self::NONE {
            return true;
        }
        let memory_mask = self.memory_bytes as usize - 1;
        self.fits_range(offset_bytes, 0)
            && buffers.iter().all(|buffer| {
                self.fits_range(0, buffer.len() as u64)
                    && buffer.as_ptr() as usize & memory_mask == 0
            })
    }

    /// The smallest aligned range around a range.
    pub(crate) fn around(self, offset_bytes: u64, len_bytes: u64) -> Range<u64> {
        let unit = u64::from(self.request_bytes);
        let end = offset_bytes + len_bytes;
        offset_bytes & !(unit - 1)..end.next_multiple_of(unit)
    }

    /// The largest aligned range inside a range; it may be empty.
    pub(crate) fn inside(self, offset_bytes: u64, len_bytes: u64) -> Range<u64> {
        let unit = u64::from(self.request_bytes);
        let end = (offset_bytes + len_bytes) & !(unit - 1);
        let start = offset_bytes.next_multiple_of(unit);
        start..end.max(start)
    }
}

/// Copies `source` from `skip_bytes` on into `buffers`.
pub(crate) fn scatter(source: &[u8], buffers: &mut Buffers) {
    let mut at = 0;
    for buffer in buffers {
        let end = at + buffer.len();
        buffer.copy_from_slice(&source[at..end]);
        at = end;
    }
}

/// Copies all of `buffers` into `target`.
pub(crate) fn gather(buffers: &[Buffer], target: &mut [u8]) {
    debug_assert_eq!(total_len(buffers), target.len() as u64);
    let mut at = 0;
    for buffer in buffers {
        target[at..at + buffer.len()].copy_from_slice(buffer);
        at += buffer.len();
    }
}

/// Ranges of one file that unaligned requests are changing.
#[derive(Debug, Default)]
pub(crate) struct RangeLocks {
    held: Mutex<Vec<Range<u64>>>,
    released: Event,
}

/// A held range.
#[derive(Debug)]
pub(crate) struct RangeGuard<'a> {
    locks: &'a RangeLocks,
    range: Range<u64>,
}

impl RangeLocks {
    fn lock(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_hold(&self, range: &Range<u64>) -> bool {
        let mut held = self.lock();
        let free = held
            .iter()
            .all(|other| other.end <= range.start || range.end <= other.start);
        if free {
            held.push(range.clone());
        }
        free
    }

    /// Waits until nobody holds any part of `range`, and holds it.
    pub(crate) async fn hold(&self, range: Range<u64>) -> RangeGuard<'_> {
        loop {
            // Listen first: a release between the try and the wait must count.
            if self.try_hold(&range) {
                return RangeGuard { locks: self, range };
            }
            let released = self.released.listen();
            if self.try_hold(&range) {
                return RangeGuard { locks: self, range };
            }
            released.await;
        }
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut held = self.locks.lock();
        if let Some(at) = held.iter().position(|range| *range == self.range) {
            held.swap_remove(at);
        }
        drop(held);
        self.locks.released.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::lane::{block_on, yield_now};
    use crate::spawn;

    const SECTORS: Alignment = Alignment {
        request_bytes: 512,
        memory_bytes: 512,
    };

    #[test]
    fn ranges_grow_and_shrink_to_blocks() {
        assert_eq!(SECTORS.around(513, 1), 512..1024);
        assert_eq!(SECTORS.around(512, 512), 512..1024);
        assert_eq!(SECTORS.inside(1, 2000), 512..1536);
        assert!(SECTORS.inside(1, 511).is_empty());
        assert!(SECTORS.inside(100, 200).is_empty());
        assert_eq!(Alignment::NONE.around(7, 9), 7..16);
    }

    #[test]
    fn offset_length_and_memory_all_count() {
        let mut buffer = Buffer::zeroed(2048);
        assert!(SECTORS.fits(1024, std::slice::from_ref(&buffer)));
        assert!(!SECTORS.fits(1000, std::slice::from_ref(&buffer)));
        let head = buffer.split_to(100);
        assert!(!SECTORS.fits(0, &[head]));
        buffer.truncate(512);
        assert!(!SECTORS.fits(0, std::slice::from_ref(&buffer)));
        assert!(Alignment::NONE.fits(1, &[buffer]));
    }

    #[test]
    fn overlapping_holds_take_turns() {
        let locks = std::rc::Rc::new(RangeLocks::default());
        let order = std::rc::Rc::new(RefCell::new(Vec::new()));
        block_on(async {
            let tasks = [(0..10, 1), (5..6, 2), (20..30, 3)].map(|(range, name)| {
                let (locks, order) = (locks.clone(), order.clone());
                spawn(async move {
                    let _held = locks.hold(range).await;
                    order.borrow_mut().push((name, "in"));
                    yield_now().await;
                    yield_now().await;
                    order.borrow_mut().push((name, "out"));
                })
            });
            for task in tasks {
                task.await;
            }
        });
        let order = order.borrow();
        let at = |event| order.iter().position(|other| *other == event);
        assert!(at((1, "out")) < at((2, "in")));
        assert!(at((3, "in")) < at((1, "out")));
    }
}
