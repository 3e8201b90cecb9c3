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
    expect_sound(file.clone(), !closed || !first).await;
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
