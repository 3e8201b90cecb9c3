//! Rebases, also of images so large that other threads help.

use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Raw, RawOptions, RequestFlags};
use vellum_io::lane::block_on;
use vellum_jobs::copy::{Silent, Step};
use vellum_jobs::rebase::{RebaseOptions, rebase};
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};
use vellum_storage::{MemStorage, Storage, delegate};

const CLUSTER: usize = 64 << 10;
const EIO: i32 = 5;

fn raw(bytes: Vec<u8>) -> Arc<dyn BlockDevice> {
    let storage = Arc::new(MemStorage::with_bytes(bytes));
    Raw::open(storage, RawOptions::default()).unwrap()
}

async fn open(file: Arc<MemStorage>, backing: &Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
    let options = OpenOptions::default().backing(Backing::Given(backing.clone()));
    Qcow2::open(file, Arc::new(DenyAll), options).await.unwrap()
}

async fn overlay(old: &Arc<dyn BlockDevice>) -> (Arc<MemStorage>, Arc<dyn BlockDevice>) {
    let file = Arc::new(MemStorage::new());
    let options = CreateOptions::default().size_bytes(old.size_bytes());
    create(file.clone(), None, &options).await.unwrap();
    let image = open(file.clone(), old).await;
    (file, image)
}

const OPTIONS: RebaseOptions = RebaseOptions {
    parallel: 8,
    unit_bytes: CLUSTER as u64,
    compress: false,
};

/// What no two clusters have in common.
fn content(clusters: usize) -> Vec<u8> {
    let mut bytes = vec![0; clusters * CLUSTER];
    for (number, sector) in bytes.chunks_mut(512).enumerate() {
        sector.fill((number * 512 / CLUSTER * 7 + number) as u8);
    }
    bytes
}

#[test]
fn what_differs_is_written_and_nothing_else() {
    for clusters in [10, 401] {
        let last = clusters - 1;
        let (own, different) = (7, [0, 3, 4, last]);
        let before = content(clusters);
        let mut after = before.clone();
        for cluster in different {
            after[cluster * CLUSTER + 4711] ^= 1;
        }
        let (old, new) = (raw(before.clone()), raw(after));
        block_on(async {
            let (file, image) = overlay(&old).await;
            let bytes = Buffer::copy_of(&vec![0xee; CLUSTER]);
            let at = (own * CLUSTER) as u64;
            image
                .write(at, bytes, RequestFlags::default())
                .await
                .unwrap();
            rebase(&image, Some(&old), Some(&new), &OPTIONS, &mut Silent)
                .await
                .unwrap();
            for cluster in 0..clusters {
                let at = (cluster * CLUSTER) as u64;
                let status = image.block_status(at, CLUSTER as u64, 0).await.unwrap();
                let held = cluster == own || different.contains(&cluster);
                assert_eq!(
                    status.kind.is_present(),
                    held,
                    "cluster {cluster} of {clusters}"
                );
            }
            image.close().await.unwrap();

            let moved = open(file, &new).await;
            let shown = moved.read(0, Buffer::for_read(before.len())).await.unwrap();
            let mut expected = before.clone();
            expected[own * CLUSTER..][..CLUSTER].fill(0xee);
            assert!(shown[..] == expected[..], "{clusters} clusters");
            moved.close().await.unwrap();
        });
    }
}

/// Version 2 has no clusters that read as zeroes whatever lies behind them.
#[test]
fn an_image_of_version_2_that_stood_alone_hides_what_it_is_put_over() {
    for version in [2, 3] {
        let new = raw(content(4));
        block_on(async {
            let file = Arc::new(MemStorage::new());
            let options = CreateOptions::default()
                .size_bytes((6 * CLUSTER) as u64)
                .version(version);
            create(file.clone(), None, &options).await.unwrap();
            let gate = Arc::new(DenyAll);
            let image = Qcow2::open(file.clone(), gate, OpenOptions::default()).await;
            let image: Arc<dyn BlockDevice> = image.unwrap();
            let own = Buffer::copy_of(&[0xee; CLUSTER]);
            let written = image.write(0, own, RequestFlags::default()).await;
            written.unwrap();
            rebase(&image, None, Some(&new), &OPTIONS, &mut Silent)
                .await
                .unwrap();
            image.close().await.unwrap();
            let moved = open(file, &new).await;
            let shown = moved.read(0, Buffer::for_read(6 * CLUSTER)).await.unwrap();
            let mut expected = vec![0; 6 * CLUSTER];
            expected[..CLUSTER].fill(0xee);
            assert!(shown[..] == expected[..], "version {version}");
            moved.close().await.unwrap();
        });
    }
}

/// What a server shows: it has the name that others under the same URL have.
#[derive(Debug)]
struct Served(MemStorage);

impl Storage for Served {
    delegate!(
        0: len_bytes, read, write, write_zeroes, flush, truncate, block_status,
    );

    fn name(&self) -> &str {
        "http://example/disk"
    }
}

#[test]
fn storages_of_one_name_are_compared() {
    let served = |byte| -> Arc<dyn BlockDevice> {
        let storage = Served(MemStorage::with_bytes(vec![byte; 4 * CLUSTER]));
        Raw::open(Arc::new(storage), RawOptions::default()).unwrap()
    };
    let (old, new) = (served(1), served(2));
    block_on(async {
        let (file, image) = overlay(&old).await;
        rebase(&image, Some(&old), Some(&new), &OPTIONS, &mut Silent)
            .await
            .unwrap();
        image.close().await.unwrap();
        let moved = open(file, &new).await;
        let shown = moved.read(0, Buffer::for_read(4 * CLUSTER)).await.unwrap();
        assert!(shown[..] == [1; 4 * CLUSTER][..]);
        moved.close().await.unwrap();
    });
}

#[test]
fn errors_say_which_device_could_not_be_read() {
    let clusters = 400;
    let bad = (300 * CLUSTER) as u64;
    for old_fails in [true, false] {
        let faulty = FaultStorage::new(Arc::new(MemStorage::with_bytes(content(clusters))));
        let read = Matching::operation(Operation::Read).touching(bad..bad + 1);
        faulty.fail(read, 0, Times::Always, EIO);
        let faulty: Arc<dyn Storage> = faulty;
        let faulty: Arc<dyn BlockDevice> = Raw::open(faulty, RawOptions::default()).unwrap();
        let sound = raw(content(clusters));
        let (old, new, step) = match old_fails {
            true => (faulty, sound, Step::Read),
            false => (sound, faulty, Step::ReadShown),
        };
        block_on(async {
            let (_, image) = overlay(&old).await;
            let done = rebase(&image, Some(&old), Some(&new), &OPTIONS, &mut Silent).await;
            let error = done.unwrap_err();
            assert_eq!(error.step, step);
            assert!(error.offset_bytes <= bad && bad - error.offset_bytes < 1 << 20);
            image.close().await.unwrap();
        });
    }
}
