//! Turns come in their order, each of them, whatever becomes of others.

use super::*;
use crate::sync::{block_on, chance, explore, join, thread};

#[test]
fn turns_come_in_their_order_though_some_are_dropped_before() {
    explore(|| {
        let turns = Arc::new(Turns::default());
        let passed = Arc::new(Mutex::new(Vec::new()));
        let threads = [0, 1, 2, 3].map(|number| {
            let (turn, passed) = (turns.take(), passed.clone());
            thread::spawn(move || {
                if chance(3) > 0 {
                    block_on(turn.wait());
                    passed.lock().push(number);
                }
            })
        });
        join(threads);
        let passed = passed.lock();
        assert!(passed.is_sorted(), "{passed:?}");
    });
}
