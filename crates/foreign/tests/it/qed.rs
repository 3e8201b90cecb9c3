//! QED images, both ways: what is written here is read by QEMU, and the other way round.

use std::sync::Arc;

use crate::common::{Model, Place, compare_with_qemu, new_file, open_file, qemu, run};
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Buffer, Buffers, ErrorKind, Raw, RawOptions, RequestFlags, Storage};
use vellum_foreign::qed::{self, CreateOptions, create};
use vellum_foreign::{BackingName, Fix, ForeignImage};

const ALL: Fix = Fix {
    leaks: true,
    corruptions: true,
};

#[test]
fn what_is_written_here_is_read_there() {
    for (seed, cluster_bytes, table_clusters) in [(1, 4096, 2), (2, 65536, 4)] {
        let size_bytes = 9 << 20 | 0x600;
        let place = Place::default();
        let path = place.path("a.qed");
        let mut model = Model::new(seed, size_bytes);
        run(async {
            let file = new_file(&path);
            let options = CreateOptions::default()
                .size_bytes(size_bytes)
                .cluster_size_bytes(cluster_bytes)
                .table_size_clusters(table_clusters);
            create(&file, &options).await.unwrap();
            for _ in 0..3 {
                let device = qed::open(file.clone(), None, false).await.unwrap();
                model.compare(&*device).await;
                model.exercise(&*device, 25).await;
                model.compare(&*device).await;
                device.close().await.unwrap();
            }
            let report = qed::check(&file).await.unwrap();
            assert_eq!((report.corruptions, report.leaks), (0, 0), "seed {seed}");
        });
        qemu("qemu-img", &["check", "-f", "qed", &place.text("a.qed")]);
        compare_with_qemu(&place, "qed", "a.qed", &model.bytes);
    }
}

#[test]
fn a_backing_file_shows_through() {
    let (seed, size_bytes) = (3, 5 << 20);
    let place = Place::default();
    let mut model = Model::new(seed, size_bytes);
    let base: Vec<u8> = (0..4u32 << 20).map(|at| (at / 100) as u8).collect();
    model.bytes[..base.len()].copy_from_slice(&base);
    std::fs::write(place.path("base.raw"), &base).unwrap();
    run(async {
        let file = new_file(&place.path("a.qed"));
        let backing = BackingName {
            name: place.text("base.raw"),
            format: Some("raw".to_owned()),
        };
        let options = CreateOptions::default()
            .size_bytes(size_bytes)
            .backing(Some(backing.clone()));
        create(&file, &options).await.unwrap();
        assert_eq!(qed::facts(&file).await.unwrap().backing, Some(backing));
        let base = Raw::open(open_file(&place.path("base.raw")), RawOptions::default());
        let device = qed::open(file, Some(base.unwrap()), false).await.unwrap();
        model.exercise(&*device, 80).await;
        model.compare(&*device).await;
        device.close().await.unwrap();
    });
    qemu("qemu-img", &["check", "-f", "qed", &place.text("a.qed")]);
    compare_with_qemu(&place, "qed", "a.qed", &model.bytes);
}

#[test]
fn what_qemu_writes_is_read_here() {
    let place = Place::default();
    let image = place.text("a.qed");
    qemu("qemu-img", &["create", "-q", "-f", "qed", &image, "10M"]);
    let mut model = Model::new(4, 10 << 20);
    for (offset, len, pattern) in [(5 << 20, 4096, 7), (512, 3 << 20, 9), (9 << 20, 1 << 20, 0)] {
        let command = match pattern {
            0 => format!("write -z {offset} {len}"),
            _ => format!("write -P {pattern} {offset} {len}"),
        };
        qemu("qemu-io", &["-f", "qed", "-c", &command, &image]);
        model.bytes[offset..offset + len].fill(pattern);
    }
    run(async {
        let device = qed::open(open_file(&place.path("a.qed")), None, false);
        let device = device.await.unwrap();
        model.compare(&*device).await;
        model.exercise(&*device, 60).await;
        device.truncate(12 << 20).await.unwrap();
        model.bytes.resize(12 << 20, 0);
        model.exercise(&*device, 20).await;
        let error = device.truncate(1 << 20).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        device.close().await.unwrap();
    });
    qemu("qemu-img", &["check", "-f", "qed", &image]);
    compare_with_qemu(&place, "qed", "a.qed", &model.bytes);
    // And it goes on where we ended.
    qemu("qemu-io", &["-f", "qed", "-c", "write -P 3 0 12M", &image]);
    qemu("qemu-img", &["check", "-f", "qed", &image]);
    compare_with_qemu(&place, "qed", "a.qed", &[3; 12 << 20]);
}

/// An image of three leaves, with a cluster in each, closed well.
/// (With tables of one cluster QEMU makes images that it does not open.)
async fn image() -> Vec<u8> {
    let memory = Arc::new(MemStorage::new());
    let file: Arc<dyn Storage> = memory.clone();
    let options = CreateOptions::default()
        .size_bytes(16 << 20)
        .cluster_size_bytes(4096)
        .table_size_clusters(2);
    create(&file, &options).await.unwrap();
    let device = qed::open(file, None, false).await.unwrap();
    for leaf in 0..3 {
        let bytes = Buffer::copy_of(&[leaf as u8 + 1; 8192]);
        let written = device.write(leaf * (4 << 20), bytes, RequestFlags::default());
        written.await.unwrap();
    }
    device.close().await.unwrap();
    memory.snapshot()
}

fn put(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn a_check_finds_and_mends_what_qemu_does() {
    let clean = run(image());
    let first_leaf = u64::from_le_bytes(clean[4096..4104].try_into().unwrap()) as usize;
    let cluster = u64::from_le_bytes(clean[first_leaf..first_leaf + 8].try_into().unwrap());
    // Where, what is put there, and what of it a repair leaves.
    let cases: [(usize, u64, u64); 6] = [
        (first_leaf, 1 << 40, 0),
        (first_leaf, cluster + 512, 0),
        (first_leaf + 16, cluster, 1),
        (4096 + 8, 1 << 40, 0),
        (4096 + 8, first_leaf as u64, 2),
        (first_leaf + 8, 0, 0),
    ];
    for (number, (at, value, left)) in cases.into_iter().enumerate() {
        let mut bytes = clean.clone();
        put(&mut bytes, at, value);
        bytes[16] |= 2;
        let place = Place::default();
        let (ours, theirs) = (place.path("ours.qed"), place.text("theirs.qed"));
        std::fs::write(&ours, &bytes).unwrap();
        std::fs::write(&theirs, &bytes).unwrap();
        let (found, mended) = run(async {
            let file = open_file(&ours);
            assert!(qed::facts(&file).await.unwrap().is_dirty);
            let found = qed::check(&file).await.unwrap();
            (found, qed::repair(&file, ALL).await.unwrap())
        });
        let theirs_found = check_by_qemu(&theirs, &[]);
        assert_eq!(found.corruptions, theirs_found.0, "case {number}");
        assert_eq!(found.leaks, theirs_found.1, "case {number}");
        assert_eq!(mended.corruptions, left, "case {number}");
        check_by_qemu(&theirs, &["-r", "all"]);
        let (ours, theirs) = (
            std::fs::read(&ours).unwrap(),
            std::fs::read(&theirs).unwrap(),
        );
        // What is still wrong is still marked here; QEMU takes the mark back whenever it closes an image.
        let is_same = ours[..16] == theirs[..16] && ours[17..] == theirs[17..];
        assert!(is_same, "case {number}: a repair makes something else");
        assert_eq!(ours[16] & 2 == 0, left == 0, "case {number}");
    }
}

/// The corruptions and leaks that qemu-img tells.
fn check_by_qemu(image: &str, more: &[&str]) -> (u64, u64) {
    let run = std::process::Command::new("qemu-img")
        .args(["check", "-f", "qed", "--output", "json", image])
        .args(more)
        .output();
    let text = String::from_utf8(run.expect("qemu-img").stdout).unwrap();
    let number = |key: &str| {
        let rest = text.split(&format!("\"{key}\": ")).nth(1)?;
        let end = rest.find(|c: char| !c.is_ascii_digit())?;
        rest[..end].parse().ok()
    };
    (
        number("corruptions").unwrap_or(0),
        number("leaks").unwrap_or(0),
    )
}

#[test]
fn an_image_that_was_not_closed_is_mended_when_it_is_opened() {
    run(async {
        let mut bytes = image().await;
        bytes[16] |= 2;
        put(&mut bytes, 4096 + 8, 1 << 40);
        let memory = Arc::new(MemStorage::with_bytes(bytes));
        // Read-only, nothing is done.
        let device = qed::open(memory.clone(), None, true).await.unwrap();
        let read = device.read(4 << 20, Buffer::for_read(512)).await;
        assert_eq!(read.unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(memory.snapshot()[16] & 2, 2);
        let device = qed::open(memory.clone(), None, false).await.unwrap();
        assert_eq!(memory.snapshot()[16] & 2, 0);
        let read = device.read(4 << 20, Buffer::for_read(512)).await.unwrap();
        assert!(read.is_zero());
        // The flag is there while the image is changed.
        let bytes = Buffer::copy_of(&[1; 512]);
        let written = device.write(0, bytes, RequestFlags::default()).await;
        written.unwrap();
        assert_eq!(memory.snapshot()[16] & 2, 2);
        device.close().await.unwrap();
        assert_eq!(memory.snapshot()[16] & 2, 0);
    });
}

/// What a copy that was killed had made room for is not lost when the next one goes on.
#[test]
fn clusters_at_the_end_that_nothing_leads_to_are_cut_off_when_the_image_is_opened() {
    run(async {
        let sound = image().await;
        for behind in [1, 3 * 65536, 3 * 65536 + 512] {
            let mut bytes = sound.clone();
            bytes[16] |= 2;
            bytes.resize(sound.len() + behind, 7);
            let memory = Arc::new(MemStorage::with_bytes(bytes));
            let file: Arc<dyn Storage> = memory.clone();
            // Read-only, nothing is done, and a repair does what QEMU's does.
            qed::open(file.clone(), None, true).await.unwrap();
            let report = qed::check(&file).await.unwrap();
            assert_eq!(report.leaks > 0, behind > 1);
            let device = qed::open(file.clone(), None, false).await.unwrap();
            device.close().await.unwrap();
            let report = qed::check(&file).await.unwrap();
            assert_eq!((report.leaks, report.corruptions), (0, 0));
            assert_eq!(memory.snapshot(), sound);
        }
    });
}

#[test]
fn what_a_resize_adds_hides_a_longer_backing_file() {
    let place = Place::default();
    run(async {
        let below = new_file(&place.path("base"));
        let ones = Buffers::from_iter([Buffer::copy_of(&[1; 65536])]);
        below.write(0, ones, Default::default()).await.unwrap();
        let file = new_file(&place.path("a.qed"));
        let options = CreateOptions::default()
            .size_bytes(20480)
            .cluster_size_bytes(4096);
        create(&file, &options).await.unwrap();
        let base = Raw::open(below, RawOptions::default()).unwrap();
        let device = qed::open(file, Some(base), false).await.unwrap();
        device.truncate(40960).await.unwrap();
        let read = device.read(0, Buffer::for_read(40960)).await.unwrap();
        assert!(read[..20480].iter().all(|&byte| byte == 1));
        assert!(read[20480..].iter().all(|&byte| byte == 0));
        device.close().await.unwrap();
    });
}

#[test]
fn another_backing_file_is_named() {
    let place = Place::default();
    run(async {
        let file = new_file(&place.path("a.qed"));
        let options = CreateOptions::default().size_bytes(1 << 20);
        create(&file, &options).await.unwrap();
        let device = qed::open(file.clone(), None, false).await.unwrap();
        let image = ForeignImage::of(&*device).unwrap();
        let named = |name: &str, format: Option<&str>| BackingName {
            name: name.to_owned(),
            format: format.map(str::to_owned),
        };
        let long = "x".repeat(1023);
        for backing in [
            Some(named("below", Some("raw"))),
            Some(named(&long, None)),
            Some(named("another", None)),
            None,
            Some(named("last", Some("raw"))),
        ] {
            image.set_backing_file(backing.clone()).await.unwrap();
            assert_eq!(image.facts().backing, backing);
            assert_eq!(qed::facts(&file).await.unwrap().backing, backing);
        }
        let too_long = "x".repeat(4096);
        let refused = image.set_backing_file(Some(named(&too_long, None))).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::NoSpace);
        assert_eq!(
            qed::facts(&file).await.unwrap().backing,
            Some(named("last", Some("raw")))
        );
        device.close().await.unwrap();
    });
    let info = qemu("qemu-img", &["info", "-U", &place.text("a.qed")]);
    assert!(info.contains("backing file: last"), "{info}");
    std::fs::write(place.path("last"), [0; 512]).unwrap();
    qemu("qemu-img", &["check", "-f", "qed", &place.text("a.qed")]);
}
