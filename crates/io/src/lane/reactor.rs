//! The reactor: slots of running requests over one of the two backends, and
//! [`RequestFuture`], the handle of one request.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::backend::{Backend, LaneOptions, Wait};
#[cfg(not(shuttle))]
use super::poll_set::PollSet;
use super::request::{Completion, Request};
use super::threads::Threads;
use super::uring::Uring;
use crate::sys::EventFd;
use crate::{Error, ErrorKind, Result};

enum Driver {
    Uring(Box<Uring>),
    Threads(Threads),
}

enum Slot {
    /// Index of the next free slot, if any.
    Free(Option<u32>),
    /// Running; the handle waits with this waker.
    Running(Option<Waker>),
    /// Running; nobody wants the result.
    Abandoned,
    /// Over; the handle has not taken the result yet.
    Done(Completion),
}

struct Inner {
    /// `None` after the shutdown.
    driver: Option<Driver>,
    slots: Vec<Slot>,
    first_free: Option<u32>,
    /// Kept for its memory.
    finished: Vec<(u32, Completion)>,
}

/// Requests in flight on one thread.
pub(crate) struct Reactor {
    inner: RefCell<Inner>,
    backend: Backend,
}

impl Reactor {
    /// A reactor as `options` say; `event` wakes it up.
    pub(crate) fn new(options: &LaneOptions, event: &Arc<EventFd>) -> Result<Self> {
        let (driver, backend) = open_driver(options, event)?;
        let inner = Inner {
            driver: Some(driver),
            slots: Vec::new(),
            first_free: None,
            finished: Vec::new(),
        };
        Ok(Reactor {
            inner: RefCell::new(inner),
            backend,
        })
    }

    /// What the reactor runs on; never `Auto`.
    pub(crate) fn backend(&self) -> Backend {
        self.backend
    }

    /// Whether commands of devices can be started.
    pub(crate) fn takes_commands(&self) -> bool {
        match &self.inner.borrow().driver {
            Some(Driver::Uring(uring)) => uring.takes_commands(),
            _ => false,
        }
    }

    /// Starts a request; `finish` turns its end into the caller's result.
    pub(crate) fn start<T>(
        self: &Rc<Self>,
        request: Request,
        finish: fn(Completion) -> Result<T>,
    ) -> RequestFuture<T> {
        let mut inner = self.inner.borrow_mut();
        let slot = inner.take_slot();
        match &mut inner.driver {
            Some(Driver::Uring(uring)) => uring.start(slot, request),
            Some(Driver::Threads(threads)) => threads.start(slot, request),
            None => {
                let done = Completion {
                    request,
                    result: Err(libc::ECANCELED),
                };
                inner.slots[slot as usize] = Slot::Done(done);
            }
        }
        RequestFuture {
            reactor: self.clone(),
            slot,
            finish,
        }
    }

    /// Submits what was started, waits as told, calls `awake`, and wakes whose
    /// request is over.
    pub(crate) fn turn(&self, wait: Wait, awake: impl FnOnce()) {
        let mut inner = self.inner.borrow_mut();
        let mut finished = std::mem::take(&mut inner.finished);
        match &mut inner.driver {
            Some(Driver::Uring(uring)) => uring.turn(wait, &mut finished),
            Some(Driver::Threads(threads)) => threads.turn(wait, &mut finished),
            None => {}
        }
        drop(inner);
        awake();
        for (slot, done) in finished.drain(..) {
            self.finish(slot, done);
        }
        self.inner.borrow_mut().finished = finished;
    }

    /// Files a result. Wakers and abandoned results are touched outside the
    /// borrow: both may run anybody's code.
    fn finish(&self, slot: u32, done: Completion) {
        let mut inner = self.inner.borrow_mut();
        match std::mem::replace(&mut inner.slots[slot as usize], Slot::Abandoned) {
            Slot::Running(waker) => {
                inner.slots[slot as usize] = Slot::Done(done);
                drop(inner);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            Slot::Abandoned | Slot::Done(_) | Slot::Free(_) => {
                inner.release(slot);
                drop(inner);
                drop(done);
            }
        }
    }

    /// The handle is gone: abandon the result, or drop it if it is there.
    fn abandon(&self, slot: u32) {
        let mut inner = self.inner.borrow_mut();
        let mut finished = Vec::new();
        let old = std::mem::replace(&mut inner.slots[slot as usize], Slot::Abandoned);
        match &old {
            Slot::Running(_) => inner.give_up(slot, &mut finished),
            _ => inner.release(slot),
        }
        drop(inner);
        drop(old);
        for (slot, done) in finished {
            self.finish(slot, done);
        }
    }

    /// Has `set` told whenever a turn would find something.
    #[cfg(not(shuttle))]
    pub(crate) fn join_poll_set(&self, set: &Rc<PollSet>) -> std::io::Result<()> {
        match &mut self.inner.borrow_mut().driver {
            Some(Driver::Uring(uring)) => uring.join_poll_set(set),
            Some(Driver::Threads(threads)) => {
                threads.join_poll_set(set);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// No turn comes until the poll set says that there is something to do: whatever is
    /// started meanwhile must not wait for one.
    #[cfg(not(shuttle))]
    pub(crate) fn park(&self) {
        match &mut self.inner.borrow_mut().driver {
            Some(Driver::Uring(uring)) => uring.park(),
            Some(Driver::Threads(threads)) => threads.park(),
            None => {}
        }
    }

    /// Ends [`Reactor::park`]: turns follow.
    #[cfg(not(shuttle))]
    pub(crate) fn unpark(&self) {
        match &mut self.inner.borrow_mut().driver {
            Some(Driver::Uring(uring)) => uring.unpark(),
            Some(Driver::Threads(threads)) => threads.unpark(),
            None => {}
        }
    }

    /// Waits for everything in flight; later requests fail.
    pub(crate) fn shut_down(&self) {
        let driver = self.inner.borrow_mut().driver.take();
        // Dropping a driver cancels or collects all that it has.
        drop(driver);
    }
}

impl Inner {
    fn take_slot(&mut self) -> u32 {
        let slot = match self.first_free {
            Some(slot) => slot,
            None => {
                self.slots.push(Slot::Free(None));
                (self.slots.len() - 1) as u32
            }
        };
        let old = std::mem::replace(&mut self.slots[slot as usize], Slot::Running(None));
        self.first_free = if let Slot::Free(next) = old {
            next
        } else {
            None
        };
        slot
    }

    fn release(&mut self, slot: u32) {
        self.slots[slot as usize] = Slot::Free(self.first_free.replace(slot));
    }

    /// Cancels a request if it might never end without somebody who waits for it.
    fn give_up(&mut self, slot: u32, finished: &mut Vec<(u32, Completion)>) {
        match &mut self.driver {
            Some(Driver::Uring(uring)) => uring.abandon(slot),
            Some(Driver::Threads(threads)) => threads.abandon(slot, finished),
            None => {}
        }
    }
}

fn open_driver(options: &LaneOptions, event: &Arc<EventFd>) -> Result<(Driver, Backend)> {
    let wanted = options.backend.resolve();
    if wanted != Backend::Threads {
        match Uring::new(options, event.clone()) {
            Ok(uring) => return Ok((Driver::Uring(Box::new(uring)), Backend::IoUring)),
            Err(error) if wanted == Backend::IoUring => {
                return Err(Error::from_io("set up io_uring", &error));
            }
            Err(_) => {}
        }
    }
    Ok((
        Driver::Threads(Threads::new(event.clone())),
        Backend::Threads,
    ))
}

/// The only handle of one running request.
pub(crate) struct RequestFuture<T> {
    reactor: Rc<Reactor>,
    slot: u32,
    finish: fn(Completion) -> Result<T>,
}

/// The slot of a handle whose result was taken.
const TAKEN: u32 = u32::MAX;

impl<T> Future for RequestFuture<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        assert!(self.slot != TAKEN, "a completed request was polled again");
        let mut inner = self.reactor.inner.borrow_mut();
        let state = &mut inner.slots[self.slot as usize];
        if let Slot::Running(waker) = state {
            match waker {
                Some(waker) => waker.clone_from(context.waker()),
                None => *waker = Some(context.waker().clone()),
            }
            return Poll::Pending;
        }
        let state = std::mem::replace(state, Slot::Abandoned);
        inner.release(self.slot);
        drop(inner);
        self.slot = TAKEN;
        Poll::Ready(match state {
            Slot::Done(done) => (self.finish)(done),
            _ => Err(Error::new(ErrorKind::Io, "wait", "the request is lost")),
        })
    }
}

impl<T> Drop for RequestFuture<T> {
    fn drop(&mut self) {
        if self.slot != TAKEN {
            self.reactor.abandon(self.slot);
        }
    }
}
