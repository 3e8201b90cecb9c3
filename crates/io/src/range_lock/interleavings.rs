//! Of two overlapping ranges that are held, both are shared; nobody overtakes one that waits,
//! and nobody waits for ever, whoever gives up.

use std::pin::pin;

use super::*;
use crate::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use crate::sync::{block_on, chance, explore, join, point, thread};

/// How many use each unit, alone and together.
#[derive(Default)]
struct Units([AtomicUsize; 3], [AtomicUsize; 3]);

impl Units {
    fn work(&self, range: Range<u64>, mode: Mode) {
        let alone = mode == Mode::Exclusive;
        for unit in range.clone().map(|unit| unit as usize) {
            let own = if alone { &self.0 } else { &self.1 };
            own[unit].fetch_add(1, SeqCst);
            let (alone, together) = (self.0[unit].load(SeqCst), self.1[unit].load(SeqCst));
            let fine = alone == 0 || alone == 1 && together == 0;
            assert!(fine, "unit {unit}: {alone} alone, {together} together");
        }
        point();
        for unit in range.map(|unit| unit as usize) {
            let own = if alone { &self.0 } else { &self.1 };
            own[unit].fetch_sub(1, SeqCst);
        }
    }
}

const REQUESTS: [(Range<u64>, Mode); 4] = [
    (0..2, Mode::Exclusive),
    (1..3, Mode::Shared),
    (1..2, Mode::Exclusive),
    (0..3, Mode::Shared),
];

#[test]
fn overlapping_requests_never_run_at_once() {
    explore(|| {
        let (ranges, units) = (Arc::new(RangeLock::default()), Arc::new(Units::default()));
        let threads = REQUESTS.map(|(range, mode)| {
            let (ranges, units) = (ranges.clone(), units.clone());
            thread::spawn(move || {
                let guard = block_on(ranges.acquire(range.clone(), mode));
                units.work(range, mode);
                drop(guard);
            })
        });
        join(threads);
        assert!(ranges.lock().entries.is_empty());
    });
}

#[test]
fn whoever_gives_up_waiting_keeps_nobody_waiting() {
    explore(|| {
        let (ranges, units) = (Arc::new(RangeLock::default()), Arc::new(Units::default()));
        let threads = REQUESTS.map(|(range, mode)| {
            let (ranges, units) = (ranges.clone(), units.clone());
            thread::spawn(move || {
                let mut left = chance(4);
                let mut acquired = pin!(ranges.acquire(range.clone(), mode));
                let guard = block_on(std::future::poll_fn(|context| {
                    if left == 0 && mode == Mode::Exclusive {
                        return Poll::Ready(None);
                    }
                    left = left.saturating_sub(1);
                    acquired.as_mut().poll(context).map(Some)
                }));
                if guard.is_some() {
                    units.work(range, mode);
                }
            })
        });
        join(threads);
    });
}

/// Whoever waits is served before anybody who comes later, in either kind.
#[test]
fn nobody_overtakes_one_that_waits() {
    explore(|| {
        let ranges = Arc::new(RangeLock::default());
        let first = ranges.try_acquire(0..2, Mode::Shared).expect("free");
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut waiting = Box::pin({
            let (ranges, order) = (ranges.clone(), order.clone());
            async move {
                let guard = ranges.acquire(0..2, Mode::Exclusive).await;
                order.lock().push(1);
                guard
            }
        });
        let began = waiting
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
        assert!(began.is_pending(), "the first one holds it");
        let threads = [(2, Mode::Shared), (3, Mode::Exclusive)].map(|(number, mode)| {
            let (ranges, order) = (ranges.clone(), order.clone());
            thread::spawn(move || {
                let _guard = block_on(ranges.acquire(1..2, mode));
                order.lock().push(number);
            })
        });
        let last = thread::spawn(move || drop(first));
        drop(block_on(waiting));
        join(threads.into_iter().chain([last]));
        assert_eq!(order.lock()[0], 1);
    });
}
