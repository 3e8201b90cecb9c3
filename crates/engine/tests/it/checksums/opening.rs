//! An opening that fails leaves image and checksums as they were.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use vellum::qcow2::checksums::{ChecksumOptions, name_of_checksums};
use vellum::qcow2::{OpenOptions, Qcow2, read_header};
use vellum::{BlockDevice, Buffer, ErrorKind, Result, Storage};
use vellum_io::lane::block_on;
use vellum_storage::{MemStorage, delegate};

use crate::checksums::disk::{Beside, Disk, Model, host_of};

/// Opens the image for writing with an option that is refused once the checksums were found.
async fn fail(disk: &Disk) {
    fail_with(disk, disk.keep()).await;
}

async fn fail_with(disk: &Disk, options: OpenOptions) {
    let options = options.data_file(Some(Arc::new(MemStorage::new())));
    let error = disk.open_with(options).await.unwrap_err();
    assert!(error.message().contains("data-file"), "{error}");
}

/// Whether the superblock says that the image was closed, and not modified since.
fn is_as_left(disk: &Disk) -> bool {
    let left_at = disk.sums.snapshot()[48..56].try_into().unwrap();
    disk.image.modified_at().unwrap() == Some(u64::from_be_bytes(left_at))
}

#[test]
fn sums_stay_as_they_were() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let mut model = Model::new();
        let image = disk.open().await;
        model.write(&image, 0..65536, 7).await;
        let host = host_of(&image, 0).await;
        image.close().await.unwrap();
        assert!(is_as_left(&disk));
        fail(&disk).await;
        assert!(is_as_left(&disk));
        let give_up = OpenOptions::default().checksums(Some(ChecksumOptions::GiveUp));
        fail_with(&disk, give_up).await;
        disk.flip(host + 100, 3).await;
        let image = disk.open_read_only().await;
        let read = image.read(0, Buffer::for_read(512)).await;
        let error = read.expect_err("the disk has changed it");
        assert_eq!(error.kind(), ErrorKind::ChecksumMismatch);
        image.close().await.unwrap();
    });
}

#[test]
fn no_image_gets_sums_that_nobody_uses() {
    block_on(async {
        let disk = Disk::new(16, false).await;
        let before = disk.image.snapshot();
        fail(&disk).await;
        let file: Arc<dyn Storage> = disk.image.clone();
        assert_eq!(name_of_checksums(&read_header(&file).await.unwrap()), None);
        assert_eq!(disk.sums.len_bytes().unwrap(), 0);
        assert!(disk.image.snapshot() == before);
        disk.open().await.close().await.unwrap();
        // The same where the file is known, and its sums do not count.
        vellum::qcow2::checksums::forget(&file).await.unwrap();
        fail(&disk).await;
        assert_eq!(name_of_checksums(&read_header(&file).await.unwrap()), None);
        disk.open().await.close().await.unwrap();
    });
}

/// A file whose time tells nothing for so many more questions.
#[derive(Debug)]
struct Clock {
    inner: Arc<MemStorage>,
    unknown: AtomicU32,
}

impl Storage for Clock {
    delegate!(
        inner: capabilities, name, len_bytes, read, write, write_zeroes, discard, flush, truncate, block_status
    );

    fn modified_at(&self) -> Result<Option<u64>> {
        let count = |left: u32| left.checked_sub(1);
        let is_known = self
            .unknown
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
        match is_known {
            Err(_) => self.inner.modified_at(),
            Ok(_) => Ok(None),
        }
    }
}

/// Right behind the last write a later change could have the same time: a close waits until it cannot, and leaves none
/// where there is none to have.
#[test]
fn a_close_leaves_a_time_that_no_later_change_has() {
    for (unknown, is_left) in [(0, true), (1, true), (u32::MAX, false)] {
        block_on(async {
            let disk = Disk::new(16, false).await;
            let file = Arc::new(Clock {
                inner: disk.image.clone(),
                unknown: AtomicU32::new(0),
            });
            let gate = Arc::new(Beside(disk.sums.clone()));
            let image = Qcow2::open(file.clone(), gate, disk.keep()).await.unwrap();
            Model::new().write(&image, 0..65536, 7).await;
            file.unknown.store(unknown, Ordering::Relaxed);
            image.close().await.unwrap();
            assert_eq!(is_as_left(&disk), is_left, "{unknown}");
        });
    }
}
