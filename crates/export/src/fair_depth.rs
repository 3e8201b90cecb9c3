//! How deep the queues of exports may be while others wait: a disk with hundreds of requests in
//! flight does not keep one that asks for one thing after another from getting its share of the
//! device below both.
//!
//! An export that is alone, or beside others that are as deep, is never held up. One whose
//! neighbour has few requests in flight is held to as many as leave that one half of the speed
//! that it would have alone; `controller` finds out how many those are.
//!
//! Invariants:
//! - A stream with nothing in flight may always begin a request, and one that was held up looks
//!   again when one of its own ends: nobody has to be woken from elsewhere.
//! - No lane waits for another one here.

mod controller;

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vellum_io::lane;

use crate::accounting::Accounting;
use controller::{Controller, UNBOUNDED};

/// Requests in flight of whoever waits for one thing after another.
const SHALLOW: usize = 2;
/// Requests in flight of whoever may keep others waiting.
const DEEP: usize = 4;
/// An export that was deep is taken for deep so much longer.
const DEEP_FOR: Duration = Duration::from_millis(200);
/// It says so again after this.
const SAID_EVERY: Duration = Duration::from_millis(1);
/// A bound holds for so long after the last shallow request, and for some of those.
const HELD_FOR: Duration = Duration::from_millis(50);

/// What exports share that may be in each other's way: given to each of them when it is made.
/// Exports that share none are not looked at together.
#[derive(Clone, Default)]
pub struct FairDepth(Arc<Shared>);

/// In a time, who it is about: the number of an export above the microseconds.
const WHO_SHIFT: u32 = 48;

struct Shared {
    begun: Instant,
    exports: AtomicU64,
    /// The export that had a deep queue last, and when.
    deep: AtomicU64,
    /// What each export may have in flight.
    bound: AtomicUsize,
    /// When that lapses, in microseconds.
    bound_end: AtomicU64,
    controller: Mutex<Controller>,
}

impl Default for Shared {
    fn default() -> Self {
        Shared {
            begun: lane::now(),
            exports: AtomicU64::new(0),
            deep: AtomicU64::new(u64::MAX),
            bound: AtomicUsize::new(UNBOUNDED),
            bound_end: AtomicU64::new(0),
            controller: Mutex::default(),
        }
    }
}

impl Shared {
    fn nanoseconds(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.begun);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    fn microseconds(&self, at: Instant) -> u64 {
        (self.nanoseconds(at) / 1000) & ((1 << WHO_SHIFT) - 1)
    }
}

impl PartialEq for FairDepth {
    /// Whether both are about the same exports.
    fn eq(&self, other: &FairDepth) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for FairDepth {}

impl fmt::Debug for FairDepth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = self.0.bound.load(Ordering::Relaxed);
        let bound = (bound != UNBOUNDED).then_some(bound);
        f.debug_struct("FairDepth").field("bound", &bound).finish()
    }
}

/// An export among those that share a [`FairDepth`].
pub(crate) struct ExportDepth {
    shared: Arc<Shared>,
    number: u64,
    /// Streams with requests in flight.
    streams: AtomicUsize,
}

impl ExportDepth {
    pub(crate) fn new(among: &FairDepth) -> ExportDepth {
        let shared = among.0.clone();
        let number = shared.exports.fetch_add(1, Ordering::Relaxed) & 0xffff;
        ExportDepth {
            shared,
            number,
            streams: AtomicUsize::new(0),
        }
    }

    /// Takes in that a request begins in a stream that has so many in flight with it; whether its
    /// time is worth knowing.
    pub(crate) fn begins(&self, in_flight: usize, at: Instant) -> bool {
        if in_flight >= DEEP {
            self.is_deep(at);
        }
        in_flight <= SHALLOW
    }

    /// Says that this export has a deep queue.
    fn is_deep(&self, at: Instant) {
        let now = self.shared.microseconds(at);
        let said = self.shared.deep.load(Ordering::Relaxed);
        let mine = self.number << WHO_SHIFT;
        let fresh = (mine | now).saturating_sub(said) < SAID_EVERY.as_micros() as u64;
        if said >> WHO_SHIFT != self.number || !fresh {
            self.shared.deep.store(mine | now, Ordering::Relaxed);
        }
    }

    /// Whether another export had a deep queue a moment ago.
    fn is_beside_deep(&self, now: u64) -> bool {
        let said = self.shared.deep.load(Ordering::Relaxed);
        let at = said & ((1 << WHO_SHIFT) - 1);
        said != u64::MAX
            && said >> WHO_SHIFT != self.number
            && now.saturating_sub(at) < DEEP_FOR.as_micros() as u64
    }

    /// Takes in that a request has ended whose time was worth knowing.
    pub(crate) fn ended(&self, began: Instant, at: Instant) {
        let shared = &*self.shared;
        let now = shared.microseconds(at);
        if !self.is_beside_deep(now) {
            return;
        }
        // Who is in the middle of the same need not be waited for.
        let Some(mut controller) = shared.controller.try_lock() else {
            return;
        };
        let (began, ended) = (shared.nanoseconds(began), shared.nanoseconds(at));
        let bound = controller.ended(began, ended);
        let held_for = HELD_FOR.as_micros() as u64 + 4 * (ended - began) / 1000;
        shared.bound_end.store(now + held_for, Ordering::Relaxed);
        shared.bound.store(bound, Ordering::Relaxed);
    }

    /// Whether a stream that has so many requests in flight may begin another one.
    fn has_room(&self, in_flight: usize) -> bool {
        let bound = self.shared.bound.load(Ordering::Relaxed);
        if bound == UNBOUNDED || in_flight == 0 {
            return true;
        }
        let at = lane::now();
        if self.shared.microseconds(at) > self.shared.bound_end.load(Ordering::Relaxed) {
            self.shared.bound.store(UNBOUNDED, Ordering::Relaxed);
            return true;
        }
        let streams = self.streams.load(Ordering::Relaxed).max(1);
        if in_flight < (bound / streams).max(1) {
            return true;
        }
        // While the device is measured everybody is refused.
        if bound > 1 {
            self.is_deep(at);
        }
        false
    }
}

impl fmt::Debug for ExportDepth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportDepth")
            .field("streams", &self.streams)
            .finish_non_exhaustive()
    }
}

/// Counts what a connection, queue or session of an export has in flight.
#[derive(Debug)]
pub(crate) struct StreamDepth {
    of: Arc<Accounting>,
    in_flight: Cell<usize>,
}

impl StreamDepth {
    pub(crate) fn new(of: &Arc<Accounting>) -> StreamDepth {
        StreamDepth {
            of: of.clone(),
            in_flight: Cell::new(0),
        }
    }

    pub(crate) fn get(&self) -> usize {
        self.in_flight.get()
    }

    /// A request begins.
    pub(crate) fn enter(&self) {
        let before = self.in_flight.get();
        if before == 0 {
            self.of.depth.streams.fetch_add(1, Ordering::Relaxed);
        }
        self.in_flight.set(before + 1);
    }

    /// One has ended.
    pub(crate) fn leave(&self) {
        let left = self.in_flight.get().saturating_sub(1);
        if left == 0 && self.in_flight.get() == 1 {
            self.of.depth.streams.fetch_sub(1, Ordering::Relaxed);
        }
        self.in_flight.set(left);
    }

    /// Whether another request may begin. If not, one of the stream's own is in flight.
    pub(crate) fn has_room(&self) -> bool {
        self.of.depth.has_room(self.in_flight.get())
    }
}

impl Drop for StreamDepth {
    fn drop(&mut self) {
        if self.in_flight.get() > 0 {
            self.of.depth.streams.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    fn stream(among: &FairDepth) -> (Arc<Accounting>, StreamDepth) {
        let export = Arc::new(Accounting::among(among));
        let stream = StreamDepth::new(&export);
        (export, stream)
    }

    /// Has requests of a shallow stream take so long, one after the other, from `begun` on.
    fn shallow(export: &Accounting, begun: Instant, took: Duration, requests: u32) -> Instant {
        (0..requests).fold(begun, |at, _| {
            assert!(export.depth.begins(1, at));
            export.depth.ended(at, at + took);
            at + took
        })
    }

    #[test]
    fn whoever_is_alone_or_among_equals_is_never_held_up() {
        let all = FairDepth::default();
        let (one, deep) = stream(&all);
        let begun = lane::now();
        for _ in 0..100 {
            deep.enter();
            assert!(deep.has_room());
            one.depth.begins(deep.get(), begun);
        }
        // Its own requests of other streams are not somebody else's.
        shallow(&one, begun, MILLISECOND, 50);
        assert!(deep.has_room());
        let (two, deep_too) = stream(&all);
        deep_too.enter();
        assert!(!two.depth.begins(50, begun));
        assert!(deep.has_room() && deep_too.has_room());
    }

    #[test]
    fn a_deep_stream_beside_a_shallow_one_waits_for_its_own_requests_and_no_longer_than_need_be() {
        let all = FairDepth::default();
        let (deep_export, deep) = stream(&all);
        let (shallow_export, shallow_stream) = stream(&all);
        shallow_stream.enter();
        (0..64).for_each(|_| deep.enter());
        let begun = lane::now();
        deep_export.depth.begins(deep.get(), begun);
        shallow(&shallow_export, begun, MILLISECOND, 1);
        // However long this test is kept waiting.
        let held = all.0.bound_end.swap(u64::MAX, Ordering::Relaxed);
        assert!(held >= (HELD_FOR + 4 * MILLISECOND).as_micros() as u64);
        assert!(!deep.has_room());
        assert!(!shallow_stream.has_room());
        (0..63).for_each(|_| deep.leave());
        assert!(!deep.has_room());
        deep.leave();
        assert!(deep.has_room());
        // The shallow one is gone: nothing of what was found holds on.
        all.0.bound_end.store(0, Ordering::Relaxed);
        std::thread::sleep(MILLISECOND);
        (0..64).for_each(|_| deep.enter());
        assert!(deep.has_room());
    }

    #[test]
    fn streams_of_one_export_share_what_it_may_have_in_flight() {
        let all = FairDepth::default();
        let (export, first) = stream(&all);
        let second = StreamDepth::new(&export);
        first.enter();
        second.enter();
        all.0.bound.store(6, Ordering::Relaxed);
        all.0.bound_end.store(u64::MAX, Ordering::Relaxed);
        (0..2).for_each(|_| {
            assert!(first.has_room());
            first.enter();
        });
        assert!(!first.has_room());
        drop(second);
        assert!(first.has_room());
    }
}
