//! Several lanes on one thread, and a disk, that take turns as a seed says.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use vellum_storage::executor::Executor;

use crate::disk::Disk;
use crate::rng::Rng;
use crate::schedule::Scheduler;
use crate::world::Stuck;

/// The lanes of a daemon; the first one is its own.
pub(super) struct Lanes {
    executors: Vec<Executor>,
    rng: RefCell<Rng>,
}

impl Lanes {
    pub(super) fn new(count: usize, seed: u64) -> Rc<Lanes> {
        Rc::new(Lanes {
            executors: (0..count).map(|_| Executor::new(|| {})).collect(),
            rng: RefCell::new(Rng::new(seed)),
        })
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
        (0..count).any(|next| {
            let lane = &self.executors[(first + next) % count];
            lane.enter(|| lane.run_batch())
        })
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
    ) -> Result<Option<T>, Stuck> {
        let result = Rc::new(RefCell::new(None));
        let slot = result.clone();
        drop(self.own().spawn(async move {
            let value = future.await;
            *slot.borrow_mut() = Some(value);
        }));
        let mut steps = 0;
        loop {
            if let Some(value) = result.borrow_mut().take() {
                return Ok(Some(value));
            }
            // The disk does not wait until everybody has had a turn.
            let early = disk.in_flight() > 0 && self.rng.borrow_mut().chance(1, 6);
            if !early && self.turn() {
                continue;
            }
            if disk.in_flight() == 0 {
                return Err(Stuck);
            }
            if !before_step(steps) {
                return Ok(None);
            }
            disk.complete_one(scheduler);
            steps += 1;
        }
    }
}
