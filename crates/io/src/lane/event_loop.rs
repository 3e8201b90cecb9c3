//! A lane in an event loop of somebody else's: epoll, tokio, the loop of a VMM's queue.
//!
//! [`fd`] gives a descriptor that can be read whenever the lane has something to do, and
//! [`turn`] does that without waiting. Between turns the lane is *parked*: whatever starts a
//! request, wakes a task or sets a timer then goes to the kernel at once or makes the
//! descriptor readable, for no turn would come otherwise.
//!
//! Invariant: a parked lane has nothing unsubmitted and nothing ready, or its descriptor is
//! readable.

use std::os::fd::OwnedFd;

use super::current::{current, current_or_panic};
use crate::{Error, Result};

/// A descriptor for the calling thread's lane in an event loop of one's own. It can be read
/// (`EPOLLIN`, level-triggered) whenever [`turn`] has something to do; nothing is ever read
/// from it. It is the caller's to close, and says nothing any more once the thread has ended.
///
/// [`super::block_on`] and [`super::finish`] may still be used between turns.
///
/// # Errors
/// If the lane or the descriptor cannot be set up: [`crate::ErrorKind::Io`] with the kernel's
/// error number.
pub fn fd() -> Result<OwnedFd> {
    let lane = current()?;
    let set = lane.join_event_loop();
    let duplicate = set.and_then(|set| set.descriptor());
    duplicate.map_err(|error| Error::from_io("set up the lane's descriptor", &error))
}

/// Gives the calling thread's lane a turn: collects what has ended, fires timers, runs tasks
/// and submits what they start. It never waits for the kernel, and it ends even if there is
/// always more to do: then [`fd`] stays readable. A thread that spins may call it without a
/// descriptor.
///
/// Tasks are started with [`super::spawn`] or from elsewhere through [`super::remote`].
///
/// # Panics
/// Inside [`super::block_on`] or a turn, and if a lane cannot be set up at all. If a task
/// panics, its panic comes out of here: an event loop that catches it, or has it end only one
/// of its own tasks, must go on with turns, or the other tasks of the lane wait for ever.
pub fn turn() {
    current_or_panic().turn();
}
