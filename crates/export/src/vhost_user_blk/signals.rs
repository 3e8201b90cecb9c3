//! What a queue tells its client by: event counters, which the client has, too.
//!
//! Whether a write to a full counter waits is a property of the open file (`O_NONBLOCK`), which both
//! sides share: the client may change it at any time, as it may fill the counter. Linux has no write
//! to a counter that surely does not wait; by the ways around that (the counter of another
//! `io_uring`) a signal costs twice as much. So a queue just writes, and a task of the session looks
//! after it: if a write does not end, the task reads the counter, which makes room.
//!
//! Invariants:
//! - A queue that waits for a counter is freed; its session, and the end of the export, never wait
//!   for what only the client could do.
//! - Only a full counter is read: no client that uses its counters as such loses a signal.

use std::future::poll_fn;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::future::{Either, select};
use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use vellum_io::lane;

/// A write that takes longer is looked after.
const INTERVAL: Duration = Duration::from_millis(500);
/// How often room is made at a time, for a client that fills the counter again.
const MAX_TRIES: usize = 1000;
/// For what has no offset: where it stands.
const CURRENT: u64 = u64::MAX;

/// The signals of a queue.
#[derive(Debug, Default)]
pub(super) struct Signals {
    /// How many writes have begun and how many have ended: odd while one goes on.
    writes: AtomicU64,
    /// Somebody looks after the writes.
    is_watched: AtomicBool,
    /// There are no more.
    is_over: AtomicBool,
    watcher: AtomicWaker,
    /// Where the queue writes to.
    counters: Mutex<Vec<Arc<OwnedFd>>>,
}

/// Ends the look after a queue's signals when it is dropped.
#[derive(Debug)]
pub(super) struct Watched(pub(super) Arc<Signals>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::SeqCst);
        self.0.watcher.wake();
    }
}

impl Signals {
    /// Says where the queue writes to from now on.
    pub(super) fn use_counters<'a>(&self, counters: impl Iterator<Item = &'a Arc<OwnedFd>>) {
        *self.counters.lock() = counters.cloned().collect();
    }

    /// Adds one to a counter of those. If it is full, whoever waits for it is awake. Only the queue's
    /// own thread does this.
    pub(super) fn add_one(&self, counter: &OwnedFd) {
        let writes = self.writes.load(Ordering::Relaxed);
        // Before it is seen whether somebody looks; `rest` does it the other way round.
        self.writes.store(writes + 1, Ordering::SeqCst);
        if !self.is_watched.load(Ordering::SeqCst) {
            self.is_watched.store(true, Ordering::SeqCst);
            self.watcher.wake();
        }
        let _ = rustix::io::write(counter, &1_u64.to_ne_bytes());
        self.writes.store(writes + 2, Ordering::Release);
    }

    /// Waits for a write that does not end; `None` if there are no more.
    pub(super) async fn stuck(&self) -> Option<u64> {
        loop {
            self.begun().await;
            let seen = self.writes.load(Ordering::SeqCst);
            let pause = pin!(lane::sleep(INTERVAL));
            if let Either::Right(_) = select(pause, pin!(self.over())).await {
                return None;
            }
            if self.writes.load(Ordering::SeqCst) != seen {
                continue;
            }
            if seen % 2 == 1 {
                return Some(seen);
            }
            self.rest(seen);
        }
    }

    /// Looks no more until there is another write than those that were seen.
    fn rest(&self, seen: u64) {
        self.is_watched.store(false, Ordering::SeqCst);
        if self.writes.load(Ordering::SeqCst) != seen {
            self.is_watched.store(true, Ordering::SeqCst);
        }
    }

    /// Waits until there are writes to look after, or no more.
    async fn begun(&self) {
        poll_fn(|context| {
            self.watcher.register(context.waker());
            let is_watched = self.is_watched.load(Ordering::SeqCst);
            match is_watched || self.is_over.load(Ordering::SeqCst) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }

    async fn over(&self) {
        poll_fn(|context| {
            self.watcher.register(context.waker());
            match self.is_over.load(Ordering::SeqCst) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }

    /// Whether a write has to wait.
    pub(super) fn is_any_full(&self) -> bool {
        self.counters.lock().iter().any(|counter| is_full(counter))
    }

    /// Makes room for the write that is stuck.
    pub(super) fn make_room(&self, stuck: u64) {
        let counters = self.counters.lock().clone();
        for _ in 0..MAX_TRIES {
            if self.writes.load(Ordering::SeqCst) != stuck {
                return;
            }
            for counter in counters.iter().filter(|counter| is_full(counter)) {
                // Somebody else may have read it.
                let _ = take_count(counter);
            }
            std::thread::yield_now();
        }
    }
}

/// Whether adding one to a counter would wait.
fn is_full(counter: &OwnedFd) -> bool {
    let mut wanted = [PollFd::new(counter, PollFlags::OUT)];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    match poll(&mut wanted, Some(&at_once)) {
        Ok(_) => !wanted[0].revents().contains(PollFlags::OUT),
        Err(_) => false,
    }
}

/// Sets a counter to zero, whether it counts or not, without waiting, whatever the client has made of
/// its open file; before Linux 5.8 only if that says so. How many bytes there were.
pub(super) fn take_count(counter: impl AsFd) -> Result<usize, Errno> {
    let mut count = [0; 8];
    let place = &mut [IoSliceMut::new(&mut count)];
    match preadv2(&counter, place, CURRENT, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => rustix::io::read(&counter, &mut count),
        taken => taken,
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_count_that_somebody_else_has_taken_is_not_waited_for() {
        let counter = eventfd(3, EventfdFlags::empty()).expect("a counter");
        assert_eq!(take_count(&counter), Ok(8));
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // The test may have lost its patience.
            let _ = sender.send(take_count(&counter));
        });
        let taken = receiver.recv_timeout(Duration::from_secs(10));
        assert_eq!(taken, Ok(Err(Errno::AGAIN)));
    }

    #[test]
    fn only_a_full_counter_is_read() {
        let counter = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).expect("a counter"));
        let signals = Signals::default();
        signals.use_counters([&counter].into_iter());
        signals.add_one(&counter);
        let stuck = signals.writes.load(Ordering::SeqCst);
        signals.make_room(stuck);
        assert_eq!(take_count(&counter), Ok(8));
        let full = (u64::MAX - 1).to_ne_bytes();
        rustix::io::write(&counter, &full).expect("full");
        signals.make_room(stuck);
        assert_eq!(take_count(&counter), Err(Errno::AGAIN));
    }
}
