//! A lane in an event loop of somebody else's: epoll, tokio, the loop of a VMM's queue.
//!
//! [`fd`] gives a descriptor that can be read whenever the lane has something to do, and
//! [`turn`] does that without waiting. Between turns the lane is *parked*: whatever starts a
//! request, wakes a task or sets a timer then goes to the kernel at once or makes the
//! descriptor readable, for no turn would come otherwise.
//!
//! Invariants:
//! - A parked lane has nothing unsubmitted and nothing ready, or its descriptor is readable.
//! - A descriptor is in the set only while a request that waits for it owns it: a duplicate
//!   of it might stay open, and the kernel would report it for ever.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::request::Descriptor;
use super::{Lane, MAX_ROUNDS, Wait, current, current_or_panic};
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
    let duplicate = set.and_then(|set| set.epoll.try_clone());
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

/// What a foreign event loop polls: one epoll instance with all that could wake a lane.
pub(super) struct PollSet {
    epoll: OwnedFd,
    timer: OwnedFd,
    /// What the timer is set to.
    alarm: Cell<Option<Instant>>,
    /// Sockets that requests wait for, and for what.
    watched: RefCell<BTreeMap<RawFd, (Arc<Descriptor>, EventFlags)>>,
}

impl PollSet {
    fn new() -> io::Result<Self> {
        let set = PollSet {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            timer: timerfd_create(
                TimerfdClockId::Monotonic,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )?,
            alarm: Cell::new(None),
            watched: RefCell::default(),
        };
        set.add(set.timer.as_fd())?;
        Ok(set)
    }

    /// Adds a descriptor that stays open as long as the lane.
    pub(super) fn add(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        epoll::add(&self.epoll, fd, EventData::new_u64(0), EventFlags::IN)?;
        Ok(())
    }

    /// Watches for `events` of `poll(2)` until [`PollSet::unwatch_all`]. Refused for what
    /// cannot be polled.
    pub(super) fn watch(&self, file: &Arc<Descriptor>, events: i16) -> io::Result<()> {
        let events = EventFlags::from_bits_retain(u32::from(events.cast_unsigned()));
        let data = EventData::new_u64(0);
        let mut watched = self.watched.borrow_mut();
        if let Some((_, known)) = watched.get_mut(&file.raw()) {
            *known |= events;
            epoll::modify(&self.epoll, file, data, *known)?;
        } else {
            epoll::add(&self.epoll, file, data, events)?;
            watched.insert(file.raw(), (file.clone(), events));
        }
        Ok(())
    }

    pub(super) fn unwatch_all(&self) {
        let watched = self.watched.take();
        for (file, _) in watched.values() {
            // Refused for what the kernel has let go of by itself.
            let _ = epoll::delete(&self.epoll, file);
        }
    }

    /// Has the set tell of `next`; `None`: of no time.
    pub(super) fn set_alarm(&self, next: Option<Instant>) {
        if self.alarm.replace(next) == next {
            return;
        }
        // Zero would mean never.
        let left = next.map_or(Duration::ZERO, |next| {
            next.saturating_duration_since(Instant::now())
                .max(Duration::from_nanos(1))
        });
        let none = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let time = Itimerspec {
            it_interval: none,
            it_value: Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            },
        };
        let set = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &time);
        debug_assert!(set.is_ok(), "timerfd_settime: {set:?}");
    }
}

impl fmt::Debug for PollSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PollSet")
    }
}

/// A counter of the kernel's that is drained without a wait.
#[derive(Debug)]
pub(super) struct Counter(OwnedFd);

impl Counter {
    pub(super) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Counter(fd))
    }

    /// Sets the counter to zero, whatever it is.
    pub(super) fn drain(&self) {
        let mut count = [0; 8];
        // Refused at zero.
        let _ = rustix::io::read(&self.0, &mut count);
    }
}

impl AsFd for Counter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
