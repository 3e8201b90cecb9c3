//! A lane in an event loop of somebody else's: epoll, tokio, the loop of a VMM's queue.
//!
//! [`fd`] gives a descriptor that can be read whenever the lane has something to do, and
//! [`turn`] does that without waiting. Between turns the lane is *parked*: whatever starts a
//! request, wakes a task or sets a timer then goes to the kernel at once or makes the
//! descriptor readable, for no turn would come otherwise.
//!
//! Invariant: a parked lane has nothing unsubmitted and nothing ready, or its descriptor is
//! readable.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use super::backend::Wait;
use super::poll_set::PollSet;
use super::{Lane, MAX_ROUNDS, current, current_or_panic};
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

impl Lane {
    fn turn(&self) {
        assert!(
            !self.running.get(),
            "lane::turn inside a lane: it has its turn"
        );
        let _running = self.start();
        self.executor.end_sleep();
        // Of an earlier root future, which nobody polls now.
        self.executor.take_root_wake();
        self.executor.enter(|| {
            for _ in 0..MAX_ROUNDS {
                self.reactor.turn(Wait::No, || {});
                self.timers.fire();
                if !self.run_tasks() {
                    break;
                }
            }
        });
    }

    fn join_event_loop(&self) -> io::Result<Rc<PollSet>> {
        if let Some(set) = self.poll_set.get() {
            return Ok(set.clone());
        }
        let set = Rc::new(PollSet::new()?);
        // For what could not be submitted: the counter's read is a request itself.
        set.add(self.event.as_fd())?;
        self.reactor.join_poll_set(&set)?;
        let set = self.poll_set.get_or_init(|| set);
        if !self.running.get() {
            self.park();
        }
        Ok(set.clone())
    }

    /// See the module's head; nothing if no event loop was ever asked for.
    pub(super) fn park(&self) {
        let Some(set) = self.poll_set.get() else {
            return;
        };
        self.reactor.park();
        if !self.executor.prepare_to_sleep() {
            self.event.signal();
        }
        self.timers.set_alarm(Some(set.clone()));
    }

    pub(super) fn unpark(&self) {
        if self.poll_set.get().is_some() {
            self.reactor.unpark();
            self.timers.set_alarm(None);
        }
    }
}
