//! Thread pools: threads that take jobs from one queue, started as jobs come and ended
//! when none has come for a while.
//!
//! A pool belongs to the process. A job owns all that it needs, so nothing
//! dangles if who gave it goes away first; the answer then goes nowhere.

use std::collections::VecDeque;
use std::time::Duration;

use crate::sync::{Condvar, Mutex, MutexGuard, thread};

/// How long a thread waits for a job before it ends.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// What the threads of a pool do, and how many there are.
pub(super) struct ThreadPool<J> {
    name: &'static str,
    most_threads: usize,
    stack_bytes: usize,
    /// Does one job; must not panic.
    run: fn(J),
    jobs: Mutex<Jobs<J>>,
    arrived: Condvar,
}

struct Jobs<J> {
    waiting: VecDeque<J>,
    threads: usize,
    idle: usize,
}

impl<J: Send> ThreadPool<J> {
    /// A pool without threads yet.
    pub(super) fn new(
        name: &'static str,
        most_threads: usize,
        stack_bytes: usize,
        run: fn(J),
    ) -> Self {
        ThreadPool {
            name,
            most_threads,
            stack_bytes,
            run,
            jobs: Mutex::new(Jobs {
                waiting: VecDeque::new(),
                threads: 0,
                idle: 0,
            }),
            arrived: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Jobs<J>> {
        self.jobs.lock()
    }

    /// Has a thread do `job`.
    pub(super) fn submit(&'static self, job: J) {
        let mut jobs = self.lock();
        jobs.waiting.push_back(job);
        if jobs.idle >= jobs.waiting.len() || jobs.threads == self.most_threads {
            drop(jobs);
            self.arrived.notify_one();
            return;
        }
        jobs.threads += 1;
        drop(jobs);
        let builder = thread::Builder::new()
            .name(self.name.into())
            .stack_size(self.stack_bytes);
        if builder.spawn(|| self.work()).is_err() {
            self.without_new_thread();
        }
    }

    /// No thread could be made: leave the job to the others, or do it here.
    fn without_new_thread(&self) {
        let mut jobs = self.lock();
        jobs.threads -= 1;
        if jobs.threads > 0 {
            return;
        }
        while let Some(job) = jobs.waiting.pop_front() {
            drop(jobs);
            (self.run)(job);
            jobs = self.lock();
        }
    }

    fn work(&self) {
        let mut jobs = self.lock();
        loop {
            if let Some(job) = jobs.waiting.pop_front() {
                drop(jobs);
                (self.run)(job);
                jobs = self.lock();
                continue;
            }
            jobs.idle += 1;
            let timeout = self.arrived.wait_for(&mut jobs, IDLE_TIME);
            jobs.idle -= 1;
            if timeout.timed_out() && jobs.waiting.is_empty() {
                jobs.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;
