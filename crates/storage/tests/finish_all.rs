//! Requests side by side, one of which fails: the others end first.

use std::sync::Arc;

use vellum_io::lane::{block_on, yield_now};
use vellum_io::{Buffer, Buffers, finish_all, spawn};
use vellum_storage::wrap::{DelayStorage, FaultStorage, Matching, Operation, Times};
use vellum_storage::{MemStorage, Storage, WriteFlags};

#[test]
fn the_first_error_waits_for_all_that_were_begun() {
    let memory = Arc::new(MemStorage::new());
    let faults = FaultStorage::new(memory.clone());
    let storage = DelayStorage::new(faults.clone());
    let matching = Matching::operation(Operation::Write).touching(1024..1536);
    faults.fail(matching, 0, Times::Once, libc::ENOSPC);
    block_on(async {
        let held = storage.hold(Matching::any().touching(512..1024));
        let writes = (0..10).map({
            let storage = storage.clone();
            move |at| {
                let buffers = Buffers::from_iter([Buffer::copy_of(&[1; 512])]);
                storage.write(512 * at, buffers, WriteFlags::default())
            }
        });
        let finished = spawn(finish_all(4, writes));
        for _ in 0..20 {
            yield_now().await;
        }
        assert!(held.has_arrived());
        let begun = memory.snapshot();
        assert_eq!((begun[0], begun[512]), (1, 0), "it has not ended");
        held.release();
        let error = finished.await.expect_err("one has failed");
        assert_eq!(error.errno(), libc::ENOSPC);
        let ended = memory.snapshot();
        assert_eq!(ended[512], 1, "it ended before");
        assert!(ended.len() < 512 * 10, "others were not begun");
    });
}
