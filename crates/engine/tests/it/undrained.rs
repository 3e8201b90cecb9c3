//! Bytes in the write buffer that cannot be written back, since their cluster cannot be
//! copied or the disk is full: they must not take anything else along.

use std::sync::Arc;

use crate::common::run_on_memory as run;
use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, RequestFlags, Result, Storage, ZeroRequest};
use vellum_storage::MemStorage;
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};

const ENOSPC: i32 = 28;
const EIO: i32 = 5;
const CLUSTER: u64 = 65536;
const SIZE: u64 = 16 * CLUSTER;

struct Bed {
    memory: Arc<dyn Storage>,
    file: Arc<FaultStorage>,
    below: Arc<FaultStorage>,
    image: Arc<Qcow2>,
}

async fn open(file: Arc<dyn Storage>, below: Arc<dyn Storage>) -> Arc<Qcow2> {
    let options = OpenOptions::default()
        .backing(Backing::Given(
            vellum::Raw::open(below, Default::default()).unwrap(),
        ))
        .discard(true);
    Qcow2::open(file, Arc::new(DenyAll), options).await.unwrap()
}

async fn bed() -> Bed {
    let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = CreateOptions::default()
        .size_bytes(SIZE)
        .cluster_size_bytes(CLUSTER);
    create(memory.clone(), None, &options).await.unwrap();
    let file = FaultStorage::new(memory.clone());
    let behind = Arc::new(MemStorage::with_bytes(vec![7; SIZE as usize]));
    let below = FaultStorage::new(behind);
    let image = open(file.clone(), below.clone()).await;
    Bed {
        memory,
        file,
        below,
        image,
    }
}

async fn write(image: &Qcow2, offset: u64, len: u64, value: u8) -> Result<()> {
    let mut buffer = Buffer::zeroed(len as usize);
    buffer.fill(value);
    let flags = RequestFlags::default();
    image.write(offset, buffer, flags).await.map(drop)
}

async fn byte(image: &Qcow2, offset: u64) -> u8 {
    image.read(offset, Buffer::for_read(1)).await.unwrap()[0]
}

/// A cluster that is written whole, and one whose bytes cannot be written back: its
/// backing device cannot be read.
async fn with_a_bad_backing_sector() -> Bed {
    let bed = bed().await;
    write(&bed.image, 0, CLUSTER, 1).await.unwrap();
    bed.below
        .fail(Matching::operation(Operation::Read), 0, Times::Always, EIO);
    write(&bed.image, 5 * CLUSTER + 4096, 4096, 2)
        .await
        .unwrap();
    bed
}

#[test]
fn a_cluster_that_cannot_be_copied_does_not_keep_others_from_the_disk() {
    run(async {
        let bed = with_a_bad_backing_sector().await;
        assert!(bed.image.flush().await.is_err());
        assert!(bed.image.close().await.is_err());
        bed.below.heal();
        let again = open(bed.memory, bed.below).await;
        assert_eq!(byte(&again, 0).await, 1, "another cluster is lost");
    });
}

#[test]
fn a_cluster_that_cannot_be_copied_can_be_overwritten() {
    run(async {
        let bed = with_a_bad_backing_sector().await;
        write(&bed.image, 5 * CLUSTER, CLUSTER, 3).await.unwrap();
        bed.image.flush().await.unwrap();
    });
}

#[test]
fn a_cluster_that_cannot_be_copied_can_be_zeroed() {
    run(async {
        let bed = with_a_bad_backing_sector().await;
        let zero = ZeroRequest::default();
        bed.image
            .write_zeroes(5 * CLUSTER, CLUSTER, zero)
            .await
            .unwrap();
        bed.image.flush().await.unwrap();
    });
}

#[test]
fn a_cluster_that_cannot_be_copied_can_be_discarded() {
    run(async {
        let bed = with_a_bad_backing_sector().await;
        bed.image.discard(0, SIZE).await.unwrap();
        bed.image.flush().await.unwrap();
    });
}

async fn with_a_full_disk() -> Bed {
    let bed = bed().await;
    write(&bed.image, 0, CLUSTER, 1).await.unwrap();
    bed.image.flush().await.unwrap();
    // Nothing can be written beyond what there is.
    let len_bytes = bed.memory.len_bytes().unwrap();
    let beyond = Matching::operation(Operation::Write).touching(len_bytes..u64::MAX);
    bed.file.fail(beyond, 0, Times::Always, ENOSPC);
    write(&bed.image, 5 * CLUSTER + 4096, 4096, 2)
        .await
        .unwrap();
    bed
}

#[test]
fn discarding_makes_room_on_a_full_disk() {
    run(async {
        let bed = with_a_full_disk().await;
        bed.image.discard(0, SIZE).await.unwrap();
        bed.image.flush().await.unwrap();
    });
}

#[test]
fn a_full_disk_does_not_keep_other_changes_from_it() {
    run(async {
        let bed = with_a_full_disk().await;
        // Needs no room.
        let zero = ZeroRequest::default();
        bed.image.write_zeroes(0, CLUSTER, zero).await.unwrap();
        assert!(bed.image.close().await.is_err());
        let again = open(bed.memory, bed.below).await;
        assert_eq!(byte(&again, 0).await, 0);
    });
}

#[test]
fn block_status_needs_no_room() {
    run(async {
        let bed = with_a_full_disk().await;
        let extent = bed.image.block_status(0, SIZE, 9).await.unwrap();
        assert!(extent.kind.is_data());
        let extent = bed
            .image
            .block_status(5 * CLUSTER + 4096, 4096, 9)
            .await
            .unwrap();
        assert!(extent.kind.is_data());
    });
}
