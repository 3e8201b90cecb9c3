//! [`ThrottleGroup`]: limits that storages share, and their waiting requests as futures.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use event_listener::Event;
use futures_util::future::select;
use parking_lot::{Mutex, MutexGuard};

use vellum_io::lane;

use super::buckets::{Direction, ThrottleLimits};
use super::turns::{Admission, Turns};

#[derive(Debug)]
struct State {
    limits: ThrottleLimits,
    turns: Turns,
    members: usize,
    next_member: u64,
}

/// Limits that one or more storages share.
#[derive(Debug)]
pub struct ThrottleGroup {
    name: String,
    state: Mutex<State>,
    waits: AtomicU64,
    waited_ns: AtomicU64,
}

/// How requests have waited for the limits of a group, since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThrottleWaits {
    /// Requests that had to wait, and went on.
    pub requests: u64,
    /// How long they waited, all together.
    pub time: Duration,
}

impl ThrottleGroup {
    /// A group called `name`; `limits` should be [valid](ThrottleLimits::contradiction).
    pub fn new(name: impl Into<String>, limits: ThrottleLimits) -> Arc<Self> {
        Arc::new(ThrottleGroup {
            name: name.into(),
            state: Mutex::new(State {
                limits,
                turns: Turns::new(limits),
                members: 0,
                next_member: 0,
            }),
            waits: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
        })
    }

    /// How requests have waited for it. No lock of a request is taken for that.
    pub fn waits(&self) -> ThrottleWaits {
        ThrottleWaits {
            requests: self.waits.load(Ordering::Relaxed),
            time: Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed)),
        }
    }

    fn note_wait(&self, time: Duration) {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.waited_ns.fetch_add(time_ns, Ordering::Relaxed);
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its limits.
    pub fn limits(&self) -> ThrottleLimits {
        self.lock().limits
    }

    /// Changes its limits, also for requests that wait. They should be
    /// [valid](ThrottleLimits::contradiction).
    pub fn set_limits(&self, limits: ThrottleLimits) {
        let mut state = self.lock();
        state.limits = limits;
        let looking = state.turns.set_limits(limits);
        drop(state);
        for turn in looking {
            turn.notify(usize::MAX);
        }
    }

    /// How many storages keep its limits.
    pub fn members(&self) -> usize {
        self.lock().members
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// A storage's membership of a group.
#[derive(Debug)]
pub(super) struct Member {
    group: Arc<ThrottleGroup>,
    id: u64,
    /// It has not left yet.
    is_in: Mutex<bool>,
    /// How many want its requests to pass.
    lifted: AtomicUsize,
}

impl Member {
    pub(super) fn join(group: Arc<ThrottleGroup>) -> Arc<Member> {
        let id = {
            let mut state = group.lock();
            state.members += 1;
            state.next_member += 1;
            state.next_member
        };
        Arc::new(Member {
            group,
            id,
            is_in: Mutex::new(true),
            lifted: AtomicUsize::new(0),
        })
    }

    #[cfg(test)]
    pub(super) fn group(&self) -> &Arc<ThrottleGroup> {
        &self.group
    }

    /// Ends the membership, once.
    pub(super) fn leave(&self) {
        if std::mem::replace(&mut *self.is_in.lock(), false) {
            self.group.lock().members -= 1;
        }
    }

    pub(super) fn lift(member: &Arc<Member>) -> Lifted {
        member.lifted.fetch_add(1, Ordering::SeqCst);
        let waiting = member.group.lock().turns.of_member(member.id);
        for turn in waiting {
            turn.notify(usize::MAX);
        }
        Lifted(member.clone())
    }

    fn is_lifted(&self) -> bool {
        self.lifted.load(Ordering::SeqCst) > 0
    }

    /// Whether a request need not wait; then it is counted.
    pub(super) fn try_pass(&self, direction: Direction, len_bytes: u64) -> bool {
        let mut state = self.group.lock();
        if self.is_lifted() {
            state.turns.count(direction, len_bytes);
            return true;
        }
        state.turns.try_pass(direction, len_bytes, Instant::now())
    }

    /// Waits until a request may go on, and counts it.
    pub(super) async fn admit(&self, direction: Direction, len_bytes: u64) {
        let begun = lane::now();
        let turn = Arc::new(Event::new());
        let ticket = {
            let mut state = self.group.lock();
            state.turns.queue(self.id, direction, turn.clone())
        };
        let mut place = Place {
            member: self,
            direction,
            ticket: Some(ticket),
        };
        loop {
            let called = turn.listen();
            match place.attempt(len_bytes) {
                Admission::Admitted(next) => {
                    wake(next);
                    self.group
                        .note_wait(lane::now().saturating_duration_since(begun));
                    return;
                }
                Admission::Behind => called.await,
                Admission::Wait(time) => {
                    select(called, pin!(lane::sleep(time))).await;
                }
            }
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leave();
    }
}

fn wake(next: Option<Arc<Event>>) {
    if let Some(turn) = next {
        turn.notify(usize::MAX);
    }
}

/// The requests of a storage pass as long as this is there.
#[derive(Debug)]
pub struct Lifted(Arc<Member>);

impl Drop for Lifted {
    fn drop(&mut self) {
        self.0.lifted.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A place in a line; dropping it leaves the line.
struct Place<'a> {
    member: &'a Member,
    direction: Direction,
    /// `None` once it has left.
    ticket: Option<u64>,
}

impl Place<'_> {
    fn attempt(&mut self, len_bytes: u64) -> Admission {
        let Some(ticket) = self.ticket else {
            return Admission::Admitted(None);
        };
        let place = (self.member.id, self.direction, ticket);
        let mut state = self.member.group.lock();
        let admission = match self.member.is_lifted() {
            true => {
                state.turns.count(self.direction, len_bytes);
                Admission::Admitted(state.turns.remove(place))
            }
            false => state.turns.attempt(place, len_bytes, Instant::now()),
        };
        if matches!(admission, Admission::Admitted(_)) {
            self.ticket = None;
        }
        admission
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            let place = (self.member.id, self.direction, ticket);
            let next = self.member.group.lock().turns.remove(place);
            wake(next);
        }
    }
}
