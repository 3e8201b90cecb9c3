//! Whoever waits for reads waits for all that entered before, and for no other.

use super::*;
use vellum_io::sync::atomic::{AtomicBool, Ordering::SeqCst};
use vellum_io::sync::{Mutex, block_on, explore, join, point, thread};

/// What a read finds, and whether that was given to somebody else.
#[derive(Default)]
struct World {
    epochs: Arc<Epochs>,
    mapping: Mutex<usize>,
    given_back: [AtomicBool; 3],
    over: AtomicBool,
    ended: Event,
}

impl World {
    fn read(&self) {
        let reading = self.epochs.enter();
        let cluster = *self.mapping.lock();
        point();
        assert!(!self.given_back[cluster].load(SeqCst), "it is being read");
        drop(reading);
    }

    /// As an exchange of snapshots does it.
    fn change(&self, to: usize) {
        let old = std::mem::replace(&mut *self.mapping.lock(), to);
        block_on(self.epochs.wait_for_all());
        self.given_back[old].store(true, SeqCst);
    }
}

#[test]
fn what_reads_look_at_stays_until_they_have_ended() {
    explore(|| {
        let world = Arc::new(World::default());
        let threads = [2, 1, 1].map(|times| {
            let world = world.clone();
            thread::spawn(move || (0..times).for_each(|_| world.read()))
        });
        world.change(1);
        world.change(2);
        join(threads);
    });
}

/// As snapshots beside a compaction.
#[test]
fn two_may_wait_at_once() {
    explore(|| {
        let world = Arc::new(World::default());
        let reading = {
            let world = world.clone();
            thread::spawn(move || (0..2).for_each(|_| world.read()))
        };
        let changing = {
            let world = world.clone();
            thread::spawn(move || world.change(1))
        };
        world.change(2);
        join([reading, changing]);
    });
}

/// As guests do that always have something to read.
#[test]
fn reads_that_entered_later_hold_nobody_up() {
    explore(|| {
        let world = Arc::new(World::default());
        let threads = [(); 2].map(|()| {
            let world = world.clone();
            thread::spawn(move || {
                let reading = world.epochs.enter();
                // Before the advance: nobody may be kept waiting by it.
                if reading.slot == 0 {
                    return;
                }
                while !world.over.load(SeqCst) {
                    let ended = world.ended.listen();
                    if !world.over.load(SeqCst) {
                        block_on(ended);
                    }
                }
                drop(reading);
            })
        });
        if let Some(quiet) = world.epochs.quiet() {
            world.epochs.advance(quiet);
        }
        block_on(world.epochs.wait_for_previous());
        world.over.store(true, SeqCst);
        world.ended.notify(usize::MAX);
        join(threads);
    });
}
