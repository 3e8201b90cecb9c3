//! Timers of a lane.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// When, and a number that tells timers of the same time apart.
type Key = (Instant, u64);

/// Who is to be woken when.
#[derive(Default)]
pub(super) struct Timers {
    waiting: RefCell<BTreeMap<Key, Waker>>,
    last_number: Cell<u64>,
}

impl Timers {
    /// The next time at which somebody is to be woken.
    pub(super) fn next(&self) -> Option<Instant> {
        self.waiting.borrow().keys().next().map(|key| key.0)
    }

    /// Wakes all whose time has come.
    pub(super) fn fire(&self) {
        if self.waiting.borrow().is_empty() {
            return;
        }
        let now = Instant::now();
        loop {
            let mut waiting = self.waiting.borrow_mut();
            match waiting.first_entry() {
                Some(first) if first.key().0 <= now => {
                    let waker = first.remove();
                    drop(waiting);
                    waker.wake();
                }
                _ => return,
            }
        }
    }

    fn number(&self) -> u64 {
        self.last_number.set(self.last_number.get() + 1);
        self.last_number.get()
    }
}

/// Waits until a time has come; made by [`sleep`].
#[must_use = "a sleep does nothing until it is awaited"]
pub struct Sleep {
    timers: Rc<Timers>,
    key: Key,
}

/// Waits for `time` on the calling thread's lane.
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn sleep(time: Duration) -> Sleep {
    let now = Instant::now();
    // A sleep beyond what the clock can tell is as good as a century.
    let century = Duration::from_secs(100 * 365 * 86_400);
    sleep_until(now.checked_add(time).unwrap_or(now + century))
}

/// Waits until `deadline` on the calling thread's lane.
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn sleep_until(deadline: Instant) -> Sleep {
    let timers = super::current_or_panic().timers.clone();
    let key = (deadline, timers.number());
    Sleep { timers, key }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut waiting = self.timers.waiting.borrow_mut();
        if Instant::now() >= self.key.0 {
            waiting.remove(&self.key);
            return Poll::Ready(());
        }
        waiting.insert(self.key, context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let waker = self.timers.waiting.borrow_mut().remove(&self.key);
        drop(waker);
    }
}

impl fmt::Debug for Sleep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sleep until {:?}", self.key.0)
    }
}
