//! Worker threads for what blocks: every file request of a lane without
//! io_uring, and on every lane the few calls that have no asynchronous form.

use std::sync::{Arc, OnceLock};

use super::request::{Completion, Request};
use super::thread_pool::ThreadPool;
use crate::sync::{Mutex, MutexGuard};
use crate::sys::EventFd;

/// As many threads as QEMU's pool has.
const MAX_WORKERS: usize = 64;
/// Workers only call the kernel; their stacks stay small.
const STACK_BYTES: usize = 128 << 10;

/// Where workers put a lane's finished jobs.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    done: Mutex<Vec<(u32, Completion)>>,
    event: Arc<EventFd>,
}

impl CompletionQueue {
    /// An empty mailbox; `event` is signalled when something arrives.
    pub(crate) fn new(event: Arc<EventFd>) -> Self {
        CompletionQueue {
            done: Mutex::default(),
            event,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(u32, Completion)>> {
        self.done.lock()
    }

    fn put(&self, slot: u32, done: Completion) {
        let mut box_ = self.lock();
        box_.push((slot, done));
        let first = box_.len() == 1;
        drop(box_);
        if first {
            self.event.signal();
        }
    }

    /// Moves all that has arrived to `finished`; returns how many there were.
    pub(crate) fn take(&self, finished: &mut Vec<(u32, Completion)>) -> usize {
        let mut box_ = self.lock();
        let count = box_.len();
        finished.append(&mut box_);
        count
    }
}

struct Job {
    request: Request,
    slot: u32,
    reply_to: Arc<CompletionQueue>,
}

fn run(job: Job) {
    let done = job.request.run();
    job.reply_to.put(job.slot, done);
}

/// As below, in a thread of its own: a pool would outlive the test's threads, and has tests of
/// its own.
#[cfg(shuttle)]
pub(crate) fn submit(request: Request, slot: u32, reply_to: &Arc<CompletionQueue>) {
    let reply_to = reply_to.clone();
    let job = Job {
        request,
        slot,
        reply_to,
    };
    drop(crate::sync::thread::spawn(move || run(job)));
}

/// Has a worker run `request`; the answer goes to `reply_to` under `slot`.
#[cfg(not(shuttle))]
pub(crate) fn submit(request: Request, slot: u32, reply_to: &Arc<CompletionQueue>) {
    static WORKERS: OnceLock<ThreadPool<Job>> = OnceLock::new();
    let reply_to = reply_to.clone();
    WORKERS
        .get_or_init(|| ThreadPool::new("vellum-worker", MAX_WORKERS, STACK_BYTES, run))
        .submit(Job {
            request,
            slot,
            reply_to,
        });
}
