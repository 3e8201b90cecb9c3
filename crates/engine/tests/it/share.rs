//! Copy-on-write on storages that share blocks: the same bytes as by copying, with little
//! of them read and written.

use std::sync::Arc;

use crate::common::{Random, run_on_memory as run};
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Raw, RawOptions, RequestFlags};
use vellum_storage::wrap::{ReflinkFileSystem, ReflinkStorage};

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;

async fn image(
    storage: &Arc<ReflinkStorage>,
    backing: Arc<dyn BlockDevice>,
    read_only: bool,
) -> Arc<Qcow2> {
    let options = OpenOptions::default()
        .backing(Backing::Given(backing))
        .read_only(read_only);
    let opened = Qcow2::open(storage.clone(), Arc::new(DenyAll), options).await;
    opened.expect("an image")
}

async fn create_over(storage: &Arc<ReflinkStorage>, size_bytes: u64, random: &mut Random) {
    let cluster_size_bytes = random.pick(&[512 << 10, MIB, 2 * MIB]);
    let options = CreateOptions::default()
        .size_bytes(size_bytes)
        .cluster_size_bytes(cluster_size_bytes)
        .extended_l2(random.below(3) == 0);
    create(storage.clone(), None, &options)
        .await
        .expect("an image");
}

/// Writes here and there, and compares everything with a model.
async fn write_some(image: &Qcow2, shown: &mut [u8], random: &mut Random) {
    for number in 0..12 {
        let offset = random.below(shown.len() as u64 / 512) * 512;
        let len = random.pick(&[512, 4096, 5120, 65_536]);
        let len = len.min(shown.len() as u64 - offset);
        let byte = number as u8 + 100;
        shown[offset as usize..(offset + len) as usize].fill(byte);
        let bytes = Buffer::copy_of(&vec![byte; len as usize]);
        let written = image.write(offset, bytes, RequestFlags::default()).await;
        written.expect("a write");
        if random.below(3) == 0 {
            image.flush().await.expect("a flush");
        }
    }
    let read = image.read(0, Buffer::for_read(shown.len())).await;
    assert!(read.expect("a read")[..] == *shown);
}

#[test]
fn a_small_write_shares_the_rest_of_its_cluster() {
    run(async {
        let system = ReflinkFileSystem::granting(u64::MAX);
        let below: Vec<u8> = (0..8 * MIB).map(|at| (at / 512 % 251) as u8).collect();
        let raw = Raw::open(system.file(below.clone()), RawOptions::default());
        let storage = system.file(Vec::new());
        let options = CreateOptions::default()
            .size_bytes(8 * MIB)
            .cluster_size_bytes(2 * MIB);
        create(storage.clone(), None, &options)
            .await
            .expect("an image");
        let image = image(&storage, raw.expect("a raw device"), false).await;
        let before = system.read_bytes();
        let mut shown = below;
        for at in [3 * MIB, 4 * MIB + 1024, 8 * MIB - 512] {
            shown[at as usize..at as usize + 512].fill(7);
            let bytes = Buffer::copy_of(&[7; 512]);
            let written = image.write(at, bytes, RequestFlags::default()).await;
            written.expect("a write");
        }
        image.flush().await.expect("a flush");
        assert!(system.shared_bytes() >= 3 * (2 * MIB - 2 * BLOCK));
        assert!(system.read_bytes() - before < 64 << 10);
        let read = image.read(0, Buffer::for_read(shown.len())).await;
        assert!(read.expect("a read")[..] == shown);
        image.close().await.expect("a close");
    });
}

#[test]
fn shared_and_copied_clusters_show_the_same() {
    let mut shared_bytes = 0;
    for seed in 0..10 {
        shared_bytes += run(async move {
            let mut random = Random::new(seed);
            let system = ReflinkFileSystem::granting(random.pick(&[0, 1, 5, u64::MAX]));
            let size = 5 * MIB + random.below(2048) * 512;
            let len = random.pick(&[size, MIB, 3 * MIB + 512]).min(size);
            let mut shown: Vec<u8> = (0..len).map(|at| (at / 512 % 251) as u8).collect();
            let raw = Raw::open(system.file(shown.clone()), RawOptions::default());
            let mut below: Arc<dyn BlockDevice> = raw.expect("a raw device");
            shown.resize(size as usize, 0);
            for layer in 0..random.below(3) + 1 {
                let storage = system.file(Vec::new());
                create_over(&storage, size, &mut random).await;
                let writable = image(&storage, below.clone(), false).await;
                write_some(&writable, &mut shown, &mut random).await;
                writable.close().await.expect("a close");
                let report = check(storage.clone(), &CheckOptions::default()).await;
                let report = report.expect("a check");
                assert_eq!((report.corruptions, report.leaks), (0, 0), "layer {layer}");
                below = image(&storage, below, true).await;
            }
            system.shared_bytes()
        });
    }
    assert!(shared_bytes > 0);
}

#[test]
fn whole_clusters_are_written_by_sharing_them() {
    run(async {
        let system = ReflinkFileSystem::granting(u64::MAX);
        let bytes: Vec<u8> = (0..4 * MIB).map(|at| (at / 512 % 251) as u8).collect();
        let source = system.file(bytes.clone());
        let storage = system.file(Vec::new());
        let options = CreateOptions::default().size_bytes(4 * MIB);
        create(storage.clone(), None, &options)
            .await
            .expect("an image");
        let image = Qcow2::open(storage.clone(), Arc::new(DenyAll), OpenOptions::default());
        let image = image.await.expect("an image");
        let old = Buffer::copy_of(&vec![9; MIB as usize]);
        let written = image.write(MIB, old, RequestFlags::default()).await;
        written.expect("a write");
        // Half of it in place, half in new clusters.
        let shared = image.write_shared(MIB / 2, MIB, source.clone(), 2 * MIB);
        shared.await.expect("shared clusters");
        assert_eq!(system.shared_bytes(), MIB);
        // Not from a block's beginning, a part of a new cluster, beyond the end.
        for (at, len, from) in [(0, MIB, 512), (3 * MIB, BLOCK, 0), (3 * MIB, 2 * MIB, 0)] {
            let refused = image.write_shared(at, len, source.clone(), from).await;
            refused.expect_err("a refusal");
        }
        image.flush().await.expect("a flush");
        let mut shown = vec![0; 4 * MIB as usize];
        shown[MIB as usize..2 * MIB as usize].fill(9);
        let half = MIB as usize / 2;
        shown[half..3 * half].copy_from_slice(&bytes[2 * MIB as usize..3 * MIB as usize]);
        let read = image.read(0, Buffer::for_read(shown.len())).await;
        assert!(read.expect("a read")[..] == shown);
        image.close().await.expect("a close");
        let report = check(storage, &CheckOptions::default()).await;
        let report = report.expect("a check");
        assert_eq!((report.corruptions, report.leaks), (0, 0));
    });
}
