//! Who is alone is that, and neither changes nor those who want to be alone wait for ever.

use super::*;
use crate::sync::atomic::Ordering::SeqCst;
use crate::sync::{block_on, explore, join, point, thread};
use std::sync::Arc;

#[derive(Default)]
struct World {
    changes: Changes,
    running: AtomicUsize,
}

impl World {
    fn change(&self) {
        block_on(self.changes.begin());
        self.running.fetch_add(1, SeqCst);
        point();
        self.running.fetch_sub(1, SeqCst);
        self.changes.end();
    }

    fn close(&self) {
        let _alone = block_on(self.changes.alone());
        assert_eq!(self.running.load(SeqCst), 0, "a change runs");
        point();
        assert_eq!(self.running.load(SeqCst), 0, "a change has begun");
    }
}

#[test]
fn no_change_runs_beside_who_is_alone() {
    explore(|| {
        let world = Arc::new(World::default());
        let threads = [World::change, World::change, World::close].map(|work| {
            let world = world.clone();
            thread::spawn(move || work(&world))
        });
        world.close();
        join(threads);
    });
}
