//! Power cuts while images of qcow, QED and Parallels are written to: at many moments, with any of what came
//! after the last barrier lost or torn. What was flushed is there, and QEMU's check would find nothing but
//! marks and lost space.

use std::sync::Arc;

use crate::common::run;
use crate::cuts::{Recorded, States, around, assert_between};
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Buffer, Buffers, Raw, RawOptions, RequestFlags, Storage, ZeroRequest};
use vellum_foreign::{BackingName, CheckReport, Fix, ForeignImage, parallels, qcow, qed};
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};

const SIZE_BYTES: u64 = 512 << 10;
const ENOSPC: i32 = 28;
/// About so many moments of a history are looked at.
const CUTS: usize = 60;
const ALL: Fix = Fix {
    leaks: true,
    corruptions: true,
};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Format {
    Qcow,
    QcowOnBacking,
    Qed,
    QedOnBacking,
    Parallels,
}

impl Format {
    fn has_backing(self) -> bool {
        matches!(self, Format::QcowOnBacking | Format::QedOnBacking)
    }

    async fn image(self) -> Vec<u8> {
        let memory = Arc::new(MemStorage::new());
        let file: Arc<dyn Storage> = memory.clone();
        match self {
            Format::Qcow | Format::QcowOnBacking => {
                let backing = self.has_backing().then(|| "base".to_owned());
                let options = qcow::CreateOptions::default().size_bytes(SIZE_BYTES);
                qcow::create(&file, &options.backing_file(backing)).await
            }
            Format::Qed | Format::QedOnBacking => {
                let options = qed::CreateOptions::default()
                    .size_bytes(SIZE_BYTES)
                    .cluster_size_bytes(4096)
                    .table_size_clusters(2);
                qed::create(&file, &options).await
            }
            Format::Parallels => {
                let options = parallels::CreateOptions::default()
                    .size_bytes(SIZE_BYTES)
                    .cluster_size_bytes(8192);
                parallels::create(&file, &options).await
            }
        }
        .unwrap();
        memory.snapshot()
    }

    async fn open(self, file: Arc<dyn Storage>) -> Arc<dyn BlockDevice> {
        let backing = self.has_backing().then(|| {
            let base = Arc::new(MemStorage::with_bytes(base()));
            Raw::open(base, RawOptions::default()).unwrap() as Arc<dyn BlockDevice>
        });
        match self {
            Format::Qcow | Format::QcowOnBacking => {
                qcow::open(file, backing, qcow::OpenOptions::default())
                    .await
                    .unwrap()
            }
            Format::Qed | Format::QedOnBacking => qed::open(file, backing, false).await.unwrap(),
            Format::Parallels => parallels::open(file, false).await.unwrap(),
        }
    }

    /// What a check finds, and a check after a repair.
    async fn check(self, file: &Arc<dyn Storage>) -> Option<(CheckReport, CheckReport)> {
        match self {
            Format::Qcow | Format::QcowOnBacking => None,
            Format::Qed | Format::QedOnBacking => {
                let found = qed::check(file).await.unwrap();
                qed::repair(file, ALL).await.unwrap();
                Some((found, qed::check(file).await.unwrap()))
            }
            Format::Parallels => {
                let found = parallels::check(file).await.unwrap();
                parallels::repair(file, ALL).await.unwrap();
                Some((found, parallels::check(file).await.unwrap()))
            }
        }
    }
}

fn base() -> Vec<u8> {
    let sectors = (0..SIZE_BYTES / 512).map(|sector| [sector as u8 | 1; 512]);
    sectors.collect::<Vec<_>>().concat()
}

async fn read_all(device: &dyn BlockDevice) -> Vec<u8> {
    let read = device.read(0, Buffer::for_read(SIZE_BYTES as usize)).await;
    read.unwrap().to_vec()
}

/// Changes an image, with a flush now and then; at which moment which bytes were there for good.
async fn change(format: Format, file: &Arc<Recorded>, random: &mut fastrand::Rng) -> States {
    let device = format.open(file.clone()).await;
    let mut bytes = match format.has_backing() {
        true => base(),
        false => vec![0; SIZE_BYTES as usize],
    };
    let mut states = vec![(file.moment(), bytes.clone())];
    for round in 0..4 {
        // Whatever is written in a round is written once, so that each sector has two states.
        let mut places: Vec<usize> = (0..SIZE_BYTES as usize / 16384).collect();
        random.shuffle(&mut places);
        for place in places.into_iter().take(6) {
            let len = 512 * random.usize(1..32);
            let at = place * 16384 + 512 * random.usize(..=(16384 - len) / 512);
            let range = at..at + len;
            let (at, len) = (at as u64, len as u64);
            match random.u8(..6) {
                0 => {
                    bytes[range].fill(0);
                    let request = ZeroRequest::default().may_unmap(random.bool());
                    device.write_zeroes(at, len, request).await.unwrap();
                }
                1 if !format.has_backing() => {
                    let whole = place * 16384..(place + 1) * 16384;
                    let discarded = device.discard(whole.start as u64, 16384);
                    discarded.await.unwrap();
                    bytes.clone_from(&read_all(&*device).await);
                }
                _ => {
                    bytes[range.clone()].fill(round + 1);
                    let buffer = Buffer::copy_of(&bytes[range]);
                    let written = device.write(at, buffer, RequestFlags::default());
                    written.await.unwrap();
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

fn cut_at_all_moments(format: Format, seed: u64) {
    run(async {
        let random = &mut fastrand::Rng::with_seed(seed);
        let file = Recorded::new(format.image().await);
        let states = change(format, &file, random).await;
        let step = (file.moment() / CUTS).max(1);
        for moment in (states[0].0..=file.moment()).step_by(step) {
            let (before, after) = around(&states, moment);
            let image = file.cut(moment, random);
            let what = format!("{format:?}, seed {seed}, cut at {moment}");
            let image: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(image));
            if let Some((found, mended)) = format.check(&image).await {
                let marks = u64::from(found.messages.iter().any(|line| line.contains("closed")));
                assert_eq!(found.corruptions, marks, "{what}: {:?}", found.messages);
                assert_eq!(mended.corruptions, 0, "{what}");
            }
            let device = format.open(image.clone()).await;
            assert_between(&read_all(&*device).await, before, after, &what);
            // And it can be written to: nothing lies in two places.
            let all = Buffer::copy_of(&[0xee; SIZE_BYTES as usize]);
            let written = device.write(0, all, RequestFlags::default()).await;
            written.unwrap();
            device.close().await.unwrap();
            let device = format.open(image).await;
            assert!(
                read_all(&*device).await == [0xee; SIZE_BYTES as usize],
                "{what}"
            );
        }
    });
}

/// The name of the backing file is the old one or the new one, never a mixture of both.
#[test]
fn qed_names_one_backing_file() {
    run(async {
        let random = &mut fastrand::Rng::with_seed(6);
        let file = Recorded::new(Format::Qed.image().await);
        let device = Format::Qed.open(file.clone()).await;
        let image = ForeignImage::of(&*device).unwrap();
        let mut names = vec![(file.moment(), None)];
        for length in [3, 1000, 600, 0, 1019, 20] {
            let name = BackingName {
                name: "n".repeat(length) + &length.to_string(),
                format: None,
            };
            let name = Some(name).filter(|_| length > 0);
            image.set_backing_file(name.clone()).await.unwrap();
            names.push((file.moment(), name));
        }
        for moment in names[0].0..=file.moment() {
            let at = names.iter().rposition(|(at, _)| *at <= moment).unwrap();
            let allowed = &names[at..(at + 2).min(names.len())];
            for _ in 0..8 {
                let cut = MemStorage::with_bytes(file.cut(moment, random));
                let cut: Arc<dyn Storage> = Arc::new(cut);
                let named = qed::facts(&cut).await.unwrap().backing;
                let is_allowed = allowed.iter().any(|(_, name)| *name == named);
                assert!(
                    is_allowed,
                    "cut at {moment}: {named:?} is none of {allowed:?}"
                );
            }
        }
    });
}

/// What a longer backing file has behind the old end never shows: neither after a cut, nor after a
/// resize that failed for want of space.
#[test]
fn a_resize_of_qed_never_shows_a_longer_backing_file() {
    const SHORT_BYTES: u64 = SIZE_BYTES / 2 + 512;
    run(async {
        let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let options = qed::CreateOptions::default()
            .size_bytes(SHORT_BYTES)
            .cluster_size_bytes(4096)
            .table_size_clusters(1);
        qed::create(&memory, &options).await.unwrap();
        let mut bytes = vec![0; memory.len_bytes().unwrap() as usize];
        let read = memory.read(0, Buffers::from_iter([Buffer::for_read(bytes.len())]));
        bytes.copy_from_slice(&read.await.unwrap()[0]);

        let file = Recorded::new(bytes.clone());
        let device = Format::QedOnBacking.open(file.clone()).await;
        device.truncate(SIZE_BYTES).await.unwrap();
        device.close().await.unwrap();
        let mut random = fastrand::Rng::with_seed(1);
        for moment in 0..=file.moment() {
            for _ in 0..8 {
                let cut = MemStorage::with_bytes(file.cut(moment, &mut random));
                shows_the_short_part_alone(Arc::new(cut), SHORT_BYTES).await;
            }
        }

        let memory = Arc::new(MemStorage::with_bytes(bytes));
        let full = FaultStorage::new(memory.clone());
        let writes = Matching::operation(Operation::Write);
        full.fail(writes.touching(4096..1 << 30), 0, Times::Always, ENOSPC);
        let device = Format::QedOnBacking.open(full).await;
        device.truncate(SIZE_BYTES).await.unwrap_err();
        drop(device);
        shows_the_short_part_alone(memory, SHORT_BYTES).await;
    });
}

async fn shows_the_short_part_alone(file: Arc<dyn Storage>, short_bytes: u64) {
    let device = Format::QedOnBacking.open(file).await;
    let size_bytes = device.size_bytes();
    let read = device.read(0, Buffer::for_read(size_bytes as usize)).await;
    let mut expected = base();
    expected[short_bytes as usize..].fill(0);
    assert!(read.unwrap()[..] == expected[..size_bytes as usize]);
}

#[test]
fn qcow_loses_nothing_that_was_flushed() {
    cut_at_all_moments(Format::Qcow, 1);
    cut_at_all_moments(Format::QcowOnBacking, 2);
}

#[test]
fn qed_loses_nothing_that_was_flushed() {
    cut_at_all_moments(Format::Qed, 3);
    cut_at_all_moments(Format::QedOnBacking, 4);
}

#[test]
fn parallels_loses_nothing_that_was_flushed() {
    for seed in 5..8 {
        cut_at_all_moments(Format::Parallels, seed);
    }
}
