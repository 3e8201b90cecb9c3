//! Frees of leaked clusters, at an open and by a repair: what they have read is durable before a count goes down. It may
//! be a killed process's last writes, without which the mapping on disk still refers to such clusters.

use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, Fix, check, repair};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Buffers, RequestFlags, Storage};
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};
use vellum_storage::{MemStorage, WriteFlags};

use crate::common::run_on_memory as run;

const CLUSTER_BYTES: u64 = 64 << 10;
const HOST_BITS: u64 = 0x00ff_ffff_ffff_fe00;
const COMPATIBLE_FEATURES: u64 = 80;
const MAY_HAVE_LEAKS: u64 = 1 << 43;
const EIO: i32 = 5;

async fn open(file: Arc<dyn Storage>) -> vellum::Result<Arc<Qcow2>> {
    Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default()).await
}

async fn number(file: &dyn Storage, at: u64) -> u64 {
    let buffers = Buffers::from_iter([Buffer::zeroed(8)]);
    let bytes = file.read(at, buffers).await.unwrap();
    u64::from_be_bytes(bytes[0][..8].try_into().unwrap())
}

async fn put(file: &dyn Storage, at: u64, number: u64) {
    let buffers = Buffers::from_iter([Buffer::copy_of(&number.to_be_bytes())]);
    let written = file.write(at, buffers, WriteFlags::default());
    written.await.unwrap();
}

/// An image with one leaked cluster, which the header tells of.
async fn leaking_image() -> Arc<dyn Storage> {
    let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = CreateOptions::default().size_bytes(16 * CLUSTER_BYTES);
    create(file.clone(), None, &options).await.unwrap();
    let image = open(file.clone()).await.unwrap();
    let bytes = Buffer::zeroed(CLUSTER_BYTES as usize);
    let written = image.write(0, bytes, RequestFlags::default());
    written.await.unwrap();
    image.close().await.unwrap();
    let l1_table = number(&*file, 40).await;
    let l2_table = number(&*file, l1_table).await & HOST_BITS;
    put(&*file, l2_table, 0).await;
    let features = number(&*file, COMPATIBLE_FEATURES).await;
    put(&*file, COMPATIBLE_FEATURES, features | MAY_HAVE_LEAKS).await;
    file
}

async fn leaks(file: &Arc<dyn Storage>) -> u64 {
    let report = check(file.clone(), &CheckOptions::default()).await;
    report.unwrap().leaks
}

/// The storage, whose first sync fails.
fn without_a_sync(file: &Arc<dyn Storage>) -> Arc<dyn Storage> {
    let faults = FaultStorage::new(file.clone());
    faults.fail(Matching::operation(Operation::Flush), 0, Times::Once, EIO);
    faults
}

#[test]
fn an_open_frees_nothing_before_a_sync() {
    run(async {
        let file = leaking_image().await;
        assert_eq!(leaks(&file).await, 1);
        assert!(open(without_a_sync(&file)).await.is_err());
        assert_eq!(leaks(&file).await, 1);
        open(file.clone()).await.unwrap();
        assert_eq!(leaks(&file).await, 0);
    });
}

#[test]
fn a_repair_frees_nothing_before_a_sync() {
    run(async {
        for fix in [Fix::Leaks, Fix::All] {
            let file = leaking_image().await;
            let failed = repair(without_a_sync(&file), fix, &CheckOptions::default()).await;
            assert!(failed.is_err(), "{failed:?}");
            assert_eq!(leaks(&file).await, 1);
            let report = repair(file.clone(), fix, &CheckOptions::default()).await;
            assert_eq!(report.unwrap().leaks_fixed, 1);
            assert_eq!(leaks(&file).await, 0);
        }
    });
}

/// Counts are written whenever their cache asks for it, long before the first commit.
#[test]
fn what_leaks_before_the_first_commit_is_freed_as_well() {
    run(async {
        let file = Arc::new(MemStorage::new());
        let options = CreateOptions::default()
            .size_bytes(4 << 20)
            .cluster_size_bytes(512)
            .refcount_bits(64);
        create(file.clone(), None, &options).await.unwrap();
        let image = open(file.clone()).await.unwrap();
        for offset in (0..2 << 20).step_by(64 << 10) {
            let bytes = Buffer::zeroed(64 << 10);
            let written = image.write(offset, bytes, RequestFlags::default());
            written.await.unwrap();
        }
        let killed: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(file.snapshot()));
        assert!(leaks(&killed).await > 1000);
        open(killed.clone()).await.unwrap().close().await.unwrap();
        assert_eq!(leaks(&killed).await, 0);
        image.close().await.unwrap();
    });
}
