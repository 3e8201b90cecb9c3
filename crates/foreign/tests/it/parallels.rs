//! Parallels images, both ways: what is written here is read by QEMU, and the other way round.

use std::sync::Arc;

use crate::common::{Model, Place, compare_with_qemu, new_file, open_file, qemu, run};
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Buffer, ErrorKind, RequestFlags, Storage};
use vellum_foreign::Fix;
use vellum_foreign::parallels::{self, CreateOptions, create};

const ALL: Fix = Fix {
    leaks: true,
    corruptions: true,
};

#[test]
fn what_is_written_here_is_read_there() {
    for (seed, cluster_bytes) in [(1, 63 * 512), (2, 1 << 20)] {
        let size_bytes = 9 << 20 | 0x600;
        let place = Place::default();
        let path = place.path("a.hdd");
        let mut model = Model::new(seed, size_bytes);
        run(async {
            let file = new_file(&path);
            let options = CreateOptions::default()
                .size_bytes(size_bytes)
                .cluster_size_bytes(cluster_bytes);
            create(&file, &options).await.unwrap();
            for _ in 0..3 {
                let device = parallels::open(file.clone(), false).await.unwrap();
                model.compare(&*device).await;
                model.exercise(&*device, 25).await;
                // A discard of whole clusters leaves zeroes.
                let (from, to) = (2 * cluster_bytes, 4 * cluster_bytes);
                device.discard(from, to - from).await.unwrap();
                model.bytes[from as usize..to as usize].fill(0);
                model.compare(&*device).await;
                device.close().await.unwrap();
            }
            let report = parallels::check(&file).await.unwrap();
            assert_eq!(report.messages, Vec::<String>::new(), "seed {seed}");
        });
        compare_with_qemu(&place, "parallels", "a.hdd", &model.bytes);
        if cluster_bytes.is_power_of_two() {
            // Of other sizes QEMU's check says that the data begins in the wrong place, of its own images, too.
            qemu(
                "qemu-img",
                &["check", "-f", "parallels", &place.text("a.hdd")],
            );
        }
    }
}

#[test]
fn what_qemu_writes_is_read_here() {
    let place = Place::default();
    let image = place.text("a.hdd");
    qemu(
        "qemu-img",
        &["create", "-q", "-f", "parallels", &image, "10M"],
    );
    let mut model = Model::new(3, 10 << 20);
    for (offset, len, pattern) in [(5 << 20, 4096, 7), (512, 3 << 20, 9), (9 << 20, 1 << 20, 1)] {
        let command = format!("write -P {pattern} {offset} {len}");
        qemu("qemu-io", &["-f", "parallels", "-c", &command, &image]);
        model.bytes[offset..offset + len].fill(pattern);
    }
    run(async {
        let device = parallels::open(open_file(&place.path("a.hdd")), false);
        let device = device.await.unwrap();
        model.compare(&*device).await;
        model.exercise(&*device, 60).await;
        device.truncate(12 << 20).await.unwrap();
        model.bytes.resize(12 << 20, 0);
        model.exercise(&*device, 20).await;
        model.compare(&*device).await;
        let error = device.truncate(1 << 20).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        device.close().await.unwrap();
    });
    qemu("qemu-img", &["check", "-f", "parallels", &image]);
    compare_with_qemu(&place, "parallels", "a.hdd", &model.bytes);
    // And it goes on where we ended.
    qemu(
        "qemu-io",
        &["-f", "parallels", "-c", "write -P 3 0 12M", &image],
    );
    qemu("qemu-img", &["check", "-f", "parallels", &image]);
    compare_with_qemu(&place, "parallels", "a.hdd", &[3; 12 << 20]);
}

/// Writes a sector to each of some clusters of an image in memory, and closes it.
async fn fill(memory: &Arc<MemStorage>, clusters: std::ops::Range<u64>) {
    let device = parallels::open(memory.clone(), false).await.unwrap();
    for cluster in clusters {
        let bytes = Buffer::copy_of(&[cluster as u8 + 1; 512]);
        let written = device.write(cluster * 4096, bytes, RequestFlags::default());
        written.await.unwrap();
    }
    device.close().await.unwrap();
}

/// An image of 100 clusters of 4 KiB, with five of them there; the data begins at 4096.
async fn image() -> Vec<u8> {
    let memory = Arc::new(MemStorage::new());
    let file: Arc<dyn Storage> = memory.clone();
    let options = CreateOptions::default()
        .size_bytes(400 << 10)
        .cluster_size_bytes(4096);
    create(&file, &options).await.unwrap();
    fill(&memory, 0..5).await;
    memory.snapshot()
}

#[test]
fn images_of_the_old_kind_are_read_and_written() {
    run(async {
        let mut bytes = image().await;
        // The same image in the older way: entries in sectors, and the data's start not told.
        bytes[..16].copy_from_slice(b"WithoutFreeSpace");
        bytes[48..52].fill(0);
        let data = bytes.split_off(4096);
        bytes.truncate(512);
        bytes.extend(data);
        for cluster in 0..5u32 {
            let at = 64 + 4 * cluster as usize;
            bytes[at..at + 4].copy_from_slice(&(1 + 8 * cluster).to_le_bytes());
        }
        let memory = Arc::new(MemStorage::with_bytes(bytes));
        fill(&memory, 5..8).await;
        let place = Place::default();
        std::fs::write(place.path("a.hdd"), memory.snapshot()).unwrap();
        let mut wanted = vec![0; 400 << 10];
        for cluster in 0..8 {
            wanted[cluster * 4096..][..512].fill(cluster as u8 + 1);
        }
        compare_with_qemu(&place, "parallels", "a.hdd", &wanted);
        qemu(
            "qemu-img",
            &["check", "-f", "parallels", &place.text("a.hdd")],
        );
        let device = parallels::open(memory, false).await.unwrap();
        assert!(
            device.truncate(1 << 20).await.is_err(),
            "no room in the table"
        );
    });
}

#[test]
fn a_check_finds_what_qemu_finds_and_mends_it() {
    let clean = run(image());
    let entry = |index: usize| 64 + 4 * index;
    // What is put where, and whether the file gets longer.
    let cases: [(usize, u32, usize); 7] = [
        (44, 0x746f_6e59, 0),
        (48, 1, 0),
        (48, 1 << 20, 0),
        (entry(2), 9999, 0),
        (entry(4), 0, 0),
        (entry(1), 1, 0),
        (44, 0, 10_000),
    ];
    for (number, (at, value, more)) in cases.into_iter().enumerate() {
        let mut bytes = clean.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        bytes.resize(bytes.len() + more, 0);
        let place = Place::default();
        let (ours, theirs) = (place.path("ours.hdd"), place.text("theirs.hdd"));
        std::fs::write(&ours, &bytes).unwrap();
        std::fs::write(&theirs, &bytes).unwrap();
        let (found, mended) = run(async {
            let file = open_file(&ours);
            let found = parallels::check(&file).await.unwrap();
            let mended = parallels::repair(&file, ALL).await.unwrap();
            (found, mended)
        });
        assert_eq!(
            mended.messages,
            by_qemu(&theirs, &["-r", "all"]),
            "case {number}"
        );
        let again = run(parallels::check(&open_file(&ours))).unwrap();
        assert_eq!(again.messages, Vec::<String>::new(), "case {number}");
        assert_eq!(found.corruptions, mended.corruptions_fixed, "case {number}");
        assert_eq!(found.leaks, mended.leaks_fixed, "case {number}");
        qemu(
            "qemu-img",
            &["check", "-f", "parallels", &ours.display().to_string()],
        );
        let name = theirs.as_str();
        let arguments = ["compare", "-f", "parallels", "-F", "parallels"];
        let arguments: Vec<&str> = arguments
            .into_iter()
            .chain([ours.to_str().unwrap(), name])
            .collect();
        qemu("qemu-img", &arguments);
    }
}

/// What qemu-img's check says of single things.
fn by_qemu(image: &str, more: &[&str]) -> Vec<String> {
    let run = std::process::Command::new("qemu-img")
        .args(["check", "-f", "parallels", image])
        .args(more)
        .output();
    let text = String::from_utf8(run.expect("qemu-img").stderr).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn an_image_that_was_not_closed_is_mended_when_it_is_opened() {
    run(async {
        let mut bytes = image().await;
        bytes[44..48].copy_from_slice(&0x746f_6e59u32.to_le_bytes());
        bytes.resize(bytes.len() + 10_000, 7);
        let len = bytes.len();
        let memory = Arc::new(MemStorage::with_bytes(bytes));
        let device = parallels::open(memory.clone(), true).await.unwrap();
        assert_eq!(memory.snapshot().len(), len);
        drop(device);
        let device = parallels::open(memory.clone(), false).await.unwrap();
        assert_eq!(memory.snapshot().len(), len - 10_000);
        assert_eq!(memory.snapshot()[44..48], [0; 4]);
        // The mark is there while the image is changed.
        let bytes = Buffer::copy_of(&[1; 512]);
        let written = device.write(0, bytes, RequestFlags::default()).await;
        written.unwrap();
        assert_eq!(memory.snapshot()[44..48], 0x746f_6e59u32.to_le_bytes());
        device.close().await.unwrap();
        assert_eq!(memory.snapshot()[44..48], [0; 4]);
    });
}
