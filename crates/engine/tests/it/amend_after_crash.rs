//! Amending images whose refcounts are too high, as a crash leaves them: nothing that a
//! snapshot holds may be taken for the disk's own.

use std::sync::Arc;

use crate::common::run_on_memory as run;
use vellum::gate::DenyAll;
use vellum::qcow2::amend::AmendOptions;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{NewSnapshot, OpenOptions, Qcow2, SnapshotSelector};
use vellum::{BlockDevice, Buffer, Buffers, RequestFlags, Storage};
use vellum_storage::{MemStorage, WriteFlags};

const CLUSTER_BYTES: u64 = 64 << 10;
const HOST_BITS: u64 = 0x00ff_ffff_ffff_fe00;
const ZERO_FLAG: u64 = 1;

async fn open(file: &Arc<dyn Storage>) -> Arc<Qcow2> {
    let options = OpenOptions::default();
    Qcow2::open(file.clone(), Arc::new(DenyAll), options)
        .await
        .unwrap()
}

async fn write(image: &Qcow2, cluster: u64, byte: u8) {
    let mut bytes = Buffer::zeroed(CLUSTER_BYTES as usize);
    bytes.fill(byte);
    let written = image.write(cluster * CLUSTER_BYTES, bytes, RequestFlags::default());
    written.await.unwrap();
}

async fn number(file: &Arc<dyn Storage>, at: u64) -> u64 {
    let buffers = Buffers::from_iter([Buffer::zeroed(8)]);
    let bytes = file.read(at, buffers).await.unwrap();
    u64::from_be_bytes(bytes[0][..8].try_into().unwrap())
}

async fn put(file: &Arc<dyn Storage>, at: u64, bytes: &[u8]) {
    let buffers = Buffers::from_iter([Buffer::copy_of(bytes)]);
    file.write(at, buffers, WriteFlags::default())
        .await
        .unwrap();
}

/// A disk whose first cluster reads as zeroes, in the place of the snapshot's data, and
/// whose L2 table is counted once too often.
async fn leaking_image(file: &Arc<dyn Storage>) {
    let options = CreateOptions::default().size_bytes(16 * CLUSTER_BYTES);
    create(file.clone(), None, &options).await.unwrap();
    let image = open(file).await;
    write(&image, 0, 7).await;
    let new = NewSnapshot {
        name: "kept".into(),
        ..NewSnapshot::default()
    };
    image.create_snapshot(new).await.unwrap();
    write(&image, 1, 8).await;
    image.close().await.unwrap();

    let l1_table = number(file, 40).await;
    let l2_table = number(file, l1_table).await & HOST_BITS;
    let entry = number(file, l2_table).await;
    put(file, l2_table, &(entry | ZERO_FLAG).to_be_bytes()).await;
    put(file, l1_table, &l2_table.to_be_bytes()).await; // without the COPIED flag
    let refcount_block = number(file, number(file, 48).await).await;
    put(
        file,
        refcount_block + l2_table / CLUSTER_BYTES * 2,
        &2_u16.to_be_bytes(),
    )
    .await;
}

#[test]
fn a_snapshot_keeps_its_data_beside_a_table_that_is_counted_too_often() {
    run(async {
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        leaking_image(&file).await;
        let image = open(&file).await;
        let options = AmendOptions::default().version(Some(2));
        image.amend(options, None).await.unwrap();

        let image = open(&file).await;
        let disk = image.read(0, Buffer::for_read(2 * CLUSTER_BYTES as usize));
        let disk = disk.await.unwrap();
        let (first, second) = disk.split_at(CLUSTER_BYTES as usize);
        assert!(first.iter().all(|&byte| byte == 0));
        assert!(second.iter().all(|&byte| byte == 8));
        let selector = SnapshotSelector::Name("kept".into());
        let kept = image.open_snapshot(selector).await.unwrap();
        let data = kept.read(0, Buffer::for_read(CLUSTER_BYTES as usize));
        assert!(data.await.unwrap().iter().all(|&byte| byte == 7));
        kept.close().await.unwrap();
        image.close().await.unwrap();

        let report = check(file, &CheckOptions::default()).await.unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 1), "{report:?}");
    });
}
