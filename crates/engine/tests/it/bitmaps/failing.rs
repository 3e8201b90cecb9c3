//! The first change of an open image, with bitmaps to be marked before it, when requests fail.

use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};

use super::*;

/// Each request that comes before the first write fails once. The next write must find the
/// bitmaps as if nothing had happened, or fail too.
#[test]
fn bitmaps_begin_to_record_after_an_attempt_that_failed() {
    let mut retried = 0;
    for operation in [Operation::Read, Operation::Write, Operation::Flush] {
        for pass in 0..12 {
            let errno = if pass % 2 == 0 { 5 } else { 28 };
            retried += u32::from(lane::block_on(second_write(operation, pass, errno)));
        }
    }
    assert!(
        retried > 5,
        "only {retried} writes were made after one that failed"
    );
}

/// Whether a write succeeds after one that failed.
async fn second_write(operation: Operation, pass: usize, errno: i32) -> bool {
    let file = new_image(MIB, 4 * KIB).await;
    let image = open_image(file.clone()).await;
    for name in ["one", "two"] {
        let added = image.bitmaps().add(name, every(4 * KIB)).await;
        added.expect("added");
    }
    image.close().await.expect("closed");
    let faults = FaultStorage::new(file.clone());
    let image = open_image(faults.clone()).await;
    faults.fail(Matching::operation(operation), pass, Times::Once, errno);
    let start = |at| image.write(at, Buffer::zeroed(8192), RequestFlags::default());
    let first = start(64 * KIB).await.is_ok();
    let second = start(128 * KIB).await.is_ok();
    let closed = image.close().await.is_ok();
    drop(image);
    // A table that could not be written leaks what it would have led to, also if that was tried again.
    let may_leak = !closed || !first || operation == Operation::Write;
    expect_sound(file.clone(), may_leak).await;
    let image = open_image(file).await;
    for name in ["one", "two"] {
        let dirty = ranges(&image, name).await;
        let holds = |at| {
            dirty
                .iter()
                .any(|run| run.start <= at && at + 8192 <= run.end)
        };
        assert!(
            !closed || !first || holds(64 * KIB),
            "{operation:?} {pass}: {dirty:?}"
        );
        assert!(
            !closed || !second || holds(128 * KIB),
            "{operation:?} {pass}: {dirty:?}"
        );
    }
    image.close().await.expect("closed");
    second && !first
}

/// Changes of bitmaps that lie in new places, on a disk that is full when one of them is written.
#[test]
fn bitmaps_that_cannot_be_stored_leak_nothing() {
    let mut failed = 0;
    for pass in 0..12 {
        for grows in [true, false] {
            failed += u32::from(lane::block_on(store_on_full_disk(pass, grows)));
        }
    }
    assert!(failed > 5, "only {failed} changes failed");
}

/// Whether the change of bitmaps fails that is no longer than so many writes.
async fn store_on_full_disk(pass: usize, grows: bool) -> bool {
    const ENOSPC: i32 = 28;
    let file = new_image(MIB, 512).await;
    let faults = FaultStorage::new(file.clone());
    let image = open_image(faults.clone()).await;
    for name in ["one", "two"] {
        let added = image.bitmaps().add(name, every(512)).await;
        added.expect("added");
    }
    write(&image, 64 * KIB, 8192).await;
    image.flush().await.expect("flushed");
    let writes = Matching::operation(Operation::Write);
    faults.fail(writes, pass, Times::Always, ENOSPC);
    let changed = match grows {
        true => image.truncate(2 * MIB).await,
        false => image.bitmaps().disable("two").await,
    };
    faults.heal();
    let closed = image.close().await;
    expect_sound(file, closed.is_err()).await;
    changed.is_err()
}
