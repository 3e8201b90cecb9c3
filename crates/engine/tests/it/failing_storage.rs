//! Storages that fail in the middle: nothing goes on that a failure should have stopped.

use std::sync::Arc;

use crate::common::run_on_memory as run;
use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{NewSnapshot, OpenOptions, PreallocateAhead, Qcow2};
use vellum::{BlockDevice, Buffer, RequestFlags, Storage};
use vellum_io::lane::yield_now;
use vellum_storage::MemStorage;
use vellum_storage::wrap::{DelayStorage, FaultStorage, Matching, Operation, Times};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const ESTALE: i32 = 116;
const EDQUOT: i32 = 122;
const CLUSTER_BYTES: u64 = 256 << 10;

async fn make(file: &Arc<dyn Storage>, data: Option<&Arc<dyn Storage>>) {
    let options = CreateOptions::default()
        .size_bytes(64 * CLUSTER_BYTES)
        .cluster_size_bytes(CLUSTER_BYTES)
        .data_file(data.map(|_| "data".to_owned()));
    let made = create(file.clone(), data.cloned(), &options).await;
    made.expect("an image");
}

async fn open(file: Arc<dyn Storage>, data: Option<Arc<dyn Storage>>) -> Arc<Qcow2> {
    let options = OpenOptions::default()
        .data_cache_size_bytes(Some(0))
        .data_file(data)
        .discard(true)
        .ahead(
            PreallocateAhead::default()
                .after_clusters(u64::MAX)
                .max_bytes(0),
        );
    let opened = Qcow2::open(file, Arc::new(DenyAll), options).await;
    opened.expect("a sound image")
}

async fn write(image: &Qcow2, at: u64, byte: u8, len_bytes: u64) -> vellum::Result<()> {
    let mut buffer = Buffer::zeroed(len_bytes as usize);
    buffer.fill(byte);
    let written = image.write(at, buffer, RequestFlags::default()).await;
    written.map(drop)
}

async fn some_turns() {
    for _ in 0..200 {
        yield_now().await;
    }
}

/// A write that has to zero what stands before and behind it in a cluster that was used
/// before. One of the two fails; the other one is still under way.
#[test]
fn a_failed_write_gives_nothing_back_that_it_still_writes_to() {
    run(async {
        let faults = FaultStorage::new(Arc::new(MemStorage::new()));
        let slow = DelayStorage::new(faults.clone());
        let file: Arc<dyn Storage> = slow.clone();
        make(&file, None).await;
        let image = open(file, None).await;
        // Clusters that are not new any more.
        for cluster in 0..4 {
            write(&image, cluster * CLUSTER_BYTES, 1, CLUSTER_BYTES)
                .await
                .expect("no failure yet");
        }
        image.flush().await.expect("no failure yet");
        image
            .discard(0, 4 * CLUSTER_BYTES)
            .await
            .expect("no failure");
        for _ in 0..3 {
            image.flush().await.expect("no failure yet");
        }
        let zeroing = Matching::operation(Operation::WriteZeroes);
        let held = slow.hold(zeroing.clone());
        faults.fail(zeroing, 0, Times::Once, EIO);
        let shared = image.clone();
        let at = 8 * CLUSTER_BYTES + CLUSTER_BYTES / 2;
        let failing = vellum_io::spawn(async move { write(&shared, at, 2, 4096).await });
        some_turns().await;
        assert!(held.has_arrived(), "the clusters are not new");
        for cluster in 20..24 {
            write(&image, cluster * CLUSTER_BYTES, 3, CLUSTER_BYTES)
                .await
                .expect("it has nothing to do with that");
        }
        held.release();
        failing.await.expect_err("a part of it has failed");
        some_turns().await;
        for cluster in 20..24 {
            let buffer = Buffer::for_read(CLUSTER_BYTES as usize);
            let read = image.read(cluster * CLUSTER_BYTES, buffer).await;
            let read = read.expect("no failure any more");
            assert!(read.iter().all(|&byte| byte == 3), "cluster {cluster}");
        }
        image.close().await.expect("no failure any more");
    });
}

/// Fails the next barrier of `failing`, and makes sure that none succeeds after it.
async fn check_latched(image: &Qcow2, failing: &FaultStorage, errno: i32) {
    write(image, 0, 1, 512).await.expect("no failure yet");
    image.flush().await.expect("no failure yet");
    write(image, CLUSTER_BYTES, 1, 512)
        .await
        .expect("no failure");
    let barrier = Matching::operation(Operation::Flush);
    failing.fail(barrier, 0, Times::Once, errno);
    assert_eq!(image.flush().await.expect_err("it fails").errno(), errno);
    for _ in 0..2 {
        assert_eq!(image.flush().await.expect_err("it failed").errno(), errno);
    }
    let written = write(image, 2 * CLUSTER_BYTES, 1, 512).await;
    assert_eq!(
        written.expect_err("nobody knows what is there").errno(),
        errno
    );
    image.close().await.expect_err("nothing is promised");
}

#[test]
fn after_a_failed_barrier_no_flush_succeeds_whatever_its_errno() {
    run(async {
        for errno in [EIO, ENOSPC, EDQUOT, ESTALE] {
            let faults = FaultStorage::new(Arc::new(MemStorage::new()));
            let file: Arc<dyn Storage> = faults.clone();
            make(&file, None).await;
            check_latched(&*open(file.clone(), None).await, &faults, errno).await;
            let anew = open(file, None).await;
            write(&anew, 0, 2, 512).await.expect("it was opened anew");
            anew.close().await.expect("it was opened anew");
        }
    });
}

#[test]
fn a_failed_barrier_of_the_data_file_counts_as_well() {
    run(async {
        for errno in [EIO, ENOSPC, EDQUOT, ESTALE] {
            let faults = FaultStorage::new(Arc::new(MemStorage::new()));
            let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
            let data: Arc<dyn Storage> = faults.clone();
            make(&file, Some(&data)).await;
            check_latched(&*open(file, Some(data)).await, &faults, errno).await;
        }
    });
}

/// Barriers of other rooms than the commits'.
#[test]
fn a_failed_barrier_of_a_snapshot_is_remembered_by_the_next_flush() {
    run(async {
        for (errno, pass) in [(ENOSPC, 0), (ENOSPC, 1), (EIO, 1), (EDQUOT, 2)] {
            let faults = FaultStorage::new(Arc::new(MemStorage::new()));
            let file: Arc<dyn Storage> = faults.clone();
            make(&file, None).await;
            let image = open(file, None).await;
            write(&image, 0, 1, 512).await.expect("no failure yet");
            let barrier = Matching::operation(Operation::Flush);
            faults.fail(barrier, pass, Times::Once, errno);
            let one = NewSnapshot {
                name: "one".to_owned(),
                ..NewSnapshot::default()
            };
            let taken = image.create_snapshot(one).await;
            if taken.is_err() {
                assert!(image.flush().await.is_err(), "{errno} after {pass}");
                assert!(image.close().await.is_err(), "{errno} after {pass}");
            }
        }
    });
}
