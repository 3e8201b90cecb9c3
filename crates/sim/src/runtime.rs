//! A runtime without time: an executor and a disk that take turns.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use vellum_io::executor::Executor;

use crate::disk::Disk;
use crate::schedule::Scheduler;

/// Nothing can run, and what was asked for is not done: somebody waits for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlock;

/// Runs futures against a disk; see the module's head.
pub struct Runtime {
    executor: Executor,
    disk: Arc<Disk>,
    scheduler: Scheduler,
    steps: u64,
}

impl Runtime {
    /// A runtime whose requests complete in the order of `schedule_seed`.
    pub fn new(disk: Arc<Disk>, schedule_seed: u64) -> Self {
        let scheduler = Scheduler::new(schedule_seed);
        Runtime {
            executor: Executor::new(|| {}),
            disk,
            scheduler,
            steps: 0,
        }
    }

    /// How many requests have completed.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Runs a future to its end.
    pub fn block_on<T: 'static>(
        &mut self,
        future: impl Future<Output = T> + 'static,
    ) -> Result<T, Deadlock> {
        self.run_observed(future, &mut |_, _| true)
            .map(|done| done.expect("nobody stopped it"))
    }

    /// Runs a future and calls `before_step` with the number of the step before
    /// each completion of a request; stops, with `None`, when that returns `false`.
    pub fn run_observed<T: 'static>(
        &mut self,
        future: impl Future<Output = T> + 'static,
        before_step: &mut dyn FnMut(u64, &Disk) -> bool,
    ) -> Result<Option<T>, Deadlock> {
        let result = Rc::new(RefCell::new(None));
        let slot = result.clone();
        drop(self.executor.spawn(async move {
            let value = future.await;
            *slot.borrow_mut() = Some(value);
        }));
        loop {
            self.executor.run_ready();
            if let Some(value) = result.borrow_mut().take() {
                return Ok(Some(value));
            }
            if self.disk.in_flight() == 0 {
                return Err(Deadlock);
            }
            if !before_step(self.steps, &self.disk) {
                return Ok(None);
            }
            self.disk.complete_one(&mut self.scheduler);
            self.steps += 1;
        }
    }

    /// Lets everything that was started come to its end.
    pub fn finish_all(&mut self) {
        loop {
            self.executor.run_ready();
            if !self.disk.complete_one(&mut self.scheduler) {
                return;
            }
            self.steps += 1;
        }
    }
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Runtime(step {})", self.steps)
    }
}
