//! What a task takes, as the allocator sees it: its future, once.

use std::alloc::{GlobalAlloc, Layout, System};
use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering};

use vellum_storage::executor::Executor;
use vellum_storage::{spawn, spawn_lingering};

/// Counts the bytes that live on the heap.
struct Counting;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above; the block came from `System`.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

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
        let before = LIVE_BYTES.load(Ordering::Relaxed);
        drop(spawn(large()));
        let plain = LIVE_BYTES.load(Ordering::Relaxed);
        drop(spawn_lingering(large()));
        let lingering = LIVE_BYTES.load(Ordering::Relaxed);
        for taken in [plain - before, lingering - plain] {
            assert!(
                (HELD_BYTES..HELD_BYTES + 4096).contains(&taken),
                "{taken} bytes for {HELD_BYTES}"
            );
        }
    });
}
