//! The backend of a lane without io_uring: worker threads for files, `ppoll(2)`
//! for sockets and for everything that wakes the lane.

#[cfg(not(shuttle))]
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::backend::Wait;
#[cfg(not(shuttle))]
use super::poll_set::PollSet;
use super::request::{Completion, Request, Step};
use super::workers::{self, CompletionQueue};
use crate::sys::{self, EventFd};

/// One thread's requests at workers and on sockets.
pub(crate) struct Threads {
    at_workers: usize,
    mailbox: Arc<CompletionQueue>,
    event: Arc<EventFd>,
    /// Socket requests that have not been tried yet.
    fresh: Vec<(u32, Request)>,
    /// Socket requests that wait until their descriptor is ready.
    waiting: Vec<(u32, Request)>,
    /// The descriptors of `waiting` in order, and the event counter at the end.
    set: Vec<libc::pollfd>,
    #[cfg(not(shuttle))]
    poll_set: Option<Rc<PollSet>>,
    /// No turn comes soon; the descriptors of `waiting` are in `poll_set`.
    parked: bool,
}

impl Threads {
    /// A backend that wakes up when `event` is signalled.
    pub(crate) fn new(event: Arc<EventFd>) -> Self {
        Threads {
            at_workers: 0,
            mailbox: Arc::new(CompletionQueue::new(event.clone())),
            event,
            fresh: Vec::new(),
            waiting: Vec::new(),
            set: Vec::new(),
            #[cfg(not(shuttle))]
            poll_set: None,
            parked: false,
        }
    }

    /// Starts a request.
    pub(crate) fn start(&mut self, slot: u32, request: Request) {
        if request.op.readiness().is_some() {
            self.fresh.push((slot, request));
            if self.parked {
                self.event.signal();
            }
        } else {
            self.at_workers += 1;
            workers::submit(request, slot, &self.mailbox);
        }
    }

    /// Gives up a request that nobody waits for, if it might never end.
    pub(crate) fn abandon(&mut self, slot: u32, finished: &mut Vec<(u32, Completion)>) {
        #[cfg(not(shuttle))]
        if self.parked {
            // A descriptor must leave the set before it can be closed with its request.
            self.unpark();
            self.event.signal();
        }
        for list in [&mut self.fresh, &mut self.waiting] {
            let found = list.iter().position(|(other, _)| *other == slot);
            if let Some(at) = found.filter(|&at| list[at].1.op.is_cancelled_on_drop()) {
                let (slot, request) = list.swap_remove(at);
                finished.push((
                    slot,
                    Completion {
                        request,
                        result: Err(libc::ECANCELED),
                    },
                ));
                return;
            }
        }
    }

    /// Tries what can go on, waits as told, and collects what has finished.
    pub(crate) fn turn(&mut self, wait: Wait, finished: &mut Vec<(u32, Completion)>) {
        self.try_fresh(finished);
        self.collect(finished);
        let wait = if finished.is_empty() { wait } else { Wait::No };
        let timeout = match wait {
            Wait::No if self.waiting.is_empty() && !self.is_polled_by_others() => return,
            Wait::No => Some(Duration::ZERO),
            Wait::Forever => None,
            Wait::Until(deadline) => Some(deadline.saturating_duration_since(Instant::now())),
        };
        self.poll(timeout);
        self.try_fresh(finished);
        self.collect(finished);
    }

    /// Whether a foreign event loop sees the event counter, which must be drained then.
    fn is_polled_by_others(&self) -> bool {
        #[cfg(not(shuttle))]
        return self.poll_set.is_some();
        #[cfg(shuttle)]
        false
    }

    /// See [`super::reactor::Reactor::join_poll_set`].
    #[cfg(not(shuttle))]
    pub(crate) fn join_poll_set(&mut self, set: &Rc<PollSet>) {
        self.poll_set = Some(set.clone());
    }

    /// See [`super::reactor::Reactor::park`].
    #[cfg(not(shuttle))]
    pub(crate) fn park(&mut self) {
        let Some(set) = &self.poll_set else { return };
        self.parked = true;
        let waiting = self.waiting.iter().map(|(_, request)| request);
        for request in waiting {
            let events = request.op.readiness().unwrap_or_default();
            // What cannot be polled, such as a file, is ready.
            if set.watch(&request.file, events).is_err() {
                self.event.signal();
            }
        }
        if !self.fresh.is_empty() {
            self.event.signal();
        }
    }

    /// See [`super::reactor::Reactor::unpark`].
    #[cfg(not(shuttle))]
    pub(crate) fn unpark(&mut self) {
        self.parked = false;
        if let Some(set) = &self.poll_set {
            set.unwatch_all();
        }
    }

    /// Waits until something wakes the lane; without descriptors there is nothing else.
    #[cfg(shuttle)]
    fn poll(&mut self, timeout: Option<Duration>) {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        if self.event.wait(deadline) {
            self.event.drain();
        }
    }

    /// Waits, and makes the requests fresh whose descriptors have become ready.
    #[cfg(not(shuttle))]
    fn poll(&mut self, timeout: Option<Duration>) {
        let interest = |(_, request): &(u32, Request)| libc::pollfd {
            fd: request.file.raw(),
            events: request.op.readiness().unwrap_or_default(),
            revents: 0,
        };
        let event = libc::pollfd {
            fd: self.event.raw(),
            events: libc::POLLIN,
            revents: 0,
        };
        self.set.clear();
        self.set.extend(self.waiting.iter().map(interest));
        self.set.push(event);
        // An interrupted or refused poll finds nothing ready; the lane comes back.
        if !sys::poll(&mut self.set, timeout).is_ok_and(|ready| ready > 0) {
            return;
        }
        if self.set.pop().is_some_and(|event| event.revents != 0) {
            self.event.drain();
        }
        for at in (0..self.set.len()).rev() {
            if self.set[at].revents != 0 {
                self.fresh.push(self.waiting.swap_remove(at));
            }
        }
    }

    fn try_fresh(&mut self, finished: &mut Vec<(u32, Completion)>) {
        for (slot, mut request) in self.fresh.drain(..) {
            loop {
                let answer = request.attempt();
                match request.advance(answer) {
                    Step::Again => continue,
                    Step::WhenReady => self.waiting.push((slot, request)),
                    Step::Finished(result) => finished.push((slot, Completion { request, result })),
                }
                break;
            }
        }
    }

    fn collect(&mut self, finished: &mut Vec<(u32, Completion)>) {
        if self.at_workers > 0 {
            self.at_workers -= self.mailbox.take(finished);
        }
    }

    /// Gives up socket requests and waits for the workers.
    pub(crate) fn shut_down(&mut self) {
        self.fresh.clear();
        self.waiting.clear();
        let mut finished = Vec::new();
        while self.at_workers > 0 {
            self.turn(Wait::Forever, &mut finished);
            finished.clear();
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shut_down();
    }
}
