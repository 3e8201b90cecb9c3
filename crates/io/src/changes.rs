//! [`Changes`]: the requests that change an image, and who must be alone with it.
//!
//! A close writes everything back and then gives back what was taken ahead. What changed the
//! image in between would be in memory only, and lost. So a close first waits (rule 10) until
//! all changes have ended that began before it, and none begins until it is over; then they find
//! the image closed, or go on where the close has failed.
//!
//! Invariant: a change that has not begun holds nothing that one which runs could wait for.

use crate::sync::Event;
use crate::sync::atomic::{AtomicUsize, Ordering};

/// In the count of [`Changes`]: somebody is alone, or is going to be.
const ALONE: usize = 1;
/// In the count of [`Changes`]: one change.
const CHANGE: usize = 2;

/// See the module's head. It has cache lines of its own: every change writes to it.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Changes {
    count: AtomicUsize,
    /// The last change has ended that somebody waits for, or nobody is alone any more.
    ended: Event,
}

/// Keeps all changes out until it is dropped.
#[derive(Debug)]
pub struct Alone<'a>(&'a Changes);

impl Changes {
    /// Counts a change in, which [`Changes::end`] counts out; `false` if somebody is alone.
    pub fn try_begin(&self) -> bool {
        let before = self.count.fetch_add(CHANGE, Ordering::SeqCst);
        if before & ALONE != 0 {
            self.end();
            return false;
        }
        true
    }

    /// As [`Changes::try_begin`], once nobody is alone any more.
    pub async fn begin(&self) {
        while !self.try_begin() {
            let ended = self.ended.listen();
            if self.count.load(Ordering::SeqCst) & ALONE != 0 {
                ended.await;
            }
        }
    }

    pub fn end(&self) {
        let before = self.count.fetch_sub(CHANGE, Ordering::SeqCst);
        if before == CHANGE | ALONE {
            self.ended.notify(usize::MAX);
        }
    }

    /// Waits until nobody else is alone, and until all changes have ended that have begun.
    pub async fn alone(&self) -> Alone<'_> {
        loop {
            let ended = self.ended.listen();
            if self.count.fetch_or(ALONE, Ordering::SeqCst) & ALONE == 0 {
                break;
            }
            ended.await;
        }
        let alone = Alone(self);
        loop {
            let ended = self.ended.listen();
            if self.count.load(Ordering::SeqCst) == ALONE {
                return alone;
            }
            ended.await;
        }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.count.fetch_and(!ALONE, Ordering::SeqCst);
        self.0.ended.notify(usize::MAX);
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;
