//! Who asks is served by a round that began after he asked, with the result of such a round, and
//! rounds come one at a time, whoever gives up.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use super::*;
use vellum_io::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use vellum_io::sync::{block_on, chance, explore, join, point, thread};

/// A round that has ended.
struct Ended {
    began: u64,
    good: bool,
}

#[derive(Default)]
struct World {
    coalescer: Coalescer,
    clock: AtomicU64,
    at_work: AtomicBool,
    ended: Mutex<Vec<Ended>>,
}

impl World {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, SeqCst)
    }

    fn work(&self, leader: Leader<'_>) {
        let began = self.now();
        assert!(!self.at_work.swap(true, SeqCst), "two rounds at once");
        point();
        let how = chance(3);
        self.ended.lock().push(Ended {
            began,
            good: how == 0,
        });
        self.at_work.store(false, SeqCst);
        let failure = Error::new(ErrorKind::Io, "work", "failed");
        match how {
            0 => leader.end(Ok(())).expect("it was good"),
            1 => drop(leader.end(Err(failure))),
            _ => drop(leader),
        }
    }

    fn ask(&self) {
        let asked = self.now();
        match block_on(self.coalescer.join()) {
            Role::Leader(leader) => self.work(leader),
            Role::Follower(result) => {
                let ended = self.ended.lock();
                let served = |round: &Ended| round.began > asked && round.good == result.is_ok();
                assert!(
                    ended.iter().any(served),
                    "no round began after it, or so ended"
                );
            }
        }
    }
}

#[test]
fn who_asks_is_served_by_a_round_that_began_after_it() {
    explore(|| {
        let world = Arc::new(World::default());
        let threads = [2, 1, 1].map(|times| {
            let world = world.clone();
            thread::spawn(move || (0..times).for_each(|_| world.ask()))
        });
        join(threads);
        assert!(!world.coalescer.is_running());
    });
}

#[test]
fn whoever_gives_up_waiting_keeps_nobody_waiting() {
    explore(|| {
        let world = Arc::new(World::default());
        let leaving = world.clone();
        let leaving = thread::spawn(move || {
            let mut left = chance(3);
            let mut asked = pin!(leaving.coalescer.join());
            let role = block_on(std::future::poll_fn(|context| {
                if left == 0 {
                    return Poll::Ready(None);
                }
                left -= 1;
                asked.as_mut().poll(context).map(Some)
            }));
            if let Some(Role::Leader(leader)) = role {
                leaving.work(leader);
            }
        });
        let staying = [(); 2].map(|()| {
            let world = world.clone();
            thread::spawn(move || world.ask())
        });
        join([leaving].into_iter().chain(staying));
    });
}
