//! Several lanes on one thread, and a disk, that take turns as a seed says.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use vellum_io::executor::{Executor, Remote};
use vellum_io::lane::{self, Clock};

use crate::disk::Disk;
use crate::rng::Rng;
use crate::runtime::Deadlock;
use crate::schedule::Scheduler;

/// What a turn of a lane, and a step of anything else, takes unless a scenario says otherwise.
const MOMENT: Duration = Duration::from_micros(20);

/// So many turns without a step of anything else count as one.
const MOST_TURNS: u64 = 10_000;

/// What goes on beside the lanes and the disk: a network, another machine.
pub(super) trait BackgroundEvents {
    /// Whether a step can be made.
    fn in_flight(&self) -> bool;

    /// Makes a step that the seed picks.
    fn step(&self);

    /// Lets a lane of its own have a turn; whether one had something to do.
    fn turn(&self) -> bool {
        false
    }
}

/// The lanes of a daemon; the first one is its own.
pub(super) struct Lanes {
    executors: Vec<Executor>,
    rng: RefCell<Rng>,
    clock: Rc<Clock>,
    moment: Cell<Duration>,
    beside: RefCell<Vec<Rc<dyn BackgroundEvents>>>,
}

impl Lanes {
    pub(super) fn new(count: usize, seed: u64) -> Rc<Lanes> {
        Rc::new(Lanes {
            executors: (0..count).map(|_| Executor::new(|| {})).collect(),
            rng: RefCell::new(Rng::new(seed)),
            clock: Clock::new(),
            moment: Cell::new(MOMENT),
            beside: RefCell::default(),
        })
    }

    /// Something more takes turns with the lanes.
    pub(super) fn add(&self, beside: Rc<dyn BackgroundEvents>) {
        self.beside.borrow_mut().push(beside);
    }

    /// Sets what a turn takes.
    pub(super) fn set_moment(&self, moment: Duration) {
        self.moment.set(moment);
    }

    /// Starts tasks on the lanes beside the daemon's own.
    pub(super) fn others(&self) -> Vec<Remote> {
        self.executors[1..].iter().map(Executor::remote).collect()
    }

    /// One of the lanes.
    pub(super) fn any(&self) -> &Executor {
        let at = self.rng.borrow_mut().below(self.executors.len() as u64);
        &self.executors[at as usize]
    }

    /// The daemon's own lane.
    pub(super) fn own(&self) -> &Executor {
        &self.executors[0]
    }

    /// Lets one lane that has something to do have a turn.
    fn turn(&self) -> bool {
        let first = self.rng.borrow_mut().below(self.executors.len() as u64) as usize;
        let count = self.executors.len();
        let own = (0..count).any(|next| {
            let number = (first + next) % count;
            lane::set_number(number);
            let lane = &self.executors[number];
            lane.enter(|| lane.run_batch())
        });
        let others = self.beside.borrow().clone();
        others.iter().fold(own, |any, other| other.turn() || any)
    }

    /// Lets the disk, or something beside the lanes, make a step; `false` if all wait.
    fn step(&self, disk: &Disk, scheduler: &mut Scheduler) -> bool {
        let beside = self.beside.borrow().clone();
        let ready: Vec<_> = beside.iter().filter(|other| other.in_flight()).collect();
        let disk_is_ready = disk.in_flight() > 0;
        let choices = ready.len() as u64 + u64::from(disk_is_ready);
        let chosen = match choices {
            // Lanes that never rest may be all there is.
            0 => return self.clock.pass_to_next() || self.turn(),
            1 => 0,
            _ => self.rng.borrow_mut().below(choices) as usize,
        };
        match ready.get(chosen) {
            Some(other) => other.step(),
            None => drop(disk.complete_one(scheduler)),
        }
        self.clock.pass(self.moment.get());
        true
    }

    fn is_waiting_for(&self, disk: &Disk) -> bool {
        let beside = self.beside.borrow();
        disk.in_flight() > 0 || beside.iter().any(|other| other.in_flight())
    }

    /// Drops all tasks as they are: the process is dead.
    pub(super) fn kill(&self) {
        self.executors.iter().for_each(Executor::drop_tasks);
    }

    /// Runs a future on the daemon's lane, and calls `before_step` before each completion of
    /// a request of the disk; stops, with `None`, where that says so.
    pub(super) fn run<T: 'static>(
        &self,
        disk: &Arc<Disk>,
        scheduler: &mut Scheduler,
        future: impl Future<Output = T> + 'static,
        before_step: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Option<T>, Deadlock> {
        let clock = self.clock.clone();
        clock.enter(|| self.run_timed(disk, scheduler, future, before_step))
    }

    fn run_timed<T: 'static>(
        &self,
        disk: &Arc<Disk>,
        scheduler: &mut Scheduler,
        future: impl Future<Output = T> + 'static,
        before_step: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Option<T>, Deadlock> {
        let result = Rc::new(RefCell::new(None));
        let slot = result.clone();
        drop(self.own().spawn(async move {
            let value = future.await;
            *slot.borrow_mut() = Some(value);
        }));
        let (mut steps, mut turns) = (0, 0);
        loop {
            if let Some(value) = result.borrow_mut().take() {
                return Ok(Some(value));
            }
            // The disk does not wait until everybody has had a turn.
            let early = self.is_waiting_for(disk) && self.rng.borrow_mut().chance(1, 6);
            if !early && turns < MOST_TURNS && self.turn() {
                turns += 1;
                self.clock.pass(self.moment.get());
                continue;
            }
            turns = 0;
            if !before_step(steps) {
                return Ok(None);
            }
            if !self.step(disk, scheduler) {
                return Err(Deadlock);
            }
            steps += 1;
        }
    }
}
