//! A lane and the loop that drives it: tasks while any is ready (but not for ever), then the
//! kernel. Only the modules of the calling thread's lane use it.
//!
//! Invariants:
//! - The loop never runs inside itself.
//! - Outside the loop, a lane that a foreign event loop polls is parked (`event_loop`).

use std::cell::{Cell, OnceCell};
use std::future::Future;
use std::io;
use std::os::fd::AsFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::backend::{LaneOptions, Wait};
#[cfg(not(shuttle))]
use super::poll_set::PollSet;
use super::reactor::Reactor;
use super::timer::Timers;
use crate::executor::Executor;
use crate::sys::EventFd;
use crate::{Error, Result};

/// How often ready tasks may follow each other before the kernel gets a turn.
const MAX_ROUNDS: usize = 16;

/// One thread's tasks, requests and timers.
pub(super) struct Lane {
    executor: Executor,
    reactor: Rc<Reactor>,
    timers: Rc<Timers>,
    running: Cell<bool>,
    #[cfg(not(shuttle))]
    poll_set: OnceCell<Rc<PollSet>>,
    #[cfg(not(shuttle))]
    event: Arc<EventFd>,
}

impl Lane {
    /// A lane as `options` say.
    pub(super) fn new(options: &LaneOptions) -> Result<Self> {
        let event = EventFd::new().map_err(|errno| Error::from_errno("set up lane", errno))?;
        let event = Arc::new(event);
        let reactor = Rc::new(Reactor::new(options, &event)?);
        let notified = event.clone();
        let executor = Executor::new(move || notified.signal());
        Ok(Lane {
            executor,
            reactor,
            timers: Rc::default(),
            running: Cell::new(false),
            #[cfg(not(shuttle))]
            poll_set: OnceCell::new(),
            #[cfg(not(shuttle))]
            event,
        })
    }

    /// The executor of its tasks.
    pub(super) fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Its requests.
    pub(super) fn reactor(&self) -> &Rc<Reactor> {
        &self.reactor
    }

    /// Its timers.
    pub(super) fn timers(&self) -> &Rc<Timers> {
        &self.timers
    }

    /// Whether a loop is running: that of [`Lane::block_on`], [`Lane::finish`] or a turn.
    pub(super) fn is_running(&self) -> bool {
        self.running.get()
    }

    /// Marks the lane as running until the guard is dropped.
    fn start(&self) -> Running<'_> {
        self.running.set(true);
        #[cfg(not(shuttle))]
        self.unpark();
        Running(self)
    }

    /// See [`super::block_on`].
    pub(super) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        assert!(
            !self.running.get(),
            "lane::block_on inside a lane: await instead"
        );
        let _running = self.start();
        let mut future = pin!(future);
        let waker = self.executor.root_waker();
        let mut context = Context::from_waker(&waker);
        waker.wake_by_ref();
        self.executor.enter(|| {
            loop {
                self.run_tasks();
                if self.executor.take_root_wake()
                    && let Poll::Ready(value) = future.as_mut().poll(&mut context)
                {
                    self.run_while(|executor| executor.tasks_to_complete() > 0);
                    return value;
                }
                self.wait();
            }
        })
    }

    fn run_while(&self, goes_on: impl Fn(&Executor) -> bool) {
        while goes_on(&self.executor) {
            self.run_tasks();
            if goes_on(&self.executor) {
                self.wait();
            }
        }
    }

    /// See [`super::finish`].
    pub(super) fn finish(&self) {
        assert!(
            !self.running.get(),
            "lane::finish inside a lane: its tasks go on anyway"
        );
        let _running = self.start();
        self.executor.enter(|| self.run_while(Executor::has_tasks));
    }

    /// Runs tasks until none is ready, the root future is, or the kernel must
    /// have its turn; returns whether any ran.
    fn run_tasks(&self) -> bool {
        for round in 0..MAX_ROUNDS {
            if !self.executor.run_batch() {
                return round > 0;
            }
            if self.executor.root_is_woken() {
                break;
            }
        }
        true
    }

    /// Submits what the tasks started, and waits if there is nothing else to do.
    fn wait(&self) {
        let wait = match self.executor.prepare_to_sleep() {
            false => Wait::No,
            true => self.timers.next().map_or(Wait::Forever, Wait::Until),
        };
        self.reactor.turn(wait, || self.executor.end_sleep());
        self.timers.fire();
    }
}

/// What a foreign event loop needs of a lane.
#[cfg(not(shuttle))]
impl Lane {
    /// See [`super::turn`].
    pub(super) fn turn(&self) {
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

    /// The set that a foreign event loop polls, made at the first call.
    pub(super) fn join_event_loop(&self) -> io::Result<Rc<PollSet>> {
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

    /// Parks the lane; nothing if no event loop has ever asked for its descriptor.
    fn park(&self) {
        let Some(set) = self.poll_set.get() else {
            return;
        };
        self.reactor.park();
        if !self.executor.prepare_to_sleep() {
            self.event.signal();
        }
        self.timers.set_alarm(Some(set.clone()));
    }

    fn unpark(&self) {
        if self.poll_set.get().is_some() {
            self.reactor.unpark();
            self.timers.set_alarm(None);
        }
    }
}

/// Marks the lane as not running again, and hands over what was started last.
struct Running<'a>(&'a Lane);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.reactor.turn(Wait::No, || {});
        self.0.running.set(false);
        #[cfg(not(shuttle))]
        self.0.park();
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.executor.close();
        self.reactor.shut_down();
    }
}
