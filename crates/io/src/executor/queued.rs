//! [`Queued`]: whether a task is among those that are ready, so that many wake-ups of it put it
//! there once.
//!
//! Invariant: what anybody did before a wake-up that found the task queued already is seen by
//! the poll that follows. So leaving is a read as well as a write: a plain store lets the poll's
//! reads happen before others see it, and whoever wakes in between believes that this poll is
//! still to come (`tests/weak_memory.rs`).

use crate::sync::atomic::{AtomicBool, Ordering};

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Queued(AtomicBool);

impl Queued {
    /// It is not.
    pub(crate) fn new() -> Self {
        Queued(AtomicBool::new(false))
    }

    /// Notes that it is; whether the caller has to see to that.
    pub(crate) fn enter(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// Notes that it is not: it is about to be polled.
    pub(crate) fn leave(&self) {
        self.0.swap(false, Ordering::AcqRel);
    }
}
