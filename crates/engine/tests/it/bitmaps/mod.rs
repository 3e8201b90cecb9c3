//! Persistent dirty bitmaps: what they record, how they are changed, and what becomes
//! of them when the program ends without closing the image.

mod failing;
mod random;
mod resized;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::common::{open, qemu, qemu_ok, qemu_verdict};
use vellum::Preallocation;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::info::{BitmapInfo, ImageInfo};
use vellum::qcow2::{BitmapOptions, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, RequestFlags, Storage, ZeroRequest};
use vellum_io::lane;
use vellum_storage::MemStorage;
use vellum_storage::file::Create;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn memory(bytes: Vec<u8>) -> Arc<MemStorage> {
    Arc::new(MemStorage::with_bytes(bytes))
}

async fn new_image(size_bytes: u64, cluster_size_bytes: u64) -> Arc<MemStorage> {
    let file = Arc::new(MemStorage::new());
    let options = CreateOptions::default()
        .size_bytes(size_bytes)
        .cluster_size_bytes(cluster_size_bytes);
    create(file.clone(), None, &options).await.expect("created");
    file
}

async fn open_image(file: Arc<dyn Storage>) -> Arc<Qcow2> {
    let options = OpenOptions::default()
        .discard(true)
        .bitmap_step_bytes(Some(4096));
    let opened = Qcow2::open(file, Arc::new(DenyAll), options).await;
    opened.expect("opened")
}

fn every(granularity_bytes: u64) -> BitmapOptions {
    BitmapOptions::default().granularity_bytes(Some(granularity_bytes))
}

async fn write(image: &Qcow2, offset_bytes: u64, len_bytes: u64) {
    let mut buffer = Buffer::zeroed(len_bytes as usize);
    buffer.fill(7);
    let written = image.write(offset_bytes, buffer, RequestFlags::default());
    drop(written.await.expect("written"));
}

async fn ranges(image: &Qcow2, name: &str) -> Vec<Range<u64>> {
    let bitmap = image.bitmaps().read(name).await.expect("a bitmap");
    bitmap.ranges().collect()
}

async fn infos(file: Arc<dyn Storage>) -> Vec<BitmapInfo> {
    ImageInfo::read(file).await.expect("an image").bitmaps
}

async fn expect_sound(file: Arc<dyn Storage>, leaks_allowed: bool) {
    let report = check(file, &CheckOptions::default())
        .await
        .expect("checked");
    assert_eq!((report.corruptions, report.check_errors), (0, 0));
    assert!(leaks_allowed || report.leaks == 0, "{report:?}");
}

#[test]
fn every_change_is_recorded() {
    lane::block_on(async {
        let file = new_image(4 * MIB, 64 * KIB).await;
        let image = open_image(file.clone()).await;
        let bitmaps = image.bitmaps();
        bitmaps.add("a", every(4096)).await.expect("added");
        bitmaps.add("b", every(MIB)).await.expect("added");
        write(&image, 5000, 100).await;
        write(&image, 200 * KIB, 8 * KIB).await;
        let zeroes = image.write_zeroes(300 * KIB, 4096, ZeroRequest::default());
        zeroes.await.expect("zeroed");
        image.discard(2 * MIB, 64 * KIB).await.expect("discarded");
        let compressible = Buffer::zeroed(64 * KIB as usize);
        let packed = image.write_compressed(3 * MIB, compressible, RequestFlags::default());
        drop(packed.await.expect("compressed"));
        image.flush().await.expect("flushed");
        let wanted = [
            4096..8192,
            200 * KIB..208 * KIB,
            300 * KIB..304 * KIB,
            2 * MIB..2 * MIB + 64 * KIB,
            3 * MIB..3 * MIB + 64 * KIB,
        ];
        assert_eq!(ranges(&image, "a").await, wanted);
        assert_eq!(ranges(&image, "b").await, [0..MIB, 2 * MIB..4 * MIB]);
        image.close().await.expect("closed");
        expect_sound(file.clone(), false).await;
        let infos = infos(file.clone()).await;
        assert!(
            infos
                .iter()
                .all(|info| info.auto && !info.in_use && info.consistent)
        );

        let again = open_image(file).await;
        assert_eq!(ranges(&again, "a").await, wanted);
        again.close().await.expect("closed");
    });
}

#[test]
fn bitmaps_are_changed_one_by_one() {
    lane::block_on(async {
        let file = new_image(4 * MIB, 64 * KIB).await;
        let image = open_image(file.clone()).await;
        let bitmaps = image.bitmaps();
        bitmaps.add("a", every(64 * KIB)).await.expect("added");
        write(&image, 0, 512).await;
        bitmaps.disable("a").await.expect("disabled");
        write(&image, MIB, 512).await;
        assert_eq!(ranges(&image, "a").await, [0..64 * KIB]);
        bitmaps.enable("a").await.expect("enabled");
        write(&image, 2 * MIB, 512).await;
        assert_eq!(
            ranges(&image, "a").await,
            [0..64 * KIB, 2 * MIB..2 * MIB + 64 * KIB]
        );
        let fine = every(512).disabled(true);
        bitmaps.add("b", fine).await.expect("added");
        let a = bitmaps.read("a").await.expect("read");
        assert_eq!(
            (a.granularity_bytes(), a.dirty_bytes()),
            (64 * KIB, 128 * KIB)
        );
        bitmaps.merge("b", vec![a]).await.expect("merged");
        bitmaps.clear("a").await.expect("cleared");
        assert!(ranges(&image, "a").await.is_empty());
        write(&image, 3 * MIB, 512).await;
        assert_eq!(ranges(&image, "a").await, [3 * MIB..3 * MIB + 64 * KIB]);
        bitmaps.set("a", vec![1..2]).await.expect("set");
        write(&image, MIB, 512).await;
        assert_eq!(
            ranges(&image, "a").await,
            [0..64 * KIB, MIB..MIB + 64 * KIB]
        );
        assert_eq!(
            ranges(&image, "b").await,
            [0..64 * KIB, 2 * MIB..2 * MIB + 64 * KIB]
        );
        assert!(bitmaps.add("a", every(512)).await.is_err());
        assert!(bitmaps.remove("none").await.is_err());
        bitmaps.remove("a").await.expect("removed");
        write(&image, MIB, 512).await;
        bitmaps.remove("b").await.expect("removed");
        assert!(bitmaps.list().await.expect("listed").is_empty());
        image.close().await.expect("closed");
        expect_sound(file.clone(), false).await;
        assert!(infos(file.clone()).await.is_empty());
    });
}

/// Bitmaps of an image whose program ended without a word.
#[test]
fn a_crash_leaves_bitmaps_that_are_known_to_be_kept() {
    lane::block_on(async {
        let file = new_image(64 * MIB, 64 * KIB).await;
        let image = open_image(file.clone()).await;
        image.bitmaps().add("a", every(4096)).await.expect("added");
        image.close().await.expect("closed");
        let image = open_image(file.clone()).await;
        write(&image, 10 * MIB, 512).await;
        write(&image, 40 * MIB + 8192, 512).await;
        let crashed = memory(file.snapshot());
        expect_sound(crashed.clone(), true).await;
        let info = &infos(crashed.clone()).await[0];
        assert!(info.in_use && info.consistent);
        let read_only = OpenOptions::default().read_only(true);
        let seen = Qcow2::open(crashed.clone(), Arc::new(DenyAll), read_only).await;
        let kept = ranges(&seen.expect("opened"), "a").await;
        assert_eq!(
            kept,
            [10 * MIB..10 * MIB + 4096, 40 * MIB + 8192..40 * MIB + 12288]
        );
        // Opening and closing is enough for everybody to trust it again.
        open_image(crashed.clone())
            .await
            .close()
            .await
            .expect("closed");
        let info = &infos(crashed.clone()).await[0];
        assert!(!info.in_use && info.consistent);
        let healed = open_image(crashed).await;
        assert_eq!(ranges(&healed, "a").await, kept);
        image.close().await.expect("closed");
    });
}

/// A bitmap whose table is longer than the disk asks for: its bits may have been meant for another
/// granularity.
#[test]
fn a_bitmap_with_a_table_for_another_disk_is_never_trusted() {
    lane::block_on(async {
        let file = new_image(64 * MIB, 64 * KIB).await;
        let image = open_image(file.clone()).await;
        for name in ["sound", "long", "still"] {
            let options = every(4096).disabled(name == "still");
            image.bitmaps().add(name, options).await.expect("added");
        }
        image.close().await.expect("closed");
        let mut bytes = file.snapshot();
        for name in ["long", "still"] {
            let at = bytes
                .windows(name.len())
                .rposition(|found| found == name.as_bytes());
            let entry = at.expect("in the directory") - 24;
            assert_eq!(bytes[entry + 8..entry + 12], [0, 0, 0, 1]);
            bytes[entry + 11] = 2;
        }
        let trusted = |infos: Vec<BitmapInfo>| {
            infos
                .into_iter()
                .filter(|info| info.consistent)
                .map(|info| info.name)
                .collect::<Vec<_>>()
        };
        let file = memory(bytes);
        assert_eq!(trusted(infos(file.clone()).await), ["sound"]);
        let image = open_image(file.clone()).await;
        write(&image, MIB, 512).await;
        assert!(image.bitmaps().read("long").await.is_err());
        let crashed = memory(file.snapshot());
        assert_eq!(trusted(infos(crashed.clone()).await), ["sound"]);
        let again = open_image(crashed.clone()).await;
        assert_eq!(ranges(&again, "sound").await, [MIB..MIB + 4096]);
        write(&again, 2 * MIB, 512).await;
        again.close().await.expect("closed");
        assert_eq!(trusted(infos(crashed.clone()).await), ["sound"]);
        image.close().await.expect("closed");
        assert_eq!(trusted(infos(file.clone()).await), ["sound"]);
        // It can be removed, and the others are as they were.
        let image = open_image(file.clone()).await;
        for name in ["long", "still"] {
            image.bitmaps().remove(name).await.expect("removed");
        }
        assert_eq!(ranges(&image, "sound").await, [MIB..MIB + 4096]);
        image.close().await.expect("closed");
        expect_sound(file, false).await;
    });
}

/// Nobody may have heard of a backup when the program dies.
#[test]
fn a_crash_after_a_backup_leaves_dirty_what_was_before_it() {
    lane::block_on(async {
        let file = new_image(64 * MIB, 64 * KIB).await;
        let image = open_image(file.clone()).await;
        let bitmaps = image.bitmaps();
        bitmaps.add("a", every(4096)).await.expect("added");
        let place = |at: u64| at..at + 4096;
        for at in [10, 20, 30] {
            write(&image, at * MIB, 512).await;
        }
        let written = vec![place(20 * MIB)];
        bitmaps.set_after_backup("a", written).await.expect("set");
        write(&image, 40 * MIB, 512).await;
        let exact = [20, 40].map(|at| place(at * MIB));
        assert_eq!(ranges(&image, "a").await, exact);
        let crashed = memory(file.snapshot());
        expect_sound(crashed.clone(), true).await;
        let again = open_image(crashed).await;
        let all = [10, 20, 30, 40].map(|at| place(at * MIB));
        assert_eq!(ranges(&again, "a").await, all);
        // What was not dirty may be among it.
        let more = vec![place(50 * MIB), place(20 * MIB)];
        bitmaps.set_after_backup("a", more).await.expect("set");
        let exact = [20, 50].map(|at| place(at * MIB));
        assert_eq!(ranges(&image, "a").await, exact);
        image.close().await.expect("closed");
        expect_sound(file.clone(), false).await;
        let again = open_image(file).await;
        assert_eq!(ranges(&again, "a").await, exact);
    });
}

/// Also what it was called dirty for before the image was opened, in the same block of bits.
#[test]
fn a_crash_after_a_backup_leaves_dirty_what_was_so_when_the_image_was_opened() {
    lane::block_on(async {
        let file = new_image(64 * MIB, 64 * KIB).await;
        let image = open_image(file.clone()).await;
        image.bitmaps().add("a", every(4096)).await.expect("added");
        for at in [10, 20, 30] {
            write(&image, at * MIB, 512).await;
        }
        image.close().await.expect("closed");
        let image = open_image(file.clone()).await;
        let bitmaps = image.bitmaps();
        let place = |at: u64| at..at + 4096;
        let crashed = async || {
            let crashed = memory(file.snapshot());
            expect_sound(crashed.clone(), true).await;
            let again = open_image(crashed).await;
            ranges(&again, "a").await
        };
        write(&image, 20 * MIB, 512).await;
        let written = vec![place(20 * MIB)];
        bitmaps.set_after_backup("a", written).await.expect("set");
        write(&image, 40 * MIB, 512).await;
        let all = [10, 20, 30, 40].map(|at| place(at * MIB));
        assert_eq!(crashed().await, all);
        // Another size, and bits in another place.
        image.truncate(65 * MIB).await.expect("resized");
        write(&image, 50 * MIB, 512).await;
        let grown = [place(50 * MIB), 64 * MIB..65 * MIB];
        assert_eq!(crashed().await, [&all[..], &grown].concat());
        // Whoever begins the next one has heard of this.
        let written = vec![place(60 * MIB)];
        bitmaps.set_after_backup("a", written).await.expect("set");
        image.close().await.expect("closed");
        assert_eq!(crashed().await, [place(60 * MIB)]);
    });
}

/// An image in a folder of its own, made by QEMU, with a bitmap `theirs` that a killed
/// qemu-io has left inconsistent.
fn with_a_lost_bitmap(dir: &Path) {
    let run = |tool: &str, line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        qemu_ok(tool, dir, &words)
    };
    run("qemu-img", "create -q -f qcow2 image 64M");
    run("qemu-img", "bitmap --add image theirs");
    let killed = qemu(
        "qemu-io",
        dir,
        &["-c", "write 0 64k", "-c", "sigraise 9", "image"],
    );
    assert!(!killed.status.success());
}

#[test]
fn what_another_program_lost_stays_lost() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("image");
    with_a_lost_bitmap(dir.path());
    lane::block_on(async {
        let image = open_image(open(&path, Create::No)).await;
        image
            .bitmaps()
            .add("ours", every(4096))
            .await
            .expect("added");
        write(&image, 5 * MIB, 512).await;
        let crashed = memory(std::fs::read(&path).expect("bytes"));
        let told: Vec<(bool, bool)> = infos(crashed.clone())
            .await
            .iter()
            .map(|info| (info.in_use, info.consistent))
            .collect();
        assert_eq!(told, [(true, false), (true, true)]);
        let again = open_image(crashed.clone()).await;
        assert!(again.bitmaps().read("theirs").await.is_err());
        assert_eq!(ranges(&again, "ours").await, [5 * MIB..5 * MIB + 4096]);
        again.bitmaps().remove("theirs").await.expect("removed");
        again.close().await.expect("closed");
        // What the crash leaked stays leaked.
        expect_sound(crashed, true).await;
        image.close().await.expect("closed");
    });
    let info = qemu_ok("qemu-img", dir.path(), &["info", "image"]);
    assert_eq!(info.matches("in-use").count(), 1, "{info}");
    assert_eq!(qemu_verdict(&path).exit_code, 0);
}

#[test]
fn once_qemu_has_changed_the_image_a_kept_bitmap_is_lost() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("image");
    qemu_ok(
        "qemu-img",
        dir.path(),
        &["create", "-q", "-f", "qcow2", "image", "64M"],
    );
    lane::block_on(async {
        let image = open_image(open(&path, Create::No)).await;
        image.bitmaps().add("a", every(65536)).await.expect("added");
        write(&image, 5 * MIB, 512).await;
        let crashed = std::fs::read(&path).expect("bytes");
        image.close().await.expect("closed");
        drop(image);
        std::fs::write(&path, crashed).expect("written");
    });
    // QEMU reads the image, and calls the bitmap inconsistent.
    let info = qemu_ok("qemu-img", dir.path(), &["info", "image"]);
    assert!(info.contains("in-use"), "{info}");
    let lost = |message: &str| {
        lane::block_on(async {
            let info = &infos(open(&path, Create::No)).await[0];
            assert_eq!((info.in_use, info.consistent), (true, false), "{message}");
        });
    };
    let kept = lane::block_on(infos(open(&path, Create::No)));
    assert!(kept[0].consistent, "reading changes nothing");
    qemu_ok("qemu-io", dir.path(), &["-c", "write 20M 64k", "image"]);
    lost("after a write by QEMU");
    lane::block_on(async {
        let image = open_image(open(&path, Create::No)).await;
        write(&image, 0, 512).await;
        image.close().await.expect("closed");
    });
    lost("after a write by Vellum");
}

#[test]
fn what_a_program_without_bitmaps_changed_is_forgotten() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("image");
    let run = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        qemu("qemu-img", dir.path(), &words)
    };
    assert!(run("create -q -f qcow2 image 64M").status.success());
    assert!(run("bitmap --add image a").status.success());
    let mut bytes = std::fs::read(&path).expect("bytes");
    bytes[88..96].fill(0);
    std::fs::write(&path, bytes).expect("written");
    lane::block_on(async {
        let image = open_image(open(&path, Create::No)).await;
        assert!(image.bitmaps().are_lost());
        assert!(image.bitmaps().list().await.expect("listed").is_empty());
        image.bitmaps().add("a", every(4096)).await.expect("added");
        assert!(!image.bitmaps().are_lost());
        write(&image, MIB, 512).await;
        image.close().await.expect("closed");
    });
    let info = run("info image");
    let (text, errors) = (
        String::from_utf8_lossy(&info.stdout),
        String::from_utf8_lossy(&info.stderr),
    );
    assert!(
        text.contains("name: a") && errors.is_empty(),
        "{text}{errors}"
    );
    // What belonged to the first bitmap is leaked.
    assert_eq!(qemu_verdict(&path).exit_code, 3);
}

#[test]
fn emptying_an_image_without_a_backing_file_is_a_change() {
    lane::block_on(async {
        let image = open_image(new_image(4 * MIB, 64 * KIB).await).await;
        write(&image, 0, 512).await;
        image.bitmaps().add("a", every(4096)).await.expect("added");
        image.clear().await.expect("emptied");
        assert_eq!(ranges(&image, "a").await, [0..4 * MIB]);
        image.close().await.expect("closed");
    });
}

#[test]
fn qemu_copies_what_was_recorded() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("image");
    for options in [
        "cluster_size=64k",
        "cluster_size=512",
        "refcount_bits=1",
        "lazy_refcounts=on",
    ] {
        let words = ["create", "-q", "-f", "qcow2", "-o", options, "image", "64M"];
        qemu_ok("qemu-img", dir.path(), &words);
        qemu_ok(
            "qemu-img",
            dir.path(),
            &["bitmap", "--add", "-g", "4k", "image", "a"],
        );
        lane::block_on(async {
            let image = open_image(open(&path, Create::No)).await;
            for at in [0, 3 * MIB, 63 * MIB + 77] {
                write(&image, at, 9000).await;
            }
            image.close().await.expect("closed");
        });
        let verdict = qemu_verdict(&path);
        assert_eq!(verdict.exit_code, 0, "{options}: {verdict:?}");
        let words = ["convert", "-O", "qcow2", "--bitmaps", "image", "copy"];
        qemu_ok("qemu-img", dir.path(), &words);
        lane::block_on(async {
            let ours = open_image(open(&path, Create::No)).await;
            let copy = open_image(open(&dir.path().join("copy"), Create::No)).await;
            let wanted = [
                0..12 * KIB,
                3 * MIB..3 * MIB + 12 * KIB,
                63 * MIB..63 * MIB + 12 * KIB,
            ];
            assert_eq!(ranges(&ours, "a").await, wanted, "{options}");
            assert_eq!(ranges(&copy, "a").await, wanted, "{options}");
        });
    }
}

#[test]
fn bitmaps_get_another_size_with_the_disk() {
    lane::block_on(async {
        let file = new_image(4 * MIB, 512).await;
        let image = open_image(file.clone()).await;
        let bitmaps = image.bitmaps();
        bitmaps.add("a", every(512)).await.expect("added");
        write(&image, MIB, 512).await;
        write(&image, 3 * MIB, 512).await;
        let still = every(512).disabled(true);
        bitmaps.add("b", still).await.expect("added");
        let a = bitmaps.read("a").await.expect("read");
        bitmaps.merge("b", vec![a]).await.expect("merged");
        let sizes = [
            (2 * MIB, 0),
            (9 * MIB, 7 * MIB),
            (9 * MIB + 512, 7 * MIB + 512),
        ];
        for (size_bytes, new_bytes) in sizes {
            let resized = image.resize(size_bytes, Preallocation::Off).await;
            resized.expect("resized");
            let a = bitmaps.read("a").await.expect("read");
            assert_eq!(a.dirty_bytes(), 512 + new_bytes, "what is new is dirty");
            assert_eq!(ranges(&image, "b").await, [MIB..MIB + 512]);
            let crashed = memory(file.snapshot());
            expect_sound(crashed.clone(), true).await;
            let again = open_image(crashed).await;
            let kept = again.bitmaps().read("a").await.expect("read");
            assert!(kept.dirty_bytes() >= a.dirty_bytes());
        }
        image.close().await.expect("closed");
        expect_sound(file, false).await;
    });
}

/// Where all of a cluster of bits is set in the end, the bits need no cluster.
#[test]
fn a_clean_close_gives_back_every_cluster_of_bits() {
    lane::block_on(async {
        let file = new_image(4 * MIB, 512).await;
        let image = open_image(file.clone()).await;
        image.bitmaps().add("a", every(512)).await.expect("added");
        image.close().await.expect("closed");
        let image = open_image(file.clone()).await;
        for at in (0..4 * MIB).step_by(64 * KIB as usize) {
            write(&image, at, 64 * KIB).await;
        }
        image.close().await.expect("closed");
        expect_sound(file.clone(), false).await;

        let image = open_image(file.clone()).await;
        image.bitmaps().clear("a").await.expect("cleared");
        write(&image, MIB, 512).await;
        for size_bytes in [40 * MIB, 6 * MIB] {
            let resized = image.resize(size_bytes, Preallocation::Off).await;
            resized.expect("resized");
        }
        write(&image, 0, 4 * MIB).await;
        image.close().await.expect("closed");
        expect_sound(file, false).await;
    });
}

/// A read that is under way keeps what it reads from being used again; the close waits.
#[test]
fn a_clean_close_leaks_nothing_that_is_being_read() {
    lane::block_on(async {
        let file = new_image(4 * MIB, 64 * KIB).await;
        let image = open_image(file.clone()).await;
        write(&image, 0, 4 * MIB).await;
        image.flush().await.expect("flushed");
        let read = image.read(0, Buffer::for_read(4 * MIB as usize));
        image.discard(0, 4 * MIB).await.expect("discarded");
        image.flush().await.expect("flushed");
        drop(read.await.expect("read"));
        image.close().await.expect("closed");
        expect_sound(file, false).await;
    });
}
