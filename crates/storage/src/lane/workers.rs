//! Worker threads for what blocks: every file request of a lane without
//! io_uring, and on every lane the few calls that have no asynchronous form.
//!
//! The pool belongs to the process. A job owns all that it needs, so nothing
//! dangles if its lane goes away first; the answer then goes nowhere.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use super::request::{Done, Request};
use crate::sys::EventFd;

/// As many threads as QEMU's pool has.
const MAX_WORKERS: usize = 64;
/// How long a worker waits for a job before it ends.
const IDLE_TIME: Duration = Duration::from_secs(10);
/// Workers only call the kernel; their stacks stay small.
const STACK_BYTES: usize = 128 << 10;

/// Where workers put a lane's finished jobs.
#[derive(Debug)]
pub(crate) struct Mailbox {
    done: Mutex<Vec<(u32, Done)>>,
    event: Arc<EventFd>,
}

impl Mailbox {
    /// An empty mailbox; `event` is signalled when something arrives.
    pub(crate) fn new(event: Arc<EventFd>) -> Self {
        Mailbox {
            done: Mutex::default(),
            event,
        }
    }

    fn put(&self, slot: u32, done: Done) {
        let mut box_ = lock(&self.done);
        box_.push((slot, done));
        let first = box_.len() == 1;
        drop(box_);
        if first {
            self.event.signal();
        }
    }

    /// Moves all that has arrived to `finished`; returns how many there were.
    pub(crate) fn take(&self, finished: &mut Vec<(u32, Done)>) -> usize {
        let mut box_ = lock(&self.done);
        let count = box_.len();
        finished.append(&mut box_);
        count
    }
}

struct Job {
    request: Request,
    slot: u32,
    reply_to: Arc<Mailbox>,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    workers: usize,
    idle: usize,
}

#[derive(Default)]
struct Pool {
    jobs: Mutex<Jobs>,
    arrived: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    POOL.get_or_init(Pool::default)
}

/// Has a worker run `request`; the answer goes to `reply_to` under `slot`.
pub(crate) fn submit(request: Request, slot: u32, reply_to: &Arc<Mailbox>) {
    let pool = pool();
    let mut jobs = lock(&pool.jobs);
    jobs.waiting.push_back(Job {
        request,
        slot,
        reply_to: reply_to.clone(),
    });
    if jobs.idle >= jobs.waiting.len() || jobs.workers == MAX_WORKERS {
        drop(jobs);
        pool.arrived.notify_one();
        return;
    }
    jobs.workers += 1;
    drop(jobs);
    let builder = std::thread::Builder::new()
        .name("vellum-worker".into())
        .stack_size(STACK_BYTES);
    if builder.spawn(work).is_err() {
        without_new_worker(pool);
    }
}

/// No thread could be made: leave the job to the others, or do it here.
fn without_new_worker(pool: &Pool) {
    let mut jobs = lock(&pool.jobs);
    jobs.workers -= 1;
    if jobs.workers > 0 {
        return;
    }
    while let Some(job) = jobs.waiting.pop_front() {
        drop(jobs);
        run(job);
        jobs = lock(&pool.jobs);
    }
}

fn run(job: Job) {
    let done = job.request.run();
    job.reply_to.put(job.slot, done);
}

fn work() {
    let pool = pool();
    let mut jobs = lock(&pool.jobs);
    loop {
        if let Some(job) = jobs.waiting.pop_front() {
            drop(jobs);
            run(job);
            jobs = lock(&pool.jobs);
            continue;
        }
        jobs.idle += 1;
        let (guard, timeout) = pool
            .arrived
            .wait_timeout(jobs, IDLE_TIME)
            .unwrap_or_else(PoisonError::into_inner);
        jobs = guard;
        jobs.idle -= 1;
        if timeout.timed_out() && jobs.waiting.is_empty() {
            jobs.workers -= 1;
            return;
        }
    }
}
