//! Whole lanes with their real loop, mailboxes and remotes; the event counter is the model's,
//! and each worker a thread.

use std::sync::Arc;
use std::task::{Poll, Waker};

use super::*;
use crate::Io;
use crate::sync::{Mutex, explore, thread};

/// Carries values to a task of any lane.
struct Channel<T>(Mutex<(Vec<T>, Option<Waker>)>);

impl<T> Channel<T> {
    fn new() -> Arc<Self> {
        Arc::new(Channel(Mutex::new((Vec::new(), None))))
    }

    fn put(&self, value: T) {
        let mut inside = self.0.lock();
        inside.0.push(value);
        let waker = inside.1.take();
        drop(inside);
        waker.into_iter().for_each(Waker::wake);
    }

    async fn take(&self, count: usize) -> Vec<T> {
        std::future::poll_fn(|context| {
            let mut inside = self.0.lock();
            if inside.0.len() >= count {
                return Poll::Ready(std::mem::take(&mut inside.0));
            }
            inside.1 = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

fn number(value: i64) -> Io<i64> {
    let file = Arc::new(Descriptor::none("none".into()));
    call(&file, "count", move || Ok(value), |done| done.value())
}

/// Runs a lane in a thread of its own, for it ends with that.
fn in_lane<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> thread::JoinHandle<T> {
    thread::spawn(work)
}

#[test]
fn what_workers_do_comes_back() {
    explore(|| {
        let lane = in_lane(|| {
            block_on(async {
                let (first, second) = (number(1), crate::spawn(number(2)));
                let third = number(3).await;
                assert_eq!(first.await.expect("counts") + third.expect("counts"), 4);
                assert_eq!(second.await.expect("counts"), 2);
            });
        });
        lane.join().expect("ends");
    });
}

#[test]
fn a_lane_that_ends_waits_for_its_workers() {
    explore(|| {
        let ran = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let inside = ran.clone();
        let lane = in_lane(move || {
            let file = Arc::new(Descriptor::none("none".into()));
            let work = move || {
                inside.store(true, std::sync::atomic::Ordering::SeqCst);
                Ok(0)
            };
            drop(block_on(async { call(&file, "work", work, finish_unit) }));
        });
        lane.join().expect("ends");
        assert!(ran.load(std::sync::atomic::Ordering::SeqCst));
    });
}

#[test]
fn tasks_start_on_another_lane_and_answer() {
    explore(|| {
        let (remotes, answers) = (Channel::new(), Channel::new());
        let asked = remotes.clone();
        let ends = Channel::new();
        let ended = ends.clone();
        let server = in_lane(move || {
            asked.put(remote());
            block_on(ended.take(1));
        });
        let client = in_lane(move || {
            block_on(async move {
                let server: Remote = remotes.take(1).await.remove(0);
                for value in [1, 2] {
                    let answers = answers.clone();
                    server.spawn(move || async move {
                        answers.put(number(value).await.expect("counts"));
                    });
                }
                let mut answered = answers.take(2).await;
                answered.sort_unstable();
                assert_eq!(answered, [1, 2]);
                ends.put(());
            });
        });
        client.join().expect("ends");
        server.join().expect("ends");
    });
}

#[test]
fn what_is_computed_comes_back() {
    explore(|| {
        let lane = in_lane(|| {
            block_on(async {
                let (one, two) = (compute(|| 1), compute(|| 2));
                drop(compute(|| 3));
                assert_eq!(one.await + two.await, 3);
            });
        });
        lane.join().expect("ends");
    });
}
