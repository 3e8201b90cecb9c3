//! qcow images, both ways: what is written here is read by QEMU, and the other way round.

use std::sync::Arc;

use crate::common::{Model, Place, compare_with_qemu, new_file, open_file, qemu, run};
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Buffer, ErrorKind, Raw, RawOptions, RequestFlags, Storage};
use vellum_foreign::qcow::{self, CreateOptions, OpenOptions, create};

#[test]
fn what_is_written_here_is_read_there() {
    let (seed, size_bytes) = (1, 9 << 20 | 0x600);
    let place = Place::default();
    let path = place.path("a.qcow");
    let mut model = Model::new(seed, size_bytes);
    run(async {
        let file = new_file(&path);
        let options = CreateOptions::default().size_bytes(size_bytes);
        create(&file, &options).await.unwrap();
        for _ in 0..3 {
            let device = qcow::open(file.clone(), None, OpenOptions::default())
                .await
                .unwrap();
            model.compare(&*device).await;
            model.exercise(&*device, 60).await;
            model.compare(&*device).await;
            device.close().await.unwrap();
        }
    });
    compare_with_qemu(&place, "qcow", "a.qcow", &model.bytes);
}

#[test]
fn a_backing_file_shows_through() {
    let (seed, size_bytes) = (2, 5 << 20);
    let place = Place::default();
    let mut model = Model::new(seed, size_bytes);
    let base: Vec<u8> = (0..4u32 << 20).map(|at| (at / 100) as u8).collect();
    model.bytes[..base.len()].copy_from_slice(&base);
    std::fs::write(place.path("base.raw"), &base).unwrap();
    run(async {
        let file = new_file(&place.path("a.qcow"));
        let options = CreateOptions::default()
            .size_bytes(size_bytes)
            .backing_file(Some(place.text("base.raw")));
        create(&file, &options).await.unwrap();
        let facts = qcow::facts(&file).await.unwrap();
        assert_eq!(facts.backing.unwrap().name, place.text("base.raw"));
        let base: Arc<dyn Storage> = open_file(&place.path("base.raw"));
        let base = Raw::open(base, RawOptions::default()).unwrap();
        let device = qcow::open(file, Some(base), OpenOptions::default())
            .await
            .unwrap();
        assert_eq!(device.info().cluster_size_bytes, Some(512));
        model.exercise(&*device, 60).await;
        model.compare(&*device).await;
        device.close().await.unwrap();
    });
    compare_with_qemu(&place, "qcow", "a.qcow", &model.bytes);
}

#[test]
fn what_is_given_up_shows_the_backing_file_and_takes_no_space() {
    let (seed, size_bytes) = (7, 1 << 20);
    let place = Place::default();
    let base: Vec<u8> = (0..size_bytes as u32).map(|at| (at / 100) as u8).collect();
    std::fs::write(place.path("base.raw"), &base).unwrap();
    let path = place.path("a.qcow");
    let len_bytes = || std::fs::metadata(&path).unwrap().len();
    let mut model = Model::new(seed, size_bytes);
    run(async {
        let file = new_file(&path);
        let options = CreateOptions::default()
            .size_bytes(size_bytes)
            .backing_file(Some(place.text("base.raw")));
        create(&file, &options).await.unwrap();
        drop(file);
        let new_bytes = len_bytes();
        let open = async || {
            let base = open_file(&place.path("base.raw"));
            let base = Raw::open(base, RawOptions::default()).unwrap();
            qcow::open(open_file(&path), Some(base), OpenOptions::default())
                .await
                .unwrap()
        };
        for writes_on in [false, true] {
            let device = open().await;
            model.bytes.copy_from_slice(&base);
            model.exercise(&*device, 60).await;
            model.compare(&*device).await;
            device.clear().await.unwrap();
            model.bytes.copy_from_slice(&base);
            model.compare(&*device).await;
            if writes_on {
                model.exercise(&*device, 20).await;
                model.compare(&*device).await;
            }
            device.close().await.unwrap();
            drop(device);
            assert_eq!(len_bytes() == new_bytes, !writes_on);
            let device = open().await;
            model.compare(&*device).await;
            device.close().await.unwrap();
        }
    });
    compare_with_qemu(&place, "qcow", "a.qcow", &model.bytes);
}

#[test]
fn what_qemu_writes_is_read_here() {
    let place = Place::default();
    let image = place.text("a.qcow");
    qemu("qemu-img", &["create", "-q", "-f", "qcow", &image, "10M"]);
    let mut model = Model::new(3, 10 << 20);
    for (offset, len, pattern) in [(5 << 20, 4096, 7), (512, 3 << 20, 9), (9 << 20, 1 << 20, 1)] {
        let command = format!("write -P {pattern} {offset} {len}");
        qemu("qemu-io", &["-f", "qcow", "-c", &command, &image]);
        model.bytes[offset..offset + len].fill(pattern);
    }
    run(async {
        let device = qcow::open(
            open_file(&place.path("a.qcow")),
            None,
            OpenOptions::default(),
        );
        let device = device.await.unwrap();
        model.compare(&*device).await;
        model.exercise(&*device, 100).await;
        device.close().await.unwrap();
    });
    compare_with_qemu(&place, "qcow", "a.qcow", &model.bytes);
    // And it goes on where we ended.
    qemu("qemu-io", &["-f", "qcow", "-c", "write -P 3 0 10M", &image]);
    compare_with_qemu(&place, "qcow", "a.qcow", &[3; 10 << 20]);
}

#[test]
fn compressed_clusters_go_both_ways() {
    let place = Place::default();
    let size = 3 << 20 | 0x200;
    let mut random = fastrand::Rng::with_seed(5);
    let mut model = Model::new(5, size as u64);
    for piece in model.bytes.chunks_mut(6000) {
        let len = random.usize(0..=piece.len());
        random.fill(&mut piece[..len]);
    }
    std::fs::write(place.path("a.raw"), &model.bytes).unwrap();
    let (raw, image) = (place.text("a.raw"), place.text("theirs.qcow"));
    // It ends with a failure here, and has made the image all the same.
    let convert = std::process::Command::new("qemu-img")
        .args(["convert", "-c", "-f", "raw", "-O", "qcow", &raw, &image])
        .output();
    convert.expect("qemu-img");
    compare_with_qemu(&place, "qcow", "theirs.qcow", &model.bytes);
    run(async {
        let device = qcow::open(
            open_file(&place.path("theirs.qcow")),
            None,
            OpenOptions::default(),
        );
        let device = device.await.unwrap();
        model.compare(&*device).await;
        model.exercise(&*device, 60).await;
        device.close().await.unwrap();
    });
    compare_with_qemu(&place, "qcow", "theirs.qcow", &model.bytes);
    run(async {
        let file = new_file(&place.path("ours.qcow"));
        let options = CreateOptions::default().size_bytes(size as u64);
        create(&file, &options).await.unwrap();
        let device = qcow::open(file, None, OpenOptions::default())
            .await
            .unwrap();
        for (number, piece) in model.bytes.chunks(1 << 20).enumerate() {
            let (at, piece) = ((number << 20) as u64, Buffer::copy_of(piece));
            let written = device.write_compressed(at, piece, RequestFlags::default());
            written.await.unwrap();
        }
        model.compare(&*device).await;
        model.exercise(&*device, 20).await;
        model.compare(&*device).await;
        device.close().await.unwrap();
    });
    compare_with_qemu(&place, "qcow", "ours.qcow", &model.bytes);
}

#[test]
fn entries_that_lead_nowhere_are_errors() {
    for (seed, entry) in [u64::MAX >> 1, 513, u64::MAX, 1 << 63]
        .into_iter()
        .enumerate()
    {
        run(async {
            let memory = Arc::new(MemStorage::new());
            let file: Arc<dyn Storage> = memory.clone();
            let options = CreateOptions::default().size_bytes(64 << 20);
            create(&file, &options).await.unwrap();
            let mut bytes = memory.snapshot();
            bytes.resize(8192, 0);
            // The first leaf, and a cluster in it.
            bytes[48..56].copy_from_slice(&4096u64.to_be_bytes());
            bytes[4096..4104].copy_from_slice(&entry.to_be_bytes());
            // The second leaf.
            bytes[56..64].copy_from_slice(&(u64::MAX - 8 * seed as u64).to_be_bytes());
            let file = Arc::new(MemStorage::with_bytes(bytes));
            let device = qcow::open(file, None, OpenOptions::default())
                .await
                .unwrap();
            for offset in [0, 2 << 20] {
                let read = device.read(offset, Buffer::for_read(512)).await;
                assert_eq!(read.unwrap_err().kind(), ErrorKind::Corrupt, "{entry:#x}");
            }
        });
    }
}

/// A read that has looked a compressed cluster up meets a write to another part of it.
#[test]
fn reads_beside_writes_of_compressed_clusters_see_one_of_both() {
    run(async {
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let options = CreateOptions::default().size_bytes(1 << 20);
        create(&file, &options).await.unwrap();
        let device = qcow::open(file, None, OpenOptions::default())
            .await
            .unwrap();
        for round in 0..50_u8 {
            let text = Buffer::copy_of(&[round; 4096]);
            let flags = RequestFlags::default();
            device.write_compressed(0, text, flags).await.unwrap();
            let reads = [0, 3584].map(|at| device.read(at, Buffer::for_read(512)));
            let written = device.write(2048, Buffer::copy_of(&[0xff; 512]), flags);
            for read in reads {
                assert_eq!(read.await.unwrap()[..], [round; 512]);
            }
            written.await.unwrap();
            let again = Buffer::copy_of(&[round + 1; 4096]);
            device.write_compressed(0, again, flags).await.unwrap();
            let read = device.read(0, Buffer::for_read(4096)).await.unwrap();
            assert_eq!(read[..], [round + 1; 4096]);
        }
        device.close().await.unwrap();
    });
}
