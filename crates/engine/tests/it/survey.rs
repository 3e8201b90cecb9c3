//! The survey tells what is there: counts of every kind, and the memory of a cache.

use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::io::lane;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::survey::{Survey, SurveyOptions, survey};
use vellum::qcow2::{CacheOptions, NewSnapshot, OpenOptions, Qcow2, SnapshotSelector};
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Buffer, RequestFlags, Storage, ZeroRequest};

const CLUSTER: u64 = 4096;

async fn image(size_bytes: u64, extended_l2: bool) -> (Arc<dyn Storage>, Arc<Qcow2>) {
    let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = CreateOptions::default()
        .size_bytes(size_bytes)
        .cluster_size_bytes(if extended_l2 { 65536 } else { CLUSTER })
        .extended_l2(extended_l2);
    create(file.clone(), None, &options).await.unwrap();
    let image = open(&file, CacheOptions::default()).await;
    (file, image)
}

async fn open(file: &Arc<dyn Storage>, cache: CacheOptions) -> Arc<Qcow2> {
    let options = OpenOptions::default().cache(cache);
    let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
    opened.unwrap()
}

async fn write(image: &Qcow2, cluster: u64, count: u64, value: u8) {
    let bytes = Buffer::copy_of(&vec![value; (count * CLUSTER) as usize]);
    let flags = RequestFlags::default();
    image.write(cluster * CLUSTER, bytes, flags).await.unwrap();
}

async fn look(file: &Arc<dyn Storage>) -> Survey {
    let options = SurveyOptions::default().cells(64).on_progress(None);
    survey(file.clone(), &options).await.unwrap()
}

#[test]
fn every_kind_of_cluster_is_counted() {
    lane::block_on(async {
        let (file, image) = image(64 << 20, false).await;
        write(&image, 0, 10, 1).await;
        write(&image, 100, 5, 2).await;
        let same = Buffer::copy_of(&[7; 8 * CLUSTER as usize]);
        let flags = RequestFlags::default();
        image
            .write_compressed(200 * CLUSTER, same, flags)
            .await
            .unwrap();
        let zeroes = ZeroRequest::default();
        image
            .write_zeroes(300 * CLUSTER, 20 * CLUSTER, zeroes)
            .await
            .unwrap();
        // Zeroes over data, without leave to give it up: the place is kept.
        image
            .write_zeroes(100 * CLUSTER, 2 * CLUSTER, zeroes)
            .await
            .unwrap();
        image.close().await.unwrap();
        let survey = look(&file).await;
        let disk = survey.disk;
        assert_eq!(disk.total_clusters, 16384);
        assert_eq!(disk.data_clusters, 13);
        assert_eq!(disk.compressed_clusters, 8);
        assert!(disk.compressed_bytes < 8 * CLUSTER);
        assert_eq!((disk.zero_clusters, disk.zero_with_place_clusters), (22, 2));
        assert_eq!(disk.invalid_clusters, 0);
        let metadata = survey.metadata;
        assert_eq!((metadata.header, metadata.l1), (CLUSTER, CLUSTER));
        assert_eq!(metadata.l2, CLUSTER, "one table");
        assert_eq!(metadata.snapshot_table + metadata.snapshot_l1, 0);
        assert_eq!(survey.file_length_bytes, file.len_bytes().unwrap());
        let in_cells: u64 = survey.host.iter().map(|cell| cell.used_bytes()).sum();
        assert_eq!(in_cells, survey.counted_bytes, "each cluster in one cell");
    });
}

#[test]
fn subclusters_are_counted_one_by_one() {
    lane::block_on(async {
        let (file, image) = image(64 << 20, true).await;
        write(&image, 0, 1, 1).await;
        write(&image, 16, 16, 1).await;
        image.close().await.unwrap();
        let disk = look(&file).await.disk;
        assert_eq!((disk.data_clusters, disk.partial_clusters), (2, 1));
        assert_eq!(disk.allocated_subclusters, 2 + 32);
    });
}

/// What the survey says that deleting a snapshot gives back is what it gives back.
#[test]
fn a_snapshot_holds_what_its_deletion_sets_free() {
    lane::block_on(async {
        let (file, image) = image(64 << 20, false).await;
        write(&image, 0, 2000, 1).await;
        for (name, first) in [("a", 100), ("b", 150), ("c", 1500)] {
            let snapshot = NewSnapshot {
                name: name.to_owned(),
                ..NewSnapshot::default()
            };
            image.create_snapshot(snapshot).await.unwrap();
            write(&image, first, 120, 2).await;
        }
        image.close().await.unwrap();
        let all = look(&file).await;
        for (index, name) in ["a", "b", "c"].iter().enumerate() {
            let before = look(&file).await;
            let own = before.snapshots[0].own_bytes;
            assert!(own > 0 && own <= before.snapshots[0].total_bytes + 64 * CLUSTER);
            assert_eq!(before.snapshots.len(), 3 - index);
            let held: u64 = before.snapshots.iter().map(|space| space.own_bytes).sum();
            assert!(held <= before.held_by_snapshots_bytes());
            let image = open(&file, CacheOptions::default()).await;
            let selector = SnapshotSelector::Name(name.to_string());
            image.delete_snapshot(selector).await.unwrap();
            image.close().await.unwrap();
            let after = look(&file).await;
            assert_eq!(before.counted_bytes - after.counted_bytes, own, "{name}");
        }
        let none = look(&file).await;
        assert_eq!(none.held_by_snapshots_bytes(), 0);
        let held = all.held_by_snapshots_bytes();
        assert_eq!(all.counted_bytes - none.counted_bytes, held);
    });
}

/// The memory that is told for a packed cache is what a cache takes that holds it all.
#[test]
fn a_cache_takes_about_what_is_told() {
    lane::block_on(async {
        let (file, image) = image(1 << 30, false).await;
        let mut at = 1;
        for step in 0..3000_u64 {
            at = (at * 48271 + step) % (1 << 18);
            write(&image, at, 1, 3).await;
        }
        image.close().await.unwrap();
        let told = look(&file).await.cache.packed_bytes;
        let cache = CacheOptions::default().l2_cache_size_bytes(Some(64 << 20));
        let image = open(&file, cache).await;
        let mut offset = 0;
        while offset < image.size_bytes() {
            let left = image.size_bytes() - offset;
            offset += image.block_status(offset, left, 0).await.unwrap().len_bytes;
        }
        let taken = image.cache_usage().l2_bytes;
        image.close().await.unwrap();
        let ratio = told as f64 / taken as f64;
        assert!((0.5..1.5).contains(&ratio), "told {told}, taken {taken}");
    });
}
