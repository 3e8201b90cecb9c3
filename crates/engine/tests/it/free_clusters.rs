//! Free clusters on a full disk: they return their blocks where no other cluster helps, are looked for without end
//! nowhere, and what found no room for itself becomes one of them again.

use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{BitmapOptions, OpenOptions, Qcow2};
use vellum::{BlockDevice, ErrorKind, Preallocation};
use vellum_storage::MemStorage;
use vellum_storage::wrap::SmallStorage;

use crate::common::run_on_memory as run;
use crate::full_disk::{MIB, close_and_check, holds, open_small, put, small_image};

const CLUSTER_BYTES: u64 = 512;

/// Free clusters that kept their room return it to a write into a hole that the mapping leads to.
#[test]
fn mapped_holes_get_the_room_of_free_clusters() {
    run(async {
        let file = SmallStorage::new(Arc::new(MemStorage::new()));
        let options = CreateOptions::default()
            .size_bytes(16 * MIB)
            .preallocation(Preallocation::Metadata);
        create(file.clone(), None, &options).await.unwrap();
        let options = OpenOptions::default()
            .discard(true)
            .pass_discard_request(Some(false));
        let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
        let image = opened.unwrap();
        put(&image, 0, 4 * MIB, 1).await.unwrap();
        image.discard(0, 4 * MIB).await.unwrap();
        image.flush().await.unwrap();
        file.set_left_bytes(Some(0));
        put(&image, 8 * MIB, 4 * MIB, 2).await.unwrap();
        let full = put(&image, 12 * MIB, 64 << 10, 3).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::NoSpace);
        image.flush().await.unwrap();
        holds(&image, 0, 4 * MIB, 0).await;
        holds(&image, 8 * MIB, 4 * MIB, 2).await;
        holds(&image, 12 * MIB, 4 * MIB, 0).await;
        close_and_check(&file, &image).await;
    });
}

/// A search for room ends where more free clusters lie apart than are remembered.
#[test]
fn a_search_for_room_ends_on_a_fragmented_image() {
    const FREE_CLUSTERS: u64 = 34_000;
    run(async {
        let file = SmallStorage::new(Arc::new(MemStorage::new()));
        let options = CreateOptions::default()
            .size_bytes(64 * MIB)
            .cluster_size_bytes(CLUSTER_BYTES);
        create(file.clone(), None, &options).await.unwrap();
        let options = OpenOptions::default()
            .discard(true)
            .pass_discard_request(Some(false));
        let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
        let image = opened.unwrap();
        let written = 2 * FREE_CLUSTERS * CLUSTER_BYTES;
        for at in (0..written).step_by(MIB as usize) {
            put(&image, at, MIB, 1).await.unwrap();
        }
        for number in 0..FREE_CLUSTERS {
            let at = 2 * number * CLUSTER_BYTES;
            image.discard(at, CLUSTER_BYTES).await.unwrap();
        }
        image.flush().await.unwrap();
        file.set_left_bytes(Some(0));
        let full = put(&image, 40 * MIB, 20 * MIB, 2).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::NoSpace);
        file.set_left_bytes(None);
        close_and_check(&file, &image).await;
    });
}

/// Writes that find no room for the bits of a bitmap leave nothing behind.
#[test]
fn bits_that_find_no_room_leak_nothing() {
    run(async {
        let (file, image) = small_image().await;
        let added = image.bitmaps().add("b", BitmapOptions::default());
        added.await.unwrap();
        image.close().await.unwrap();
        let image = open_small(&file).await;
        file.set_left_bytes(Some(0));
        for number in 0..20 {
            let full = put(&image, number * MIB, MIB, 1).await.unwrap_err();
            assert_eq!(full.kind(), ErrorKind::NoSpace);
        }
        file.set_left_bytes(None);
        put(&image, 30 * MIB, MIB, 2).await.unwrap();
        close_and_check(&file, &image).await;
    });
}
