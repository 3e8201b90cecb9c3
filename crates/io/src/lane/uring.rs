//! The io_uring backend of a lane.
//!
//! Invariants that the `unsafe` here rests on:
//! - An entry of `entries` stays where it is, boxed, as long as the driver; its
//!   request is neither moved nor dropped while the kernel works on it:
//!   [`Uring::finish`] is the only place that takes one out.
//! - The driver is never dropped with entries in the kernel: `Drop` cancels what
//!   could wait forever and collects all the rest. Commands, which only the kernel ends, go
//!   with the ring, which is dropped before their entries are.

use std::collections::VecDeque;
use std::io;
#[cfg(not(shuttle))]
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use io_uring::types::Fd;
use io_uring::{opcode, squeue};

use super::backend::{LaneOptions, Wait};
use super::op::Op;
#[cfg(not(shuttle))]
use super::poll_set::{Counter, PollSet};
use super::request::{Completion, Request, Step};
use super::ring::Ring;
use super::submission::Memory;
use super::workers::{self, CompletionQueue};
use crate::sys::{Errno, EventFd};

/// The completion of the read that waits for the event counter.
const EVENT: u64 = u64::MAX;
/// The completion of a cancellation; nobody waits for it.
const CANCEL: u64 = u64::MAX - 1;

/// Most submissions that wait for the end of a turn.
const MAX_BATCH: usize = 16;

/// A slot's request, and what the kernel may point into while it works on it.
struct Entry {
    /// Present while the request is here.
    request: Option<Request>,
    memory: Memory,
    /// The kernel waits for readiness, not for the request itself.
    polling: bool,
    /// Given up: it must not be tried again.
    cancelled: bool,
}

/// One thread's ring.
pub(crate) struct Uring {
    /// Dropped before `entries`. Rule 10: the memory of commands that still wait outlives it.
    ring: Ring,
    /// By slot, used again and again. The boxes must not move with the vector.
    #[allow(clippy::vec_box)]
    entries: Vec<Box<Entry>>,
    /// Slots whose requests found `limit` others in the kernel.
    backlog: VecDeque<u32>,
    /// Requests that the kernel has and that end by themselves.
    in_kernel: usize,
    limit: usize,
    /// Requests that the kernel has and that wait for others, without commands. They take nobody's
    /// turn: any number of idle clients may be waited for.
    waiting: usize,
    /// Completions that were taken to make room for others.
    early: VecDeque<(u64, i64)>,
    /// Calls that workers have.
    at_workers: usize,
    mailbox: Arc<CompletionQueue>,
    event: Arc<EventFd>,
    event_count: Box<u64>,
    event_armed: bool,
    /// Signalled by the kernel when a completion arrives, for a foreign event loop.
    #[cfg(not(shuttle))]
    completions: Option<Counter>,
    /// No turn comes soon: what is pushed goes to the kernel at once.
    parked: bool,
}

impl Uring {
    /// Sets up a ring; fails where the kernel refuses io_uring.
    pub(crate) fn new(options: &LaneOptions, event: Arc<EventFd>) -> io::Result<Self> {
        let wide = options
            .commands
            .then(|| Ring::wide(options.ring_entries).ok());
        let ring = match wide.flatten() {
            Some(ring) => ring,
            None => Ring::narrow(options.ring_entries)?,
        };
        let limit = ring.completion_room();
        Ok(Uring {
            ring,
            entries: Vec::new(),
            backlog: VecDeque::new(),
            in_kernel: 0,
            limit,
            waiting: 0,
            early: VecDeque::new(),
            at_workers: 0,
            mailbox: Arc::new(CompletionQueue::new(event.clone())),
            event,
            event_count: Box::new(0),
            event_armed: false,
            #[cfg(not(shuttle))]
            completions: None,
            parked: false,
        })
    }

    /// Whether commands of devices can be started.
    pub(crate) fn takes_commands(&self) -> bool {
        self.ring.is_wide()
    }

    /// Starts a request under a free slot.
    pub(crate) fn start(&mut self, slot: u32, request: Request) {
        // A worker says that there is no such call.
        let is_strange = request.op.is_command() && !self.takes_commands();
        if request.op.needs_worker() || is_strange {
            self.at_workers += 1;
            workers::submit(request, slot, &self.mailbox);
            return;
        }
        let index = slot as usize;
        while index >= self.entries.len() {
            self.entries.push(Box::new(Entry::free()));
        }
        let entry = &mut self.entries[index];
        entry.request = Some(request);
        (entry.polling, entry.cancelled) = (false, false);
        self.submit(slot);
    }

    /// Gives up a request that nobody waits for, if it might never end.
    pub(crate) fn abandon(&mut self, slot: u32) {
        let entry = self.entries.get(slot as usize);
        let request = entry.and_then(|entry| entry.request.as_ref());
        if request.is_some_and(|request| request.op.is_cancelled_on_drop()) {
            self.cancel(slot);
        }
    }

    /// Asks the kernel to give up a request; its completion still comes.
    fn cancel(&mut self, slot: u32) {
        self.entries[slot as usize].cancelled = true;
        if let Some(at) = self.backlog.iter().position(|&waiting| waiting == slot) {
            // Never started: starting it is harmless, and then it can be cancelled.
            self.backlog.remove(at);
            self.push_slot(slot);
        }
        let entry = opcode::AsyncCancel::new(u64::from(slot))
            .build()
            .user_data(CANCEL);
        self.push(&entry);
    }

    /// Hands a slot's request to the kernel, or to the backlog if it is too busy.
    fn submit(&mut self, slot: u32) {
        let request = self.entries[slot as usize].request.as_ref();
        let waits = request.is_some_and(|request| request.op.waits_for_others());
        if waits || self.in_kernel < self.limit && self.backlog.is_empty() {
            self.push_slot(slot);
        } else {
            self.backlog.push_back(slot);
        }
    }

    fn push_slot(&mut self, slot: u32) {
        let entry = &mut *self.entries[slot as usize];
        let Some(request) = &mut entry.request else {
            return;
        };
        if let Op::FuseEntry(command) = request.op {
            let command = entry.memory.command(request, command);
            let command = command.user_data(u64::from(slot));
            // SAFETY: as in `push`.
            self.push_by(|ring| unsafe { ring.push_command(&command) });
            return;
        }
        if matches!(request.op, Op::ReceiveMessage) && !entry.polling {
            match request.attempt() {
                Err(libc::EAGAIN) => entry.polling = true,
                answer => return self.end_at_once(slot, answer),
            }
        }
        let submission = match entry.polling {
            true => Memory::readiness(request),
            false => entry.memory.rest(request),
        };
        let submission = submission.user_data(u64::from(slot));
        match request.op.waits_for_others() {
            true => self.waiting += 1,
            false => self.in_kernel += 1,
        }
        self.push(&submission);
    }

    /// Ends a request that never went to the kernel's ring, as one that did.
    fn end_at_once(&mut self, slot: u32, answer: Result<i64, Errno>) {
        self.waiting += 1;
        let result = answer.unwrap_or_else(|errno| -i64::from(errno));
        self.early.push_back((u64::from(slot), result));
        if self.parked {
            self.event.signal();
        }
    }

    /// Queues a submission; what it points to stays in place until its completion.
    fn push(&mut self, submission: &squeue::Entry) {
        // SAFETY: the submission points into a boxed entry of `self.entries`, the buffers that
        // it owns, or `self.event_count`; all stay where they are until the completion (see the
        // module's head).
        self.push_by(|ring| unsafe { ring.push(submission) });
    }

    fn push_by(&mut self, push: impl Fn(&mut Ring) -> bool) {
        while !push(&mut self.ring) {
            // Full: hand over what is there. EAGAIN passes; EBUSY says, before Linux 5.19, that
            // completions are in the way.
            if self.ring.submit().is_err() {
                self.early.extend(self.ring.next_completion());
            }
        }
        if self.parked || self.is_batch() {
            self.hand_over();
        }
    }

    /// Whether enough is queued to hand it over before the turn ends. A disk with little to do
    /// starts on the first of many requests while the others are still being made; one with much
    /// to do waits for no one, and gets them in fewer calls.
    fn is_batch(&mut self) -> bool {
        let queued = self.ring.queued();
        let in_kernel = self.in_kernel.saturating_sub(queued);
        queued >= (in_kernel / 4).clamp(2, MAX_BATCH)
    }

    /// Submits all that is queued. What the kernel refuses for now is left to a turn.
    fn hand_over(&mut self) {
        if self.ring.queued() > 0 && self.ring.submit().is_err() {
            self.event.signal();
        }
    }

    /// Submits, waits as told, and collects what has finished.
    pub(crate) fn turn(&mut self, wait: Wait, finished: &mut Vec<(u32, Completion)>) {
        self.arm_event();
        if let Err(errno) = self.enter(wait) {
            debug_assert!(
                matches!(
                    errno,
                    libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME
                ),
                "io_uring_enter: {errno}"
            );
        }
        self.collect(finished);
        self.push_backlog();
    }

    fn push_backlog(&mut self) {
        while self.in_kernel < self.limit
            && let Some(slot) = self.backlog.pop_front()
        {
            self.push_slot(slot);
        }
    }

    /// See [`super::reactor::Reactor::join_poll_set`]. A registered counter, for polling the
    /// ring itself says nothing of completions that the kernel defers to the next turn.
    #[cfg(not(shuttle))]
    pub(crate) fn join_poll_set(&mut self, set: &PollSet) -> io::Result<()> {
        let completions = Counter::new()?;
        self.ring
            .register_eventfd(completions.as_fd().as_raw_fd())?;
        set.add(completions.as_fd())?;
        self.completions = Some(completions);
        Ok(())
    }

    /// See [`super::reactor::Reactor::park`].
    #[cfg(not(shuttle))]
    pub(crate) fn park(&mut self) {
        let Some(completions) = &self.completions else {
            return;
        };
        // Before the look at the queue: what arrives after that counts anew.
        completions.drain();
        self.parked = true;
        self.arm_event();
        self.push_backlog();
        self.hand_over();
        if self.ring.holds_back() || self.has_completions() {
            self.event.signal();
        }
    }

    /// See [`super::reactor::Reactor::unpark`].
    #[cfg(not(shuttle))]
    pub(crate) fn unpark(&mut self) {
        self.parked = false;
    }

    fn enter(&mut self, wait: Wait) -> Result<(), Errno> {
        let wait = match self.has_completions() {
            true => Wait::No,
            false => wait,
        };
        if matches!(wait, Wait::No) && self.ring.queued() == 0 && !self.ring.holds_back() {
            return Ok(());
        }
        let result = self.ring.submit_and_wait(wait);
        result
            .map(drop)
            .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }

    fn arm_event(&mut self) {
        if self.event_armed {
            return;
        }
        self.event_armed = true;
        let count: *mut u64 = &raw mut *self.event_count;
        let read = opcode::Read::new(Fd(self.event.raw()), count.cast(), 8).offset(u64::MAX);
        self.push(&read.build().user_data(EVENT));
    }

    fn has_completions(&mut self) -> bool {
        !self.early.is_empty() || self.ring.has_completions()
    }

    fn next_completion(&mut self) -> Option<(u64, i64)> {
        let early = self.early.pop_front();
        early.or_else(|| self.ring.next_completion())
    }

    fn collect(&mut self, finished: &mut Vec<(u32, Completion)>) {
        while let Some((whose, result)) = self.next_completion() {
            match whose {
                CANCEL => {}
                EVENT => self.event_armed = false,
                slot => self.complete(slot as u32, result, finished),
            }
        }
        if self.at_workers > 0 {
            self.at_workers -= self.mailbox.take(finished);
        }
    }

    fn complete(&mut self, slot: u32, result: i64, finished: &mut Vec<(u32, Completion)>) {
        let entry = &mut *self.entries[slot as usize];
        let Some(request) = &mut entry.request else {
            return;
        };
        match () {
            () if request.op.is_command() => {}
            () if request.op.waits_for_others() => self.waiting -= 1,
            () => self.in_kernel -= 1,
        }
        let result = if result < 0 {
            Err(-result as Errno)
        } else {
            Ok(result)
        };
        let is_poll = matches!(request.op, Op::Poll { .. });
        if std::mem::take(&mut entry.polling) && !is_poll && result.is_ok() {
            return self.submit(slot);
        }
        let cancelled = entry.cancelled;
        if result == Err(libc::ECANCELED) && !cancelled && request.op.blocks_in_kernel() {
            return self.leave_to_worker(slot);
        }
        match request.advance(result) {
            Step::Finished(result) => self.finish(slot, result, finished),
            _ if cancelled => self.finish(slot, Err(libc::ECANCELED), finished),
            Step::Again => self.submit(slot),
            Step::WhenReady => {
                entry.polling = true;
                self.submit(slot);
            }
        }
    }

    /// Has a worker do what the kernel dropped undone: it drops a request that blocks if it can start no
    /// thread for it (`ulimit -u`, `pids.max`).
    fn leave_to_worker(&mut self, slot: u32) {
        if let Some(request) = self.entries[slot as usize].request.take() {
            self.at_workers += 1;
            workers::submit(request, slot, &self.mailbox);
        }
    }

    fn finish(
        &mut self,
        slot: u32,
        result: Result<i64, Errno>,
        finished: &mut Vec<(u32, Completion)>,
    ) {
        if let Some(request) = self.entries[slot as usize].request.take() {
            finished.push((slot, Completion { request, result }));
        }
    }

    fn busy(&self) -> bool {
        self.in_kernel + self.waiting + self.at_workers > 0 || !self.backlog.is_empty()
    }

    /// Cancels what could wait forever and waits for all the rest but commands.
    pub(crate) fn shut_down(&mut self) {
        self.hand_over();
        let endless: Vec<u32> = (0_u32..)
            .zip(&self.entries)
            .filter(|(_, entry)| {
                let request = entry.request.as_ref();
                request.is_some_and(|request| request.op.waits_for_others())
            })
            .map(|(slot, _)| slot)
            .collect();
        for slot in endless {
            self.cancel(slot);
        }
        let mut finished = Vec::new();
        while self.busy() {
            self.turn(Wait::Forever, &mut finished);
            finished.clear();
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.shut_down();
        // The event counter's read is still in the kernel: complete it, so that
        // nothing writes to `event_count` after it is freed.
        while self.event_armed {
            self.event.signal();
            let _ = self.enter(Wait::Forever);
            self.collect(&mut Vec::new());
        }
    }
}

impl Entry {
    /// An entry without a request.
    fn free() -> Self {
        Entry {
            request: None,
            memory: Memory::new(),
            polling: false,
            cancelled: false,
        }
    }
}
