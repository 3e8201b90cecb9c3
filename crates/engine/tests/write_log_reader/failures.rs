//! Failures of image and log at the same time.

use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2, WriteLogOptions};
use vellum::{BlockDevice, Buffer, ErrorKind, RequestFlags};
use vellum_io::lane::block_on;
use vellum_storage::MemStorage;
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};

use crate::common::Random;
use crate::{EIO, content, memory, open_with, open_with_log, reader, world};

async fn write(image: &Qcow2, at: u64, len: usize, byte: u8) {
    let bytes = Buffer::copy_of(&vec![byte; len]);
    let written = image.write(at, bytes, RequestFlags::default());
    written.await.expect("written");
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
        let image = open_with(file, WriteLogOptions::new(log, crate::NAME)).await;
        let image = image.expect("opened");
        assert!(content(&image).await.iter().all(|byte| *byte == 2));
        image.close().await.expect("closed");
    });
}
