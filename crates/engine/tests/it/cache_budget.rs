//! One budget for the caches of many images.

use std::path::Path;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{CacheBudget, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, RequestFlags};
use vellum_io::lane::block_on;
use vellum_storage::file::Create;

const IMAGES: usize = 6;
const CLUSTER_BYTES: u64 = 512;
/// Of 512-byte clusters an L2 slice maps 32 KiB: this needs 2 MiB of them.
const SIZE_BYTES: u64 = 128 << 20;
const BUDGET_BYTES: u64 = 1 << 20;

async fn open_image(path: &Path, budget: &Arc<CacheBudget>) -> Arc<Qcow2> {
    let options = CreateOptions::default()
        .size_bytes(SIZE_BYTES)
        .cluster_size_bytes(CLUSTER_BYTES);
    let storage = crate::common::open(path, Create::IfMissing);
    create(storage, None, &options).await.unwrap();
    let options = OpenOptions::default().cache_budget(Some(budget.clone()));
    let file = crate::common::open(path, Create::No);
    Qcow2::open(file, Arc::new(DenyAll), options).await.unwrap()
}

/// What is written somewhere, in an image.
fn content(image: usize, offset: u64) -> Buffer {
    Buffer::copy_of(&[(image as u64 + offset / CLUSTER_BYTES) as u8; 512])
}

/// Writes one cluster for each slice of a part of the image, in no order.
async fn fill(number: usize, image: &Qcow2, slices: u64) {
    for at in 0..slices {
        let offset = at * 1237 % slices * (64 * CLUSTER_BYTES);
        let flags = RequestFlags::default();
        image
            .write(offset, content(number, offset), flags)
            .await
            .unwrap();
    }
}

async fn compare(number: usize, image: &Qcow2, slices: u64) {
    for at in 0..slices {
        let offset = at * 1511 % slices * (64 * CLUSTER_BYTES);
        let read = image.read(offset, Buffer::zeroed(512)).await.unwrap();
        assert!(
            read[..] == content(number, offset)[..],
            "{number}: {offset}"
        );
    }
}

const SLICES: u64 = SIZE_BYTES / (64 * CLUSTER_BYTES);

#[test]
fn caches_of_many_images_stay_within_one_budget_and_lose_nothing() {
    let folder = tempfile::tempdir().unwrap();
    block_on(async {
        let budget = CacheBudget::new(BUDGET_BYTES);
        let mut images = Vec::new();
        for number in 0..IMAGES {
            let path = folder.path().join(format!("{number}.qcow2"));
            images.push(open_image(&path, &budget).await);
        }
        for (number, image) in images.iter().enumerate() {
            fill(number, image, SLICES).await;
            image.flush().await.unwrap();
            assert!(
                budget.used_bytes() <= BUDGET_BYTES,
                "{}",
                budget.used_bytes()
            );
        }
        for (number, image) in images.iter().enumerate() {
            compare(number, image, SLICES).await;
            assert!(
                budget.used_bytes() <= BUDGET_BYTES,
                "{}",
                budget.used_bytes()
            );
        }
        assert!(budget.used_bytes() > BUDGET_BYTES / 2, "it is used");
        for image in images.drain(..) {
            image.close().await.unwrap();
        }
        assert_eq!(budget.used_bytes(), 0, "what has gone takes nothing");
    });
}

#[test]
fn who_needs_little_keeps_it_beside_one_that_could_use_all() {
    let folder = tempfile::tempdir().unwrap();
    block_on(async {
        let budget = CacheBudget::new(BUDGET_BYTES);
        let small = open_image(&folder.path().join("small.qcow2"), &budget).await;
        let large = open_image(&folder.path().join("large.qcow2"), &budget).await;
        let few = 100;
        fill(0, &small, few).await;
        small.flush().await.unwrap();
        compare(0, &small, few).await;
        let before = small.cache_usage().l2_bytes;
        fill(1, &large, SLICES).await;
        large.flush().await.unwrap();
        compare(1, &large, SLICES).await;
        let after = small.cache_usage().l2_bytes;
        assert!(after >= before / 2, "{before} -> {after}");
        assert!(large.cache_usage().l2_bytes > BUDGET_BYTES / 4);
    });
}
