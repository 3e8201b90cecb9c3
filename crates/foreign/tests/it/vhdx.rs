//! VHDX images: made here and read by QEMU, made by QEMU and read and written here, and cut off.

use std::process::Command;
use std::sync::Arc;

use crate::common::{Model, Place, compare_with_qemu, new_file, open_file, qemu, run};
use crate::cuts::{Recorded, assert_between};
use vellum::storage::{FileOptions, FileStorage, MemStorage};
use vellum::{BlockDevice, Buffer, ErrorKind, RequestFlags, Storage, ZeroRequest};
use vellum_foreign::vhdx::{CreateOptions, OpenOptions, Subformat, check, create, open};
use vellum_foreign::{Fix, ForeignImage};

const MIB: u64 = 1 << 20;

#[test]
fn what_is_written_here_is_read_there() {
    let options = CreateOptions::default();
    let fixed = options.subformat(Subformat::Fixed);
    for (seed, size_bytes, options) in [
        (1, 9 * MIB + 0x600, options.block_size_bytes(MIB)),
        (2, 20 * MIB, options.block_state_zero(false)),
        (3, 10 * MIB, fixed),
        (4, 9 * MIB, fixed.block_state_zero(false)),
    ] {
        let place = Place::default();
        let mut model = Model::new(seed, size_bytes);
        run(async {
            let file = new_file(&place.path("a.vhdx"));
            create(&file, &options.size_bytes(size_bytes))
                .await
                .unwrap();
            for _ in 0..2 {
                let device = open(file.clone(), None, OpenOptions::default())
                    .await
                    .unwrap();
                model.compare(&*device).await;
                model.exercise(&*device, 20).await;
                model.compare(&*device).await;
                device.close().await.unwrap();
            }
            let found = check(&file, Fix::default()).await.unwrap();
            assert_eq!(found.messages, Vec::<String>::new());
        });
        qemu("qemu-img", &["check", "-f", "vhdx", &place.text("a.vhdx")]);
        compare_with_qemu(&place, "vhdx", "a.vhdx", &model.bytes);
    }
}

#[test]
fn what_qemu_writes_is_read_here() {
    for (seed, options) in [
        (5, "block_size=1M"),
        (6, "block_state_zero=off"),
        (7, "subformat=fixed,block_state_zero=off"),
    ] {
        let place = Place::default();
        let image = place.text("a.vhdx");
        qemu(
            "qemu-img",
            &["create", "-q", "-f", "vhdx", "-o", options, &image, "10M"],
        );
        let mut model = Model::new(seed, 10 << 20);
        let random = &mut fastrand::Rng::with_seed(seed);
        let mut commands = Vec::new();
        for pattern in 1..12 {
            let (offset, len) = (random.usize(0..16000) * 512, random.usize(1..4000) * 512);
            commands.extend([
                "-c".to_owned(),
                format!("write -P {pattern} {offset} {len}"),
            ]);
            model.bytes[offset..offset + len].fill(pattern);
        }
        let mut arguments = vec!["-f", "vhdx"];
        arguments.extend(commands.iter().map(String::as_str));
        arguments.push(&image);
        qemu("qemu-io", &arguments);
        run(async {
            let device = open(
                open_file(&place.path("a.vhdx")),
                None,
                OpenOptions::default(),
            )
            .await;
            let device = device.unwrap();
            model.compare(&*device).await;
            model.exercise(&*device, 60).await;
            device.close().await.unwrap();
        });
        compare_with_qemu(&place, "vhdx", "a.vhdx", &model.bytes);
        // And it goes on where we ended.
        qemu("qemu-io", &["-f", "vhdx", "-c", "write -P 3 0 10M", &image]);
        qemu("qemu-img", &["check", "-f", "vhdx", &image]);
    }
}

#[test]
fn images_have_the_layout_of_qemus() {
    let place = Place::default();
    for (options, ours) in [
        ("subformat=dynamic", CreateOptions::default()),
        (
            "log_size=3M,block_size=2M",
            CreateOptions::default()
                .log_size_bytes(3 * MIB)
                .block_size_bytes(2 * MIB),
        ),
        (
            "subformat=fixed,block_state_zero=off",
            CreateOptions::default()
                .subformat(Subformat::Fixed)
                .block_state_zero(false),
        ),
    ] {
        for size in ["0", "1", "70000000", "5000000000"] {
            let theirs = place.text("qemu.vhdx");
            qemu(
                "qemu-img",
                &["create", "-q", "-f", "vhdx", "-o", options, &theirs, size],
            );
            run(async {
                let file = new_file(&place.path("ours.vhdx"));
                create(&file, &ours.size_bytes(size.parse().unwrap()))
                    .await
                    .unwrap();
                let theirs = open_file(&place.path("qemu.vhdx"));
                // QEMU's fixed images end with the disk, ours with the last block.
                let rest_bytes = file.len_bytes().unwrap() - theirs.len_bytes().unwrap();
                let is_fixed = ours.subformat == Subformat::Fixed;
                assert!(
                    rest_bytes == 0 || is_fixed && rest_bytes < 16 * MIB,
                    "{options} {size}"
                );
                let (ours, theirs) = (
                    open(file, None, OpenOptions::default()).await.unwrap(),
                    open(theirs, None, OpenOptions::default()).await.unwrap(),
                );
                assert_eq!(ours.size_bytes(), theirs.size_bytes());
                assert_eq!(
                    ours.info().cluster_size_bytes,
                    theirs.info().cluster_size_bytes
                );
                assert_eq!(ours.info().has_zero_init, theirs.info().has_zero_init);
            });
            qemu(
                "qemu-img",
                &["check", "-f", "vhdx", &place.text("ours.vhdx")],
            );
        }
    }
}

async fn memory_image(size_bytes: u64) -> Vec<u8> {
    let file = Arc::new(MemStorage::new());
    let options = CreateOptions::default()
        .block_size_bytes(MIB)
        .size_bytes(size_bytes);
    create(&(file.clone() as Arc<dyn Storage>), &options)
        .await
        .unwrap();
    file.snapshot()
}

async fn read_all(device: &dyn BlockDevice) -> Vec<u8> {
    let size_bytes = device.size_bytes() as usize;
    device
        .read(0, Buffer::for_read(size_bytes))
        .await
        .unwrap()
        .to_vec()
}

/// Writes to an image that remembers everything; gives what the disk held after each flush, and when.
async fn flushed_writes(file: &Arc<Recorded>, flushes: usize) -> Vec<(usize, Vec<u8>)> {
    let device = open(file.clone(), None, OpenOptions::default())
        .await
        .unwrap();
    let mut bytes = vec![0; device.size_bytes() as usize];
    let mut states = vec![(0, bytes.clone())];
    let random = &mut fastrand::Rng::with_seed(11);
    for round in 0..flushes {
        let mut blocks: Vec<usize> = (0..bytes.len() >> 20).collect();
        random.shuffle(&mut blocks);
        for block in &blocks[..2] {
            let len = 512 * random.usize(1..300);
            let at = (block << 20) + 512 * random.usize(0..2048 - len / 512);
            match random.u8(0..4) {
                0 => {
                    bytes[block << 20..(block + 1) << 20].fill(0);
                    let (at, len) = ((block << 20) as u64, MIB);
                    let zeroed = device.write_zeroes(at, len, ZeroRequest::default());
                    zeroed.await.unwrap();
                }
                _ => {
                    bytes[at..at + len].fill(round as u8 + 1);
                    let buffer = Buffer::copy_of(&bytes[at..at + len]);
                    device
                        .write(at as u64, buffer, RequestFlags::default())
                        .await
                        .unwrap();
                }
            }
        }
        device.flush().await.unwrap();
        states.push((file.moment(), bytes.clone()));
    }
    device.close().await.unwrap();
    states.push((file.moment(), bytes));
    states
}

#[test]
fn a_power_cut_at_any_moment_loses_nothing_that_was_flushed() {
    run(async {
        let file = Recorded::new(memory_image(6 * MIB).await);
        let states = flushed_writes(&file, 4).await;
        let random = &mut fastrand::Rng::with_seed(12);
        let mut replayed = 0;
        for moment in 0..=file.moment() {
            let at = states.iter().rposition(|(at, _)| *at <= moment).unwrap();
            let (before, after) = (&states[at].1, &states[(at + 1).min(states.len() - 1)].1);
            let image: Arc<dyn Storage> =
                Arc::new(MemStorage::with_bytes(file.cut(moment, random)));
            let what = format!("cut at {moment}");
            let fix = Fix {
                leaks: false,
                corruptions: true,
            };
            let found = check(&image, fix).await.unwrap();
            assert_eq!(found.messages, Vec::<String>::new(), "{what}");
            replayed += found.corruptions_fixed;
            let device = open(image, None, OpenOptions::default())
                .await
                .expect(&what);
            assert_between(&read_all(&*device).await, before, after, &what);
            device.close().await.unwrap();
        }
        assert!(replayed > 3, "{replayed} logs were replayed");
    });
}

#[test]
fn a_log_that_waits_is_replayed_as_qemu_does_it() {
    let place = Place::default();
    let (image, copy) = (place.text("a.vhdx"), place.text("copy.vhdx"));
    run(async {
        let file = Recorded::new(memory_image(6 * MIB).await);
        let states = flushed_writes(&file, 3).await;
        let random = &mut fastrand::Rng::with_seed(13);
        let mut replayed = 0;
        for moment in states[1].0 + 1..states[3].0 {
            std::fs::write(&image, file.cut(moment, random)).unwrap();
            let read_only = Command::new("qemu-img")
                .args(["info", "-f", "vhdx", &image])
                .output();
            let read_only = read_only.unwrap();
            let options = FileOptions::default();
            let file = FileStorage::open(&image, &options).unwrap() as Arc<dyn Storage>;
            let opened = open(file.clone(), None, OpenOptions::default().read_only(true)).await;
            assert_eq!(
                opened.is_ok(),
                read_only.status.success(),
                "cut at {moment}"
            );
            let Err(error) = opened else {
                continue;
            };
            assert_eq!(error.kind(), ErrorKind::PermissionDenied);
            let theirs = String::from_utf8_lossy(&read_only.stderr).into_owned();
            let first = error.message().lines().next().unwrap();
            assert!(theirs.contains(first), "{theirs} {first}");
            drop(file);
            std::fs::copy(&image, &copy).unwrap();
            qemu(
                "qemu-img",
                &["check", "-q", "-f", "vhdx", "-r", "all", &copy],
            );
            let file = FileStorage::open(&image, &options).unwrap() as Arc<dyn Storage>;
            let device = open(file, None, OpenOptions::default()).await.unwrap();
            let bytes = read_all(&*device).await;
            device.close().await.unwrap();
            drop(device);
            compare_with_qemu(&place, "vhdx", "copy.vhdx", &bytes);
            compare_with_qemu(&place, "vhdx", "a.vhdx", &bytes);
            replayed += 1;
            if replayed == 2 {
                return;
            }
        }
        panic!("{replayed} logs were replayed");
    });
}

#[test]
fn a_check_finds_what_qemus_finds() {
    let place = Place::default();
    let image = place.text("a.vhdx");
    run(async {
        let good = memory_image(6 * MIB).await;
        // The table begins at 2 MiB, the metadata behind it; blocks are of a MiB.
        for entry in [
            1000 << 20 | 6,
            3 << 20 | 6,
            1 << 20 | 6,
            8 << 20 | 6,
            (1 << 63) | 6,
        ] {
            let mut bytes = good.clone();
            bytes[2 << 20..(2 << 20) + 8].copy_from_slice(&u64::to_le_bytes(entry));
            std::fs::write(&image, &bytes).unwrap();
            let checked = Command::new("qemu-img")
                .args(["check", "-f", "vhdx", &image])
                .output();
            let theirs = checked.unwrap();
            let theirs = String::from_utf8_lossy(&theirs.stderr).into_owned();
            let theirs: Vec<&str> = theirs
                .lines()
                .filter_map(|line| line.strip_prefix("qemu-img: "))
                .collect();
            let file = open_file(&place.path("a.vhdx"));
            let found = check(&file, Fix::default()).await.unwrap();
            assert_eq!(found.messages, theirs, "{entry:#x}");
            assert_eq!(found.corruptions as usize, theirs.len());
            let options = OpenOptions::default();
            let error = open(file.clone(), None, options).await.unwrap_err();
            assert_eq!(error.message(), theirs[0]);
            let device = open(file, None, options.for_check(true)).await.unwrap();
            assert!(device.info().read_only);
        }
    });
}

/// Whatever interrupts a commit, the image on top still finds its parent.
#[test]
fn a_commit_keeps_the_identity_until_it_is_complete() {
    run(async {
        let memory = Arc::new(MemStorage::new());
        let file: Arc<dyn Storage> = memory.clone();
        create(&file, &CreateOptions::default().size_bytes(4 * MIB))
            .await
            .unwrap();
        let device = open(file.clone(), None, OpenOptions::default());
        let device = device.await.unwrap();
        let before = device.layout().data_write_guid().await;
        let image = ForeignImage::of(&*device).unwrap();
        image.keep_identity();
        let ones = Buffer::copy_of(&[1; 4096]);
        device.write(0, ones, Default::default()).await.unwrap();
        device.flush().await.unwrap();
        let cut = Arc::new(MemStorage::with_bytes(memory.snapshot()));
        let interrupted = open(cut, None, OpenOptions::default()).await.unwrap();
        assert_eq!(interrupted.layout().data_write_guid().await, before);

        image.change_identity().await.unwrap();
        device.close().await.unwrap();
        let device = open(file, None, OpenOptions::default()).await.unwrap();
        assert_ne!(device.layout().data_write_guid().await, before);
        let read = device.read(0, Buffer::for_read(4096)).await.unwrap();
        assert!(read.iter().all(|&byte| byte == 1));
    });
}
