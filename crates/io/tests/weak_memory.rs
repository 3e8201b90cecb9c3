//! What orders of memory promise, under loom, which plays all executions that they allow (shuttle
//! knows only such in which everybody sees each write at once). The code under test stands in
//! one file of its own and is compiled a second time, with loom's atomics.
//!
//! Runs with `cargo xtask interleavings`. Loom takes `SeqCst` for `AcqRel`, so what needs more
//! than that (generations of readers, range locks) cannot be tried here.
#![cfg(shuttle)]

mod sync {
    pub(crate) mod atomic {
        pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};
    }
}

#[path = "../src/executor/queued.rs"]
mod queued;

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use queued::Queued;

#[derive(Default)]
struct Task {
    /// What it waits for; nothing but the wake-up orders that.
    happened: AtomicUsize,
    queue: Mutex<usize>,
}

#[test]
fn whoever_finds_a_task_queued_is_seen_by_the_poll_that_follows() {
    loom::model(|| {
        let task = Arc::new((Task::default(), Queued::new()));
        // It is queued for some earlier reason.
        assert!(task.1.enter());
        *task.0.queue.lock().expect("nobody panics") += 1;
        let waking = {
            let task = task.clone();
            thread::spawn(move || {
                task.0.happened.store(1, Ordering::Relaxed);
                if task.1.enter() {
                    *task.0.queue.lock().expect("nobody panics") += 1;
                }
            })
        };
        let mut seen = 0;
        let mut poll = || {
            let mut queue = task.0.queue.lock().expect("nobody panics");
            let ready = std::mem::take(&mut *queue) > 0;
            drop(queue);
            if ready {
                task.1.leave();
                seen = task.0.happened.load(Ordering::Relaxed);
            }
        };
        poll();
        waking.join().expect("ends");
        poll();
        assert_eq!(seen, 1, "the wake-up is lost");
    });
}
