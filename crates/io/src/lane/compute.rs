//! Work that only computes, on all cores: a lane that decompresses cannot serve
//! its other requests meanwhile.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::thread::{Result as Caught, available_parallelism};

use super::thread_pool::ThreadPool;
use crate::sync::{Mutex, MutexGuard};

/// Codecs keep some tens of kilobytes on the stack at most.
const STACK_BYTES: usize = 512 << 10;

type Job = Box<dyn FnOnce() + Send>;

/// Starts `work` on a thread that computes; there is one for each core. The result
/// is the future's. Dropping that abandons the result, not the work.
///
/// Outside [`super::block_on`] the work is done before the call returns: an
/// executor without a lane (a simulation's) is alone in its world and cannot wait
/// for a thread.
pub fn compute<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Computation<T> {
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            result: None,
            waker: None,
        }),
    });
    let answer = shared.clone();
    // A panic goes on where the result is awaited.
    let run = move || answer.finish(catch_unwind(AssertUnwindSafe(work)));
    if super::is_running() {
        give(Box::new(run));
    } else {
        run();
    }
    Computation { shared }
}

/// The threads that compute at a time.
pub fn compute_threads() -> usize {
    // Asking takes a dozen system calls, and some ask for each request.
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| available_parallelism().map_or(1, usize::from))
}

/// As with workers: a pool would outlive the test's threads.
#[cfg(shuttle)]
fn give(job: Job) {
    drop(crate::sync::thread::spawn(job));
}

#[cfg(not(shuttle))]
fn give(job: Job) {
    static POOL: OnceLock<ThreadPool<Job>> = OnceLock::new();
    POOL.get_or_init(|| {
        let run: fn(Job) = |job| job();
        ThreadPool::new("vellum-compute", compute_threads(), STACK_BYTES, run)
    })
    .submit(job);
}

/// Work that [`compute`] has started.
#[must_use = "the result is the future's"]
pub struct Computation<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    result: Option<Caught<T>>,
    waker: Option<Waker>,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock()
    }

    fn finish(&self, result: Caught<T>) {
        let mut state = self.lock();
        state.result = Some(result);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Future for Computation<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut state = self.shared.lock();
        match state.result.take() {
            Some(Ok(value)) => Poll::Ready(value),
            Some(Err(panic)) => {
                drop(state);
                resume_unwind(panic)
            }
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<T> std::fmt::Debug for Computation<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Computation")
    }
}
