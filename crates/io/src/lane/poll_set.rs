//! What a foreign event loop polls for a lane ([`super::event_loop`]).
//!
//! Invariant: a descriptor is in the set only while a request that waits for it owns it. A
//! duplicate of it might stay open, and the kernel would report it for ever.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::descriptor::Descriptor;

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
    pub(super) fn new() -> io::Result<Self> {
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

    /// A duplicate of the descriptor that a foreign event loop polls.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.epoll.try_clone()
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
