//! Every job is done, though threads come and go.

use std::sync::Arc;

use super::*;
use crate::sync::{atomic, explore};

/// How many jobs have run, and somebody who waits for that.
#[derive(Default)]
struct Tally {
    ran: Mutex<usize>,
    all: Condvar,
}

fn count(tally: Arc<Tally>) {
    *tally.ran.lock() += 1;
    tally.all.notify_all();
}

fn thread_pool(most_threads: usize) -> &'static ThreadPool<Arc<Tally>> {
    Box::leak(Box::new(ThreadPool::new(
        "pool",
        most_threads,
        64 << 10,
        count,
    )))
}

impl<J: Send> ThreadPool<J> {
    fn let_time_pass(&self) {
        let _jobs = self.lock();
        self.arrived.let_time_pass();
    }
}

impl Tally {
    fn wait(&self, jobs: usize) {
        let mut ran = self.ran.lock();
        while *ran < jobs {
            self.all.wait(&mut ran);
        }
    }
}

/// Before time passes: a job that a lost notification leaves behind waits for ever.
#[test]
fn no_job_waits_for_the_time_of_an_idle_thread() {
    for most_threads in 1..=2 {
        explore(move || {
            let (pool, tally) = (thread_pool(most_threads), Arc::new(Tally::default()));
            let others = tally.clone();
            let thread = thread::spawn(move || {
                pool.submit(others.clone());
                others.wait(1);
                pool.submit(others);
            });
            pool.submit(tally.clone());
            pool.submit(tally.clone());
            tally.wait(4);
            thread.join().expect("ends");
            pool.let_time_pass();
        });
    }
}

#[test]
fn jobs_that_come_while_threads_end_are_done() {
    explore(|| {
        let (pool, tally) = (thread_pool(2), Arc::new(Tally::default()));
        pool.submit(tally.clone());
        let thread = thread::spawn(move || pool.let_time_pass());
        pool.submit(tally.clone());
        pool.submit(tally.clone());
        tally.wait(3);
        thread.join().expect("ends");
    });
}

/// At most so many jobs at once, and no thread stays when time has passed.
#[test]
fn a_pool_is_never_too_large() {
    struct Job(Arc<[atomic::AtomicUsize; 2]>);
    fn run(job: Job) {
        let at_once = job.0[0].fetch_add(1, atomic::Ordering::SeqCst);
        assert!(at_once < 2, "three at once");
        job.0[0].fetch_sub(1, atomic::Ordering::SeqCst);
        job.0[1].fetch_add(1, atomic::Ordering::SeqCst);
    }
    explore(|| {
        let pool: &ThreadPool<Job> = Box::leak(Box::new(ThreadPool::new("pool", 2, 64 << 10, run)));
        let counts = Arc::new([const { atomic::AtomicUsize::new(0) }; 2]);
        for _ in 0..4 {
            pool.submit(Job(counts.clone()));
        }
        pool.let_time_pass();
    });
}
