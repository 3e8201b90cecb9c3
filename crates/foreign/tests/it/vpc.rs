//! VHD images: made here and read by QEMU, made by QEMU and read and written here, and cut off.

use std::sync::Arc;

use crate::common::{Model, Place, compare_with_qemu, new_file, open_file, qemu, run};
use crate::cuts::{Recorded, assert_between};
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Buffer, RequestFlags, Storage};
use vellum_foreign::vpc::{CreateOptions, OpenOptions, SizeCalculation, Subformat, create, open};

const MIB: u64 = 1 << 20;

#[test]
fn what_is_written_here_is_read_there() {
    let options = CreateOptions::default().size_bytes(9 * MIB);
    for (seed, options) in [
        (1, options),
        (2, options.force_size(true).size_bytes(7 * MIB + 512)),
        (3, options.subformat(Subformat::Fixed)),
    ] {
        let place = Place::default();
        let mut model = Model::new(seed, options.rounded_bytes().unwrap());
        run(async {
            let file = new_file(&place.path("a.vhd"));
            create(&file, &options).await.unwrap();
            for _ in 0..2 {
                let device = open(file.clone(), None, OpenOptions::default())
                    .await
                    .unwrap();
                model.compare(&*device).await;
                model.exercise(&*device, 20).await;
                model.compare(&*device).await;
                device.close().await.unwrap();
            }
            assert_footers(&file).await;
        });
        compare_with_qemu(&place, "vpc", "a.vhd", &model.bytes);
    }
}

/// The file ends with a footer, and, unless it is a fixed image, begins with the same.
async fn assert_footers(file: &Arc<dyn Storage>) {
    let bytes = read_file(file).await;
    let last = &bytes[bytes.len() - 512..];
    assert!(last.starts_with(b"conectix"));
    if bytes.starts_with(b"conectix") {
        assert_eq!(&bytes[..512], last);
    }
}

async fn read_file(file: &Arc<dyn Storage>) -> Vec<u8> {
    let len = file.len_bytes().unwrap() as usize;
    let buffers = vellum::Buffers::from_buf([Buffer::for_read(len)]);
    Buffer::join_all(file.read(0, buffers).await.unwrap()).to_vec()
}

#[test]
fn what_qemu_writes_is_read_here() {
    for (seed, options) in [(4, "force_size=on"), (5, "force_size=on,subformat=fixed")] {
        let place = Place::default();
        let image = place.text("a.vhd");
        qemu(
            "qemu-img",
            &["create", "-q", "-f", "vpc", "-o", options, &image, "10M"],
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
        let mut arguments = vec!["-f", "vpc"];
        arguments.extend(commands.iter().map(String::as_str));
        arguments.push(&image);
        qemu("qemu-io", &arguments);
        run(async {
            let file = open_file(&place.path("a.vhd"));
            let device = open(file.clone(), None, OpenOptions::default())
                .await
                .unwrap();
            model.compare(&*device).await;
            model.exercise(&*device, 60).await;
            device.close().await.unwrap();
            assert_footers(&file).await;
        });
        compare_with_qemu(&place, "vpc", "a.vhd", &model.bytes);
        // And it goes on where we ended.
        qemu("qemu-io", &["-f", "vpc", "-c", "write -P 3 0 10M", &image]);
        compare_with_qemu(&place, "vpc", "a.vhd", &vec![3; 10 << 20]);
    }
}

#[test]
fn images_have_the_layout_of_qemus() {
    let place = Place::default();
    let options = CreateOptions::default();
    for (words, ours) in [
        ("subformat=dynamic", options),
        ("force_size=on", options.force_size(true)),
        ("subformat=fixed", options.subformat(Subformat::Fixed)),
    ] {
        for size in ["0", "1", "70000000", "5000000000", "140000000000"] {
            let theirs = place.text("qemu.vhd");
            qemu(
                "qemu-img",
                &["create", "-q", "-f", "vpc", "-o", words, &theirs, size],
            );
            run(async {
                let file = new_file(&place.path("ours.vhd"));
                create(&file, &ours.size_bytes(size.parse().unwrap()))
                    .await
                    .unwrap();
                let theirs = open_file(&place.path("qemu.vhd"));
                assert_eq!(file.len_bytes().unwrap(), theirs.len_bytes().unwrap());
                assert_eq!(
                    without_names(&*file).await,
                    without_names(&*theirs).await,
                    "{words} {size}"
                );
            });
        }
    }
}

/// The beginning and the end of an image, but for time, identity and checksum.
async fn without_names(file: &dyn Storage) -> Vec<u8> {
    let mut all = Vec::new();
    for at in [0, file.len_bytes().unwrap() - 512] {
        let buffers = vellum::Buffers::from_buf([Buffer::for_read(2048)]);
        let mut bytes = Buffer::join_all(file.read(at, buffers).await.unwrap());
        if bytes.starts_with(b"conectix") {
            bytes[24..28].fill(0);
            bytes[64..84].fill(0);
        }
        all.extend_from_slice(&bytes);
    }
    // The footer's copy at the end may be among the first bytes.
    if let Some(at) = all[512..2048]
        .chunks(512)
        .position(|sector| sector.starts_with(b"conectix"))
    {
        let at = 512 * (at + 1);
        all[at + 24..at + 28].fill(0);
        all[at + 64..at + 84].fill(0);
    }
    all
}

#[test]
fn the_size_is_the_one_that_qemu_believes() {
    let place = Place::default();
    let image = place.text("a.vhd");
    qemu("qemu-img", &["create", "-q", "-f", "vpc", &image, "100M"]);
    let good = std::fs::read(&image).unwrap();
    for creator in [
        b"vpc ", b"qemu", b"vs  ", b"qem2", b"win ", b"d2v ", b"tap\0", b"CTXS", b"wa\0\0", b"what",
    ] {
        let mut bytes = good.clone();
        bytes[28..32].copy_from_slice(creator);
        bytes[48..56].copy_from_slice(&(104_857_600u64 - 51_200).to_be_bytes());
        bytes[64..68].fill(0);
        let sum = bytes[..512]
            .iter()
            .fold(0u32, |sum, byte| sum + u32::from(*byte));
        bytes[64..68].copy_from_slice(&(!sum).to_be_bytes());
        std::fs::write(&image, &bytes).unwrap();
        for (calculation, option) in [
            (SizeCalculation::Auto, ""),
            (SizeCalculation::Chs, ",force_size_calc=chs"),
            (
                SizeCalculation::CurrentSize,
                ",force_size_calc=current_size",
            ),
        ] {
            let spec = format!("driver=vpc,file.driver=file,file.filename={image}{option}");
            let told = qemu("qemu-img", &["info", "--image-opts", &spec]);
            let size_bytes = run(async {
                let options = OpenOptions::default()
                    .read_only(true)
                    .size_calculation(calculation);
                open(open_file(&place.path("a.vhd")), None, options)
                    .await
                    .unwrap()
                    .size_bytes()
            });
            assert!(
                told.contains(&format!("({size_bytes} bytes)")),
                "{creator:?} {option} {told}"
            );
        }
    }
}

#[test]
fn a_power_cut_at_any_moment_loses_nothing_that_was_flushed() {
    run(async {
        let made = Arc::new(MemStorage::new());
        let options = CreateOptions::default()
            .force_size(true)
            .size_bytes(10 * MIB);
        create(&(made.clone() as Arc<dyn Storage>), &options)
            .await
            .unwrap();
        let file = Recorded::new(made.snapshot());
        let mut bytes = vec![0; 10 << 20];
        let mut states = vec![(0, bytes.clone())];
        let random = &mut fastrand::Rng::with_seed(21);
        for round in 0u8..5 {
            let device = open(file.clone(), None, OpenOptions::default())
                .await
                .unwrap();
            for flush in 0..2 {
                let mut blocks: Vec<usize> = (0..5).collect();
                random.shuffle(&mut blocks);
                for block in &blocks[..2] {
                    let len = 512 * random.usize(1..100);
                    let at = (block << 21) + 512 * random.usize(0..4096 - len / 512);
                    bytes[at..at + len].fill(1 + round * 2 + flush);
                    let buffer = Buffer::copy_of(&bytes[at..at + len]);
                    device
                        .write(at as u64, buffer, RequestFlags::default())
                        .await
                        .unwrap();
                }
                device.flush().await.unwrap();
                states.push((file.moment(), bytes.clone()));
            }
            // Not all are closed well.
            if round % 2 == 0 {
                device.close().await.unwrap();
            }
        }
        states.push((file.moment(), bytes));
        for moment in 0..=file.moment() {
            let at = states.iter().rposition(|(at, _)| *at <= moment).unwrap();
            let (before, after) = (&states[at].1, &states[(at + 1).min(states.len() - 1)].1);
            let what = format!("cut at {moment}");
            let image: Arc<dyn Storage> =
                Arc::new(MemStorage::with_bytes(file.cut(moment, random)));
            assert_footers(&image).await;
            let device = open(image.clone(), None, OpenOptions::default())
                .await
                .expect(&what);
            let read = device.read(0, Buffer::for_read(10 << 20)).await.unwrap();
            assert_between(&read, before, after, &what);
            // Another one can be written after it.
            for block in 0..5 {
                let buffer = Buffer::copy_of(&[0xee; 512]);
                let written = device.write(block << 21, buffer, RequestFlags::default());
                written.await.unwrap();
            }
            device.close().await.unwrap();
            assert_footers(&image).await;
        }
    });
}
