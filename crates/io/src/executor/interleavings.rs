//! Wake-ups and starts from other threads, whatever the turns: none is lost.

use super::*;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{EventFd, Mutex, explore, join, thread};

/// What its owner does with an executor: `wait` if nothing is ready.
fn drive(executor: &Executor, event: &EventFd, mut is_over: impl FnMut() -> bool) {
    loop {
        executor.run_ready();
        if is_over() {
            return;
        }
        if executor.prepare_to_sleep() {
            event.wait(None);
            event.drain();
        }
        executor.end_sleep();
    }
}

fn executor() -> (Executor, Arc<EventFd>) {
    let event = Arc::new(EventFd::new().expect("no descriptor"));
    let signalled = event.clone();
    (Executor::new(move || signalled.signal()), event)
}

/// A flag that a task waits for with nothing but its waker.
#[derive(Default)]
struct Flag {
    set: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Flag {
    fn set(&self) {
        self.set.store(true, Ordering::Release);
        let waker = self.waker.lock().take();
        waker.into_iter().for_each(Waker::wake);
    }

    async fn wait(&self) {
        std::future::poll_fn(|context| {
            *self.waker.lock() = Some(context.waker().clone());
            match self.set.load(Ordering::Acquire) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }
}

#[test]
fn wake_ups_from_other_threads_reach_a_sleeping_executor() {
    explore(|| {
        let (executor, event) = executor();
        let flags: [Arc<Flag>; 2] = Default::default();
        let waiting = flags.clone();
        drop(executor.spawn(async move {
            let second = spawn({
                let flag = waiting[1].clone();
                async move { flag.wait().await }
            });
            waiting[0].wait().await;
            second.await;
        }));
        let threads = flags.map(|flag| thread::spawn(move || flag.set()));
        drive(&executor, &event, || executor.live_tasks() == 0);
        join(threads);
    });
}

#[test]
fn a_waker_that_is_used_over_and_over_wakes_each_time() {
    const TURNS: usize = 3;
    explore(|| {
        let (executor, event) = executor();
        let flags: [Arc<Flag>; TURNS] = Default::default();
        let waiting = flags.clone();
        drop(executor.spawn(async move {
            for flag in waiting {
                flag.wait().await;
            }
        }));
        let thread = thread::spawn(move || flags.iter().for_each(|flag| flag.set()));
        drive(&executor, &event, || executor.live_tasks() == 0);
        thread.join().expect("ends");
    });
}

#[test]
fn what_others_start_here_runs() {
    explore(|| {
        let (executor, event) = executor();
        let ended = Arc::new(AtomicBool::new(false));
        let count = Arc::new(Mutex::new(0));
        let threads = [1, 2].map(|number| {
            let (remote, count, ended) = (executor.remote(), count.clone(), ended.clone());
            thread::spawn(move || {
                remote.spawn(move || async move {
                    let mut count = count.lock();
                    *count += number;
                    ended.store(*count == 3, Ordering::SeqCst);
                });
            })
        });
        drive(&executor, &event, || ended.load(Ordering::SeqCst));
        join(threads);
        assert_eq!(executor.live_tasks(), 0);
    });
}

#[test]
fn the_owners_own_future_is_woken_too() {
    explore(|| {
        let (executor, event) = executor();
        let flag = Arc::new(Flag::default());
        let waker = executor.root_waker();
        let mut root = Box::pin({
            let flag = flag.clone();
            async move { flag.wait().await }
        });
        let thread = thread::spawn(move || flag.set());
        waker.wake_by_ref();
        drive(&executor, &event, || {
            let mut context = Context::from_waker(&waker);
            executor.take_root_wake() && root.as_mut().poll(&mut context).is_ready()
        });
        thread.join().expect("ends");
    });
}
