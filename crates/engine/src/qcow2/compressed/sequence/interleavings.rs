//! Tickets take their turns in their order, each of them, whatever becomes of others.

use super::*;
use vellum_io::sync::{block_on, chance, explore, join, thread};

#[test]
fn tickets_pass_in_their_order_though_some_are_given_up() {
    explore(|| {
        let queue = Arc::new(Queue::default());
        let passed = Arc::new(Mutex::new(Vec::new()));
        let threads = [0, 1, 2, 3].map(|number| {
            let (ticket, passed) = (queue.ticket(), passed.clone());
            thread::spawn(move || {
                if chance(3) > 0 {
                    block_on(ticket.turn());
                    passed.lock().push(number);
                }
            })
        });
        join(threads);
        let passed = passed.lock();
        assert!(passed.is_sorted(), "{passed:?}");
    });
}
