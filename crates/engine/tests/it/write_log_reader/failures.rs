//! Failures of image and log at the same time.

use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, Fix, check, repair};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2, WriteLogOptions, read_header};
use vellum::{BlockDevice, Buffer, ErrorKind, RequestFlags, Storage};
use vellum_format::features::Incompatible;
use vellum_io::Buffers;
use vellum_io::lane::block_on;
use vellum_io::spawn;
use vellum_storage::wrap::{DelayStorage, FaultStorage, Matching, Operation, Times};
use vellum_storage::{MemStorage, WriteFlags};

use crate::common::Random;
use crate::write_log_reader::{EIO, content, memory, open_with, open_with_log, reader, world};

const CLUSTER: u64 = 64 << 10;

async fn write(image: &Qcow2, at: u64, len: usize, byte: u8) {
    let bytes = Buffer::copy_of(&vec![byte; len]);
    let written = image.write(at, bytes, RequestFlags::default());
    written.await.expect("written");
}

async fn incompatible(file: &Arc<MemStorage>) -> Incompatible {
    let file: Arc<dyn Storage> = file.clone();
    read_header(&file).await.expect("a header").incompatible
}

/// The header has no room for what it would say of the log.
#[test]
fn a_log_inside_that_is_never_named_gives_its_clusters_back() {
    block_on(async {
        let file = Arc::new(MemStorage::new());
        let options = CreateOptions::default()
            .size_bytes(1 << 20)
            .cluster_size_bytes(512)
            .backing_file(Some("b".repeat(350)))
            .backing_format(Some("raw".to_owned()));
        create(file.clone(), None, &options).await.expect("made");
        for _ in 0..3 {
            let log = WriteLogOptions::inside().len_bytes(WriteLogOptions::MIN_LEN_BYTES);
            let options = OpenOptions::default()
                .backing(Backing::None)
                .write_log(Some(log));
            let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
            assert_eq!(
                opened.expect_err("no room").kind(),
                ErrorKind::InvalidArgument
            );
            let report = check(file.clone(), &CheckOptions::default()).await;
            let report = report.expect("checked");
            assert_eq!((report.leaks, report.corruptions), (0, 0));
        }
    });
}

/// Each write and flush fails while a log inside is taken into use: what was counted for it and not named is
/// found by a check, and freed by a repair.
#[test]
fn a_log_inside_whose_header_is_not_written_leaves_nothing_that_a_repair_does_not_free() {
    block_on(async {
        let before = Arc::new(MemStorage::new());
        let options = CreateOptions::default().size_bytes(1 << 20);
        create(before.clone(), None, &options).await.expect("made");
        let before = before.snapshot();
        let options = || {
            let log = WriteLogOptions::inside().len_bytes(WriteLogOptions::MIN_LEN_BYTES);
            OpenOptions::default().write_log(Some(log))
        };
        let mut leaked = 0;
        for (operation, times) in [
            (Operation::Write, Times::Once),
            (Operation::Write, Times::Always),
            (Operation::Flush, Times::Once),
        ] {
            for pass in 0.. {
                let file = memory(&before);
                let failing = FaultStorage::new(file.clone());
                failing.fail(Matching::operation(operation), pass, times, EIO);
                let opened = Qcow2::open(failing.clone(), Arc::new(DenyAll), options()).await;
                let Err(error) = opened else {
                    break;
                };
                assert_eq!(error.errno(), EIO, "{error}");
                let what = format!("{operation:?} {pass}, {times:?}");
                let found = check(file.clone(), &CheckOptions::default()).await;
                let found = found.expect("checked");
                assert_eq!(found.corruptions, 0, "{what}: {found:?}");
                leaked += found.leaks;
                repair(file.clone(), Fix::Leaks, &CheckOptions::default())
                    .await
                    .expect("repaired");
                let left = check(file.clone(), &CheckOptions::default()).await;
                let left = left.expect("checked");
                assert_eq!((left.leaks, left.corruptions), (0, 0), "{what}");
                let end = (before.len() as u64).next_multiple_of(CLUSTER);
                assert!(left.image_end_offset <= end, "{what}");
                let image = Qcow2::open(file.clone(), Arc::new(DenyAll), options()).await;
                image.expect("opened").close().await.expect("closed");
                let left = check(file, &CheckOptions::default()).await;
                assert_eq!(left.expect("checked").leaks, 0, "{what}");
            }
        }
        assert!(leaked > 0, "no header was not written");
    });
}

/// Metadata could not be written while records were live; the close writes it.
#[test]
fn a_close_that_writes_what_could_not_be_written_ends_the_log() {
    block_on(async {
        let bytes = world::image_with(&mut Random::new(1), false).await;
        let (file, log) = (memory(&bytes), memory(&[]));
        let failing = FaultStorage::new(file.clone());
        let image = open_with_log(failing.clone(), log.clone()).await;
        let image = image.expect("opened");
        write(&image, 8192, 512, 1).await;
        image.flush().await.expect("appended");
        assert!(reader::is_marked(&file.snapshot()));
        // Too long for the log.
        write(&image, 0, world::SIZE as usize, 2).await;
        failing.fail(Matching::operation(Operation::Write), 0, Times::Always, EIO);
        image.flush().await.expect_err("nothing can be written");
        failing.heal();
        image.close().await.expect("written after all");
        assert!(!reader::is_marked(&file.snapshot()));
        let image = open_with(
            file,
            WriteLogOptions::new(log, crate::write_log_reader::NAME),
        )
        .await;
        let image = image.expect("opened");
        assert!(content(&image).await.iter().all(|byte| *byte == 2));
        image.close().await.expect("closed");
    });
}

/// An image of two L2 tables of which the second one is damaged.
async fn damaged() -> Arc<MemStorage> {
    let file = Arc::new(MemStorage::new());
    let options = CreateOptions::default().size_bytes(1 << 30);
    create(file.clone(), None, &options).await.expect("made");
    let second = 512 << 20;
    let image = Qcow2::open(file.clone(), Arc::new(DenyAll), OpenOptions::default()).await;
    let image = image.expect("opened");
    write(&image, 0, CLUSTER as usize, 1).await;
    write(&image, second, CLUSTER as usize, 1).await;
    image.close().await.expect("closed");
    let storage: Arc<dyn Storage> = file.clone();
    let header = read_header(&storage).await.expect("a header");
    let one = Buffers::from_iter([Buffer::zeroed(8)]);
    let entry = storage.read(header.l1_table_offset.bytes() + 8, one).await;
    let entry = Buffer::join_all(entry.expect("an entry"));
    let table = u64::from_be_bytes(entry[..8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00;
    let unaligned = Buffer::copy_of(&(1 << 63 | 0x50200_u64).to_be_bytes());
    let unaligned = Buffers::from_iter([unaligned]);
    let put = storage.write(table, unaligned, WriteFlags::default());
    put.await.expect("damaged");
    file
}

/// Damage is found while the first flush with a log marks the header.
#[test]
fn neither_mark_of_the_header_is_lost() {
    block_on(async {
        let (file, log) = (damaged().await, memory(&[]));
        let delayed = DelayStorage::new(log);
        let image = open_with_log(file.clone(), delayed.clone()).await;
        let image = image.expect("opened");
        write(&image, 1 << 20, 512, 7).await;
        let held = delayed.hold(Matching::operation(Operation::Write));
        let flushing = spawn({
            let image = image.clone();
            async move { image.flush().await }
        });
        held.arrived().await;
        let read = image.read(512 << 20, Buffer::for_read(512)).await;
        assert_eq!(read.expect_err("damaged").kind(), ErrorKind::Corrupt);
        assert!(incompatible(&file).await.contains(Incompatible::CORRUPT));
        held.release();
        flushing.await.expect("flushed");
        let marks = Incompatible::CORRUPT | Incompatible::WRITE_LOG;
        assert_eq!(incompatible(&file).await, marks);
    });
}
