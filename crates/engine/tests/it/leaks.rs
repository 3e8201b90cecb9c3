//! What a killed process leaks is freed by the next open, and nothing else is, whatever has changed
//! the image before, beside or after it.

use std::ops::Range;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, CheckReport, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{NewSnapshot, OpenOptions, Qcow2, SnapshotSelector};
use vellum::{BlockDevice, Buffer, RequestFlags, Storage};
use vellum_storage::MemStorage;

use crate::common::{Random, run_on_memory as run};

const CLUSTER: u64 = 4096;
const CLUSTERS: u64 = 1200;
/// Offset of the compatible features in the header.
const COMPATIBLE: usize = 80;
const MAY_HAVE_LEAKS: u64 = 1 << 43;

async fn open(storage: Arc<dyn Storage>) -> Arc<Qcow2> {
    let options = OpenOptions::default().discard(true);
    let opened = Qcow2::open(storage, Arc::new(DenyAll), options).await;
    opened.expect("a sound image")
}

async fn new_image(options: &CreateOptions) -> Arc<MemStorage> {
    let memory = Arc::new(MemStorage::new());
    create(memory.clone(), None, options).await.expect("room");
    memory
}

fn options() -> CreateOptions {
    CreateOptions::default()
        .size_bytes(CLUSTERS * CLUSTER)
        .cluster_size_bytes(CLUSTER)
}

/// The file of a process that is killed now.
fn killed(memory: &MemStorage) -> Arc<MemStorage> {
    Arc::new(MemStorage::with_bytes(memory.snapshot()))
}

async fn verdict(storage: Arc<dyn Storage>) -> CheckReport {
    let report = check(storage, &CheckOptions::default()).await;
    let report = report.expect("it can be checked");
    assert_eq!((report.corruptions, report.check_errors), (0, 0));
    report
}

fn tells_of_leaks(memory: &MemStorage) -> bool {
    let bytes = memory.snapshot();
    let field = bytes[COMPATIBLE..COMPATIBLE + 8].try_into();
    u64::from_be_bytes(field.expect("8 bytes")) & MAY_HAVE_LEAKS != 0
}

async fn write(image: &Qcow2, cluster: u64, value: u8) {
    let mut buffer = Buffer::zeroed(CLUSTER as usize);
    buffer.fill(value);
    let written = image.write(cluster * CLUSTER, buffer, RequestFlags::default());
    drop(written.await.expect("a write"));
}

async fn write_compressed(image: &Qcow2, cluster: u64, value: u8) {
    let mut buffer = Buffer::zeroed(CLUSTER as usize);
    buffer.fill(value);
    buffer[..8].copy_from_slice(&cluster.to_be_bytes());
    let flags = RequestFlags::default();
    let written = image
        .write_compressed(cluster * CLUSTER, buffer, flags)
        .await;
    drop(written.expect("a compressed write"));
}

/// An image in use whose first clusters have been written and flushed.
async fn written(clusters: Range<u64>) -> (Arc<MemStorage>, Arc<Qcow2>) {
    let memory = new_image(&options()).await;
    let image = open(memory.clone()).await;
    for cluster in clusters {
        write(&image, cluster, 1).await;
    }
    image.flush().await.expect("a flush");
    (memory, image)
}

async fn content(image: &Qcow2) -> Vec<u8> {
    let buffer = Buffer::for_read(image.size_bytes() as usize);
    image.read(0, buffer).await.expect("a read").to_vec()
}

async fn snapshot(image: &Qcow2, name: &str) {
    let new = NewSnapshot {
        name: name.into(),
        ..NewSnapshot::default()
    };
    image.create_snapshot(new).await.expect("a snapshot");
}

/// One change of the image, of any kind.
async fn change(image: &Qcow2, random: &mut Random, taken: &mut u32) {
    let at = random.below(CLUSTERS);
    let len = 1 + random.below(40.min(CLUSTERS - at));
    let value = 1 + random.below(250) as u8;
    match random.below(12) {
        0 => {
            // Clusters that a snapshot shares beside others that are the disk's own.
            for cluster in (at..at + len).step_by(2) {
                image
                    .discard(cluster * CLUSTER, CLUSTER)
                    .await
                    .expect("a discard");
            }
        }
        1 => {
            let range = (at * CLUSTER, len * CLUSTER);
            image.discard(range.0, range.1).await.expect("a discard");
        }
        2..=4 => {
            for cluster in at..at + len {
                write_compressed(image, cluster, value).await;
            }
        }
        5 => {
            *taken += 1;
            snapshot(image, &taken.to_string()).await;
        }
        6 if *taken > 0 => {
            let which = SnapshotSelector::Name(taken.to_string());
            image.delete_snapshot(which).await.expect("deleted");
            *taken -= 1;
        }
        7 => {
            let mut compaction = image.compact().await.expect("begun");
            for _ in 0..random.below(6) {
                if compaction.step().await.expect("a step").is_none() {
                    break;
                }
            }
        }
        8 => image.flush().await.expect("a flush"),
        _ => {
            for cluster in at..at + len {
                write(image, cluster, value).await;
            }
        }
    }
}

async fn killed_at_any_time(seed: u64) {
    let mut random = Random::new(seed);
    let memory = new_image(&options()).await;
    let image = open(memory.clone()).await;
    let mut taken = 0;
    for round in 0..12 {
        for _ in 0..1 + random.below(8) {
            change(&image, &mut random, &mut taken).await;
        }
        image.flush().await.expect("a flush");
        let now = content(&image).await;
        let left = killed(&memory);
        let leaks = verdict(left.clone()).await.leaks;
        assert!(leaks == 0 || tells_of_leaks(&left), "seed {seed}: {leaks}");
        let again = open(left.clone()).await;
        assert!(content(&again).await == now, "seed {seed}, round {round}");
        write(&again, random.below(CLUSTERS), 255).await;
        again.close().await.expect("a close");
        verdict(left.clone()).await;
        assert!(!tells_of_leaks(&left), "seed {seed}, round {round}");
    }
    image.close().await.expect("a close");
    assert_eq!(verdict(memory).await.leaks, 0, "seed {seed}");
}

#[test]
fn a_killed_image_keeps_what_anything_refers_to() {
    for seed in 0..25 {
        run(killed_at_any_time(seed));
    }
}

/// A program that keeps the bit has written to a killed image, as QEMU does where a commit makes a
/// base writable: all that it has allocated is in use.
#[test]
fn the_bit_says_nothing_of_who_has_written_since() {
    run(async {
        let (memory, _image) = written(0..100).await;
        let base = killed(&memory);
        let other = open(base.clone()).await;
        for cluster in 600..900 {
            write(&other, cluster, 7).await;
        }
        let now = content(&other).await;
        other.close().await.expect("a close");
        let mut bytes = base.snapshot();
        bytes[COMPATIBLE..COMPATIBLE + 8].copy_from_slice(&MAY_HAVE_LEAKS.to_be_bytes());
        let base = Arc::new(MemStorage::with_bytes(bytes));
        let again = open(base.clone()).await;
        write(&again, 1100, 9).await;
        assert!(content(&again).await[..1100 * CLUSTER as usize] == now[..1100 * CLUSTER as usize]);
        again.close().await.expect("a close");
        assert_eq!(verdict(base).await.leaks, 0);
    });
}

/// Who only reads changes nothing.
#[test]
fn an_image_that_is_only_read_keeps_its_leaks() {
    run(async {
        let (memory, _image) = written(0..200).await;
        let left = killed(&memory);
        let before = left.snapshot();
        let options = OpenOptions::default().read_only(true);
        let reader = Qcow2::open(left.clone(), Arc::new(DenyAll), options).await;
        let reader = reader.expect("a sound image");
        content(&reader).await;
        reader.close().await.expect("a close");
        verdict(left.clone()).await;
        assert!(left.snapshot() == before);
    });
}

/// Nobody looks twice for leaks that are gone.
#[test]
fn an_image_without_leaks_tells_of_none() {
    run(async {
        let (memory, _image) = written(0..200).await;
        let left = killed(&memory);
        assert!(tells_of_leaks(&left));
        open(left.clone()).await.close().await.expect("a close");
        assert!(!tells_of_leaks(&left));
        assert_eq!(verdict(left).await.leaks, 0);
    });
}

/// Whatever the tables of an image hold, an open ends.
#[test]
fn damaged_tables_end_the_search() {
    run(async {
        let (memory, _image) = written(0..200).await;
        let sound = killed(&memory).snapshot();
        let mut random = Random::new(3);
        for _ in 0..300 {
            let mut bytes = sound.clone();
            for _ in 0..1 + random.below(4) {
                // The refcount table, its block, the L1 table and the first L2 table.
                let at = (CLUSTER + random.below(4 * CLUSTER / 8) * 8) as usize;
                let word =
                    (random.below(1 << 32) << 32 | random.below(1 << 32)) >> random.below(64);
                bytes[at..at + 8].copy_from_slice(&word.to_be_bytes());
            }
            let left = Arc::new(MemStorage::with_bytes(bytes));
            let options = OpenOptions::default();
            if let Ok(opened) = Qcow2::open(left, Arc::new(DenyAll), options).await {
                drop(opened.close().await);
            }
        }
    });
}
