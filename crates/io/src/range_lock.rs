//! Which ranges are in use by running requests.
//!
//! A request that only overwrites bytes in place holds its range *shared*; one
//! that changes the mapping (allocates, zeroes, discards) holds it *exclusive*.
//! Requests on overlapping ranges are granted in the order in which they came,
//! so neither kind starves.
//!
//! Invariants:
//! - Of two overlapping granted ranges, both are shared.
//! - Rule 9: a request that holds a range does not wait for another one; who wants several takes
//!   the others with `try_acquire`.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::sync::{Mutex, MutexGuard};

/// How a range is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Together with other shared holders.
    Shared,
    /// Alone.
    Exclusive,
}

/// Whether two ranges have anything in common.
pub fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

struct Entry {
    id: u64,
    range: Range<u64>,
    mode: Mode,
    granted: bool,
    waker: Option<Waker>,
}

impl Entry {
    fn conflicts(&self, range: &Range<u64>, mode: Mode) -> bool {
        (self.mode == Mode::Exclusive || mode == Mode::Exclusive) && overlap(&self.range, range)
    }
}

#[derive(Default)]
struct State {
    next_id: u64,
    /// In order of arrival.
    entries: Vec<Entry>,
}

impl State {
    fn free_before(&self, position: usize, range: &Range<u64>, mode: Mode) -> bool {
        !self.entries[..position]
            .iter()
            .any(|entry| entry.conflicts(range, mode))
    }

    fn add(&mut self, range: Range<u64>, mode: Mode, granted: bool) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.entries.push(Entry {
            id,
            range,
            mode,
            granted,
            waker: None,
        });
        id
    }

    fn position(&self, id: u64) -> Option<usize> {
        self.entries.iter().position(|entry| entry.id == id)
    }

    /// Removes an entry and grants what it alone held up.
    fn remove(&mut self, id: u64) -> Vec<Waker> {
        let mut wakers = Vec::new();
        let Some(position) = self.position(id) else {
            return wakers;
        };
        let gone = self.entries.remove(position);
        for at in position..self.entries.len() {
            let waiting = &self.entries[at];
            if waiting.granted
                || !gone.conflicts(&waiting.range, waiting.mode)
                || !self.free_before(at, &waiting.range, waiting.mode)
            {
                continue;
            }
            let entry = &mut self.entries[at];
            entry.granted = true;
            wakers.extend(entry.waker.take());
        }
        wakers
    }
}

/// The ranges in use, in bytes (or any other unit that its user sticks to).
#[derive(Default)]
pub struct RangeLock {
    state: Mutex<State>,
}

impl RangeLock {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Takes `range` if that is possible without waiting.
    pub fn try_acquire(self: &Arc<Self>, range: Range<u64>, mode: Mode) -> Option<RangeGuard> {
        let mut state = self.lock();
        let all = state.entries.len();
        if !state.free_before(all, &range, mode) {
            return None;
        }
        let id = state.add(range, mode, true);
        Some(RangeGuard {
            ranges: self.clone(),
            id,
        })
    }

    /// Takes `range`, waiting for conflicting requests that came before.
    pub async fn acquire(self: &Arc<Self>, range: Range<u64>, mode: Mode) -> RangeGuard {
        if let Some(guard) = self.try_acquire(range.clone(), mode) {
            return guard;
        }
        let id = self.lock().add(range, mode, false);
        let guard = RangeGuard {
            ranges: self.clone(),
            id,
        };
        Granted { ranges: self, id }.await;
        guard
    }
}

struct Granted<'a> {
    ranges: &'a RangeLock,
    id: u64,
}

impl Future for Granted<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.ranges.lock();
        let Some(position) = state.position(self.id) else {
            return Poll::Ready(());
        };
        let entry = &state.entries[position];
        // A conflicting request may have gone between the failed try and now.
        if entry.granted || state.free_before(position, &entry.range, entry.mode) {
            state.entries[position].granted = true;
            return Poll::Ready(());
        }
        state.entries[position].waker = Some(context.waker().clone());
        Poll::Pending
    }
}

/// Holds a range until dropped.
#[derive(Debug)]
pub struct RangeGuard {
    ranges: Arc<RangeLock>,
    id: u64,
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let wakers = self.ranges.lock().remove(self.id);
        for waker in wakers {
            waker.wake();
        }
    }
}

impl fmt::Debug for RangeLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RangeLock({} ranges)", self.lock().entries.len())
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn shared_ranges_meet_and_exclusive_ones_wait() {
        let ranges = Arc::new(RangeLock::default());
        let a = ranges.try_acquire(0..10, Mode::Shared).unwrap();
        let b = ranges.try_acquire(5..15, Mode::Shared).unwrap();
        assert!(ranges.try_acquire(14..20, Mode::Exclusive).is_none());
        let c = ranges.try_acquire(15..20, Mode::Exclusive).unwrap();
        drop((a, b));
        assert!(ranges.try_acquire(0..15, Mode::Exclusive).is_some());
        drop(c);
    }

    #[test]
    fn requests_are_granted_in_order_of_arrival() {
        let ranges = Arc::new(RangeLock::default());
        let first = ranges.try_acquire(0..10, Mode::Shared).unwrap();
        let mut exclusive = Box::pin(ranges.acquire(0..10, Mode::Exclusive));
        assert!(exclusive.as_mut().now_or_never().is_none());
        assert!(
            ranges.try_acquire(0..10, Mode::Shared).is_none(),
            "a later reader must not overtake"
        );
        let mut later = Box::pin(ranges.acquire(0..10, Mode::Shared));
        assert!(later.as_mut().now_or_never().is_none());
        drop(first);
        let held = exclusive.as_mut().now_or_never().expect("granted");
        assert!(later.as_mut().now_or_never().is_none());
        drop(held);
        assert!(later.as_mut().now_or_never().is_some());
    }

    #[test]
    fn who_came_first_goes_first_and_others_do_not_wait() {
        let ranges = Arc::new(RangeLock::default());
        let acquire = |range| Box::pin(ranges.acquire(range, Mode::Exclusive));
        let first = acquire(0..10).now_or_never().expect("free");
        let mut second = acquire(5..20);
        assert!(second.as_mut().now_or_never().is_none());
        let mut third = acquire(15..30);
        assert!(
            third.as_mut().now_or_never().is_none(),
            "not past the second"
        );
        assert!(acquire(10..15).now_or_never().is_none());
        let _beside = acquire(40..50).now_or_never().expect("free");
        drop(second);
        let third = third.now_or_never().expect("its turn");
        drop((first, third));
        assert!(acquire(0..30).now_or_never().is_some());
    }

    #[test]
    fn a_waiter_that_gives_up_lets_others_pass() {
        let ranges = Arc::new(RangeLock::default());
        let first = ranges.try_acquire(0..10, Mode::Shared).unwrap();
        let mut exclusive = Box::pin(ranges.acquire(0..10, Mode::Exclusive));
        assert!(exclusive.as_mut().now_or_never().is_none());
        drop(exclusive);
        assert!(ranges.try_acquire(0..10, Mode::Shared).is_some());
        drop(first);
    }
}
