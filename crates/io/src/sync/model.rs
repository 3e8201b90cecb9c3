//! What shuttle does not have, and how tests run under it.
//!
//! Shuttle changes threads only before what it knows of: its own locks and atomics. So
//! [`Event`], whose inside is the real one, has such a point before each call; what it does
//! inside is one step. Wakers that shuttle's `block_on` gives take no locks, so the event may
//! use them while it holds its own.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use event_listener::{EventListener, IntoNotification};
use shuttle::rand::Rng;
use shuttle::scheduler::{DfsScheduler, PctScheduler, RandomScheduler};
use shuttle::sync::{Condvar as ShuttleCondvar, Mutex as ShuttleMutex};
use shuttle::thread::JoinHandle;
use shuttle::{Config, MaxSteps, Runner};

pub use shuttle::future::block_on;

/// How often a test runs under each scheduler, unless the environment says otherwise.
const TIMES: usize = 1000;
/// A test that takes so many steps goes round in circles.
const MAX_STEPS: usize = 100_000;
/// How many changes of threads in unlucky places a failure may need.
const DEPTH: usize = 3;
/// Frames of tests' builds are large.
const STACK_BYTES: usize = 512 << 10;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Runs a test over and over, with other turns each time: random ones, few changes in unlucky
/// places, and from the first on one by one. What fails is printed with its schedule, which
/// `VELLUM_SCHEDULE` repeats. `VELLUM_INTERLEAVINGS` says how often, `VELLUM_SEED` which.
pub fn explore(test: impl Fn() + Send + Sync + 'static) {
    if let Ok(schedule) = std::env::var("VELLUM_SCHEDULE") {
        return shuttle::replay(test, &schedule);
    }
    let times = number("VELLUM_INTERLEAVINGS").map_or(TIMES, |times| times as usize);
    let seed = number("VELLUM_SEED").unwrap_or(0x5eed);
    let mut config = Config::new();
    config.max_steps = MaxSteps::FailAfter(MAX_STEPS);
    config.stack_size = STACK_BYTES;
    config.silence_warnings = true;
    let test = std::sync::Arc::new(test);
    let again = || {
        let test = test.clone();
        move || test()
    };
    let random = RandomScheduler::new_from_seed(seed, times);
    Runner::new(random, config.clone()).run(again());
    let unlucky = PctScheduler::new_from_seed(seed, DEPTH, times);
    Runner::new(unlucky, config.clone()).run(again());
    let in_order = DfsScheduler::new(Some(times), true);
    Runner::new(in_order, config).run(again());
}

/// Waits for the end of threads that do not fail.
pub fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("a thread that fails ends the test");
    }
}

/// A moment at which the turn may go to another thread.
pub fn point() {
    shuttle::thread::sleep(Duration::ZERO);
}

/// A number below `below` that the schedule decides.
pub fn chance(below: usize) -> usize {
    shuttle::rand::thread_rng().gen_range(0..below)
}

/// As [`event_listener::Event`].
#[derive(Debug, Default)]
pub struct Event(event_listener::Event);

impl Event {
    /// One that nobody listens to.
    pub const fn new() -> Self {
        Event(event_listener::Event::new())
    }

    /// As the real one.
    pub fn listen(&self) -> EventListener {
        point();
        self.0.listen()
    }

    /// As the real one.
    pub fn notify(&self, count: impl IntoNotification<Tag = ()>) -> usize {
        point();
        self.0.notify(count)
    }
}

/// As [`parking_lot::Mutex`].
#[derive(Debug, Default)]
pub struct Mutex<T>(ShuttleMutex<T>);

/// As [`parking_lot::MutexGuard`]; `None` only while a [`Condvar`] has it.
#[derive(Debug)]
pub struct MutexGuard<'a, T>(Option<shuttle::sync::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    /// One that nobody holds.
    pub const fn new(value: T) -> Self {
        Mutex(ShuttleMutex::new(value))
    }

    /// As the real one.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        MutexGuard(Some(guard))
    }

    /// As the real one.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("nobody waits with it")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("nobody waits with it")
    }
}

/// As [`parking_lot::Condvar`]; time passes when a test says so, and then for ever.
#[derive(Debug)]
pub struct Condvar {
    inner: ShuttleCondvar,
    late: std::sync::atomic::AtomicBool,
}

/// As [`parking_lot::WaitTimeoutResult`].
#[derive(Debug, Clone, Copy)]
pub struct Timeout(bool);

impl Timeout {
    /// Whether the time is over.
    pub fn timed_out(&self) -> bool {
        self.0
    }
}

impl Default for Condvar {
    fn default() -> Self {
        Self::new()
    }
}

impl Condvar {
    /// One that nobody waits for.
    pub const fn new() -> Self {
        Condvar {
            inner: ShuttleCondvar::new(),
            late: std::sync::atomic::AtomicBool::new(false),
        }
    }

    fn is_late(&self) -> bool {
        self.late.load(std::sync::atomic::Ordering::SeqCst)
    }

    /// As the real one, with a time that is over once [`Condvar::let_time_pass`] was called.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _time: Duration) -> Timeout {
        if !self.is_late() {
            self.wait(guard);
        }
        Timeout(self.is_late())
    }

    /// As the real one.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let held = guard.0.take().expect("nobody waits with it");
        let held = self.inner.wait(held);
        guard.0 = Some(held.unwrap_or_else(PoisonError::into_inner));
    }

    /// As the real one.
    pub fn notify_one(&self) {
        self.inner.notify_one();
    }

    /// As the real one.
    pub fn notify_all(&self) {
        self.inner.notify_all();
    }

    /// Ends all waits, also those to come. For whoever holds the lock: nobody else is then
    /// between a look at the time and the wait.
    pub fn let_time_pass(&self) {
        point();
        self.late.store(true, std::sync::atomic::Ordering::SeqCst);
        self.inner.notify_all();
    }
}

/// The kernel's counter that wakes whoever waits for it.
#[derive(Debug)]
pub struct EventFd {
    count: Mutex<u64>,
    signalled: Condvar,
}

impl EventFd {
    /// A counter at zero.
    ///
    /// # Errors
    /// None, other than the real one.
    pub fn new() -> Result<Self, i32> {
        Ok(EventFd {
            count: Mutex::new(0),
            signalled: Condvar::new(),
        })
    }

    fn count(&self) -> MutexGuard<'_, u64> {
        self.count.lock()
    }

    /// No descriptor.
    pub fn raw(&self) -> i32 {
        -1
    }

    /// Adds one.
    pub fn signal(&self) {
        *self.count() += 1;
        self.signalled.notify_all();
    }

    /// Takes the count.
    pub fn drain(&self) {
        *self.count() = 0;
    }

    /// Waits for a count; with a deadline, not at all. Returns whether there is one.
    pub fn wait(&self, deadline: Option<Instant>) -> bool {
        let mut count = self.count();
        while *count == 0 && deadline.is_none() {
            self.signalled.wait(&mut count);
        }
        *count > 0
    }
}
