//! Timers of a lane, and the time: the system's, or that of a simulation ([`Clock`]).

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// When, and a number that tells timers of the same time apart.
type Key = (Instant, u64);

/// Who is to be woken when.
#[derive(Default)]
pub(super) struct Timers {
    waiting: RefCell<BTreeMap<Key, Waker>>,
    last_number: Cell<u64>,
    /// What tells a foreign event loop of the next time while the lane is parked.
    #[cfg(not(shuttle))]
    alarm: RefCell<Option<Rc<super::poll_set::PollSet>>>,
}

impl Timers {
    /// The next time at which somebody is to be woken.
    pub(super) fn next(&self) -> Option<Instant> {
        self.waiting.borrow().keys().next().map(|key| key.0)
    }

    /// Has `alarm` told of the next time, now and whenever it changes; `None`: no more.
    #[cfg(not(shuttle))]
    pub(super) fn set_alarm(&self, alarm: Option<Rc<super::poll_set::PollSet>>) {
        *self.alarm.borrow_mut() = alarm;
        self.update_alarm();
    }

    fn update_alarm(&self) {
        #[cfg(not(shuttle))]
        if let Some(alarm) = &*self.alarm.borrow() {
            alarm.set_alarm(self.next());
        }
    }

    /// Wakes all whose time has come.
    pub(super) fn fire(&self) {
        if self.waiting.borrow().is_empty() {
            return;
        }
        let now = now();
        loop {
            let mut waiting = self.waiting.borrow_mut();
            match waiting.first_entry() {
                Some(first) if first.key().0 <= now => {
                    let waker = first.remove();
                    drop(waiting);
                    waker.wake();
                }
                _ => return,
            }
        }
    }

    fn number(&self) -> u64 {
        self.last_number.set(self.last_number.get() + 1);
        self.last_number.get()
    }
}

/// The time of a simulation. It passes when the simulation says so, and a little whenever
/// somebody looks, so that whatever ends after some time does.
#[derive(Default)]
pub struct Clock {
    timers: Rc<Timers>,
    now: OnceCell<Cell<Instant>>,
}

/// How much passes when somebody looks at a [`Clock`].
const LOOK: Duration = Duration::from_micros(5);

thread_local! {
    static CLOCK: RefCell<Option<Rc<Clock>>> = const { RefCell::new(None) };
}

impl Clock {
    /// A clock that stands.
    pub fn new() -> Rc<Self> {
        Rc::default()
    }

    fn cell(&self) -> &Cell<Instant> {
        self.now.get_or_init(|| Cell::new(Instant::now()))
    }

    /// Makes this the calling thread's clock while `work` runs.
    pub fn enter<T>(self: &Rc<Self>, work: impl FnOnce() -> T) -> T {
        struct Restore(Option<Rc<Clock>>);
        impl Drop for Restore {
            fn drop(&mut self) {
                let before = self.0.take();
                let _ = CLOCK.try_with(|clock| clock.replace(before));
            }
        }
        let before = CLOCK.with(|clock| clock.replace(Some(self.clone())));
        let _restore = Restore(before);
        work()
    }

    /// Lets time pass, and wakes those whose time has come.
    pub fn pass(self: &Rc<Self>, time: Duration) {
        self.cell().set(self.cell().get() + time);
        self.enter(|| self.timers.fire());
    }

    /// Passes to the next time that somebody waits for; `false` if nobody does.
    pub fn pass_to_next(self: &Rc<Self>) -> bool {
        let Some(next) = self.timers.next() else {
            return false;
        };
        self.pass(next.saturating_duration_since(self.cell().get()));
        true
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// The time: what deadlines on a lane are measured by.
pub fn now() -> Instant {
    let simulated = CLOCK.try_with(|clock| {
        let clock = clock.borrow();
        let cell = clock.as_ref()?.cell();
        cell.set(cell.get() + LOOK);
        Some(cell.get())
    });
    simulated.ok().flatten().unwrap_or_else(Instant::now)
}

/// The timers of the calling thread's simulation, if it is in one.
pub(super) fn simulated() -> Option<Rc<Timers>> {
    CLOCK.with(|clock| clock.borrow().as_ref().map(|clock| clock.timers.clone()))
}

/// Waits until a time has come; made by [`super::sleep`].
#[must_use = "a sleep does nothing until it is awaited"]
pub struct Sleep {
    timers: Rc<Timers>,
    key: Key,
}

impl Sleep {
    /// Waits with `timers` until `deadline`.
    pub(super) fn new(timers: Rc<Timers>, deadline: Instant) -> Self {
        let key = (deadline, timers.number());
        Sleep { timers, key }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut waiting = self.timers.waiting.borrow_mut();
        if now() >= self.key.0 {
            waiting.remove(&self.key);
            return Poll::Ready(());
        }
        waiting.insert(self.key, context.waker().clone());
        drop(waiting);
        self.timers.update_alarm();
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let waker = self.timers.waiting.borrow_mut().remove(&self.key);
        drop(waker);
    }
}

impl fmt::Debug for Sleep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sleep until {:?}", self.key.0)
    }
}
