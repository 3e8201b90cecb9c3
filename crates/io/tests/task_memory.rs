//! What a task takes, as the allocator sees it: its future, once.

#[path = "common/heap.rs"]
mod heap;

use std::future::pending;

use vellum_io::executor::Executor;
use vellum_io::{spawn, spawn_to_completion};

use heap::live_bytes;

const HELD_BYTES: usize = 64 << 10;

/// A future that is as large as a request that has much to remember.
async fn large() -> u8 {
    let held = [1_u8; HELD_BYTES];
    pending::<()>().await;
    held.iter().fold(0, |sum, byte| sum | byte)
}

#[test]
fn a_task_holds_its_future_once() {
    let executor = Executor::new(|| {});
    executor.enter(|| {
        let before = live_bytes();
        drop(spawn(large()));
        let plain = live_bytes();
        drop(spawn_to_completion(large()));
        let lingering = live_bytes();
        for taken in [plain - before, lingering - plain] {
            assert!(
                (HELD_BYTES..HELD_BYTES + 4096).contains(&taken),
                "{taken} bytes for {HELD_BYTES}"
            );
        }
    });
}
