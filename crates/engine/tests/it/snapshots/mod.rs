//! Internal snapshots against plain arrays of bytes, over kinds of images, beside
//! requests; every image must check clean, without a leaked cluster.

mod table;

use std::sync::Arc;

use crate::common::{Random, backing, random_backing, run_on_memory as run};
use futures_util::future::join_all;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{
    CacheOptions, NewSnapshot, OpenOptions, PreallocateAhead, Qcow2, SnapshotSelector,
};
use vellum::{BlockDevice, Buffer, ErrorKind, RequestFlags, Storage, ZeroRequest};
use vellum_storage::MemStorage;

struct Case {
    options: CreateOptions,
    cache: CacheOptions,
    backing: Option<Vec<u8>>,
}

fn case(random: &mut Random) -> Case {
    let extended_l2 = random.below(3) == 0;
    let bits = match extended_l2 {
        true => 14 + random.below(3),
        false => 9 + random.below(8),
    };
    let version2 = !extended_l2 && random.below(5) == 0;
    let cluster = 1 << bits;
    let size = (random.below(60) + 1) * cluster + random.below(cluster / 512) * 512;
    let options = CreateOptions::default()
        .size_bytes(size)
        .cluster_size_bytes(cluster)
        .extended_l2(extended_l2)
        .version(if version2 { 2 } else { 3 })
        .refcount_bits(if version2 { 16 } else { 1 << random.below(7) })
        .lazy_refcounts(!version2 && random.below(4) == 0);
    let small = random.below(2) == 0;
    let cache = CacheOptions::default()
        .l2_cache_size_bytes(small.then_some(1024))
        .l2_cache_entry_size_bytes(small.then_some(512));
    let backing = random_backing(random, size);
    Case {
        options,
        cache,
        backing,
    }
}

async fn open(file: &Arc<dyn Storage>, case: &Case) -> Arc<Qcow2> {
    let options = OpenOptions::default()
        .cache(case.cache)
        .backing(backing(case.backing.as_deref()))
        .ahead(
            PreallocateAhead::default()
                .after_clusters(3)
                .max_bytes(4 * case.options.cluster_size_bytes),
        )
        .discard(true);
    Qcow2::open(file.clone(), Arc::new(DenyAll), options)
        .await
        .unwrap()
}

/// The disk and its snapshots, as they should be.
struct Model {
    disk: Vec<u8>,
    /// By identifier.
    snapshots: Vec<(String, Vec<u8>)>,
}

async fn change(image: &Qcow2, random: &mut Random, disk: &mut [u8]) {
    let size = disk.len() as u64;
    let start = random.below(size);
    let len = (random.below(90_000) + 1).min(size - start);
    let range = start as usize..(start + len) as usize;
    if random.below(4) == 0 {
        disk[range].fill(0);
        let zero = ZeroRequest::default().may_unmap(random.below(2) == 0);
        return image.write_zeroes(start, len, zero).await.unwrap();
    }
    let fill = random.below(255) as u8 + 1;
    disk[range].fill(fill);
    let mut buffer = Buffer::zeroed(len as usize);
    buffer.fill(fill);
    let write = image.write(start, buffer, RequestFlags::default());
    drop(write.await.unwrap());
}

async fn content(image: &Qcow2) -> Vec<u8> {
    let len = image.size_bytes() as usize;
    image.read(0, Buffer::for_read(len)).await.unwrap().to_vec()
}

fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: size");
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{what}: content");
}

async fn step(image: &Qcow2, random: &mut Random, model: &mut Model, case: &Case) {
    let pick = |random: &mut Random, model: &Model| {
        let count = model.snapshots.len() as u64;
        (count > 0).then(|| random.below(count) as usize)
    };
    match random.below(10) {
        0..=2 => {
            let new = NewSnapshot {
                name: format!("name {}", random.below(3)),
                ..NewSnapshot::default()
            };
            match image.create_snapshot(new).await {
                Ok(made) => model.snapshots.push((made.id, model.disk.clone())),
                Err(error) => {
                    assert!(case.options.refcount_bits < 8, "{error}");
                    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
                }
            }
        }
        3 => {
            if let Some(index) = pick(random, model) {
                let (id, _) = model.snapshots.remove(index);
                let deleted = image.delete_snapshot(SnapshotSelector::Id(id));
                deleted.await.unwrap();
            }
        }
        4 => {
            if let Some(index) = pick(random, model) {
                let (id, content) = &model.snapshots[index];
                let applied = image.apply_snapshot(SnapshotSelector::Id(id.clone())).await;
                match applied {
                    Ok(()) => model.disk.clone_from(content),
                    Err(error) => assert!(case.options.refcount_bits < 8, "{error}"),
                }
            }
        }
        5 if case.options.version > 2 && case.backing.is_none() => {
            let size = (random.below(case.options.size_bytes / 256) + 1) * 512;
            image.truncate(size).await.unwrap();
            model.disk.resize(size as usize, 0);
        }
        _ => change(image, random, &mut model.disk).await,
    }
}

async fn verify(image: &Qcow2, model: &Model) {
    assert_same(&content(image).await, &model.disk, "the disk");
    let listed = image.snapshots();
    let ids: Vec<&str> = listed.iter().map(|info| info.id.as_str()).collect();
    let expected: Vec<&str> = model.snapshots.iter().map(|(id, _)| id.as_str()).collect();
    assert_eq!(ids, expected);
    for (id, expected) in &model.snapshots {
        let snapshot = image.open_snapshot(SnapshotSelector::Id(id.clone()));
        let found = content(&snapshot.await.unwrap()).await;
        assert_same(&found, expected, &format!("snapshot {id}"));
    }
}

async fn assert_sound(file: &Arc<dyn Storage>) {
    let report = check(file.clone(), &CheckOptions::default()).await.unwrap();
    let found = (report.corruptions, report.leaks, report.check_errors);
    assert_eq!(found, (0, 0, 0));
}

async fn scenario(seed: u64) {
    let mut random = Random::new(seed);
    let case = case(&mut random);
    let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    create(file.clone(), None, &case.options).await.unwrap();
    let mut model = Model {
        disk: vec![0; case.options.size_bytes as usize],
        snapshots: Vec::new(),
    };
    if let Some(backing) = &case.backing {
        let there = backing.len().min(model.disk.len());
        model.disk[..there].copy_from_slice(&backing[..there]);
    }
    for _ in 0..3 {
        let image = open(&file, &case).await;
        for _ in 0..12 {
            step(&image, &mut random, &mut model, &case).await;
        }
        verify(&image, &model).await;
        image.close().await.unwrap();
        assert_sound(&file).await;
    }
    let image = open(&file, &case).await;
    verify(&image, &model).await;
    while let Some((id, _)) = model.snapshots.pop() {
        image
            .delete_snapshot(SnapshotSelector::Id(id))
            .await
            .unwrap();
    }
    verify(&image, &model).await;
    image.close().await.unwrap();
    assert_sound(&file).await;
}

#[test]
fn snapshots_hold_what_the_disk_was() {
    for seed in 0..60 {
        run(scenario(seed));
    }
}

/// Requests that run beside a snapshot are in it or not, each of its clusters wholly.
#[test]
fn requests_run_beside_snapshots() {
    run(async {
        const CLUSTER: u64 = 4096;
        const CLUSTERS: u64 = 64;
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let options = CreateOptions::default()
            .size_bytes(CLUSTERS * CLUSTER)
            .cluster_size_bytes(CLUSTER);
        create(file.clone(), None, &options).await.unwrap();
        let case = Case {
            options,
            cache: CacheOptions::default(),
            backing: None,
        };
        let image = open(&file, &case).await;
        for round in 1..=20u8 {
            let writes = (0..CLUSTERS).map(|cluster| {
                let mut buffer = Buffer::zeroed(CLUSTER as usize / 2);
                buffer.fill(round);
                let write = image.write(cluster * CLUSTER, buffer, RequestFlags::default());
                async move { write.await.map(drop) }
            });
            let new = NewSnapshot::default();
            let (made, written, read) = futures_util::join!(
                image.create_snapshot(new),
                join_all(writes),
                image.read(0, Buffer::for_read((CLUSTERS * CLUSTER) as usize))
            );
            written.into_iter().for_each(|write| write.unwrap());
            drop(read.unwrap());
            let made = made.unwrap();
            let snapshot = image.open_snapshot(SnapshotSelector::Id(made.id)).await;
            let content = content(&snapshot.unwrap()).await;
            for cluster in content.chunks_exact(CLUSTER as usize) {
                let (written, rest) = cluster.split_at(CLUSTER as usize / 2);
                assert!(written.iter().all(|byte| *byte == written[0]));
                assert!(written[0] == round || written[0] == round - 1);
                assert!(rest.iter().all(|byte| *byte == 0));
            }
        }
        let gone = SnapshotSelector::Id("7".into());
        image.delete_snapshot(gone.clone()).await.unwrap();
        let error = image.delete_snapshot(gone.clone()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(
            image.open_snapshot(gone).await.unwrap_err().kind(),
            ErrorKind::NotFound
        );
        image.close().await.unwrap();
        assert_sound(&file).await;
    });
}

#[test]
fn an_identifier_is_given_once_and_counts_stay_in_their_width() {
    run(async {
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let options = CreateOptions::default()
            .size_bytes(1 << 20)
            .refcount_bits(1);
        create(file.clone(), None, &options).await.unwrap();
        let case = Case {
            options,
            cache: CacheOptions::default(),
            backing: None,
        };
        let image = open(&file, &case).await;
        let numbered = NewSnapshot {
            id: Some("9".into()),
            ..NewSnapshot::default()
        };
        image.create_snapshot(numbered.clone()).await.unwrap();
        let error = image.create_snapshot(numbered).await.unwrap_err();
        assert_eq!(error.errno(), 17, "{error}");
        let buffer = Buffer::zeroed(4096);
        let write = image.write(0, buffer, RequestFlags::default());
        drop(write.await.unwrap());
        let error = image
            .create_snapshot(NewSnapshot::default())
            .await
            .unwrap_err();
        assert_eq!(error.errno(), 22, "{error}");
        assert_eq!(image.snapshots().len(), 1);
        image.close().await.unwrap();
        assert_sound(&file).await;
    });
}

/// The refcount block that a snapshot needs at the end of the file moves with all others, and is not taken
/// back at the close as if it still lay where it was made.
#[test]
fn a_snapshot_that_needs_another_refcount_block_leaks_nothing() {
    for clusters in 60..90 {
        run(async move {
            let options = CreateOptions::default()
                .size_bytes(128 * 512)
                .cluster_size_bytes(512)
                .refcount_bits(64);
            let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
            create(file.clone(), None, &options).await.unwrap();
            let open = || Qcow2::open(file.clone(), Arc::new(DenyAll), OpenOptions::default());
            let image = open().await.unwrap();
            let bytes = Buffer::copy_of(&vec![7; clusters * 512]);
            image
                .write(0, bytes, RequestFlags::default())
                .await
                .unwrap();
            image.close().await.unwrap();
            let image = open().await.unwrap();
            image.create_snapshot(NewSnapshot::default()).await.unwrap();
            image.close().await.unwrap();
            assert_sound(&file).await;
        });
    }
}
