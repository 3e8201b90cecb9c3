//! A copy of an image file that was made while the image was in use is not taken for the image that
//! the checksums are of, and a close that fails or is killed leaves an image with its checksums.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use vellum::gate::DenyAll;
use vellum::qcow2::checksums::ChecksumOptions;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::seal::{SealOptions, VerifyOptions};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Buffers, Error, ErrorKind, Io, RequestFlags, Result, Storage};
use vellum_io::lane::block_on;
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};
use vellum_storage::{MemStorage, WriteFlags, ZeroFlags, delegate};

const SIZE_BYTES: u64 = 8 << 20;

fn options(sums: Arc<dyn Storage>) -> OpenOptions {
    OpenOptions::default()
        .backing(Backing::None)
        .checksums(Some(ChecksumOptions::Keep {
            storage: sums,
            name: "disk.vsums".to_owned(),
        }))
}

async fn open(file: Arc<dyn Storage>, sums: Arc<dyn Storage>) -> Result<Arc<Qcow2>> {
    Qcow2::open(file, Arc::new(DenyAll), options(sums)).await
}

async fn new_image() -> Arc<MemStorage> {
    let file = Arc::new(MemStorage::new());
    let options = CreateOptions::default().size_bytes(SIZE_BYTES);
    create(file.clone(), None, &options).await.unwrap();
    file
}

async fn write(image: &Qcow2, at: u64, byte: u8) {
    let bytes = Buffer::copy_of(&[byte; 4096]);
    let written = image.write(at, bytes, RequestFlags::default());
    written.await.unwrap();
}

async fn read(image: &Qcow2, at: u64) -> u8 {
    let bytes = image.read(at, Buffer::for_read(4096)).await.unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

#[test]
fn a_copy_from_a_session_is_refused_beside_newer_checksums() {
    // The session that made the checksums, and a later one.
    for sessions in [0, 1, 2] {
        block_on(async {
            let (file, sums) = (new_image().await, Arc::new(MemStorage::new()));
            for _ in 0..sessions {
                let image = open(file.clone(), sums.clone()).await.unwrap();
                write(&image, 0, 1).await;
                image.close().await.unwrap();
            }
            let image = open(file.clone(), sums.clone()).await.unwrap();
            write(&image, 0, 2).await;
            image.flush().await.unwrap();
            let copy = Arc::new(MemStorage::with_bytes(file.snapshot()));
            write(&image, 0, 3).await;
            image.close().await.unwrap();
            for read_only in [true, false] {
                let options = options(sums.clone()).read_only(read_only);
                let opened = Qcow2::open(copy.clone(), Arc::new(DenyAll), options).await;
                let error = opened.map(drop).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidImage);
                assert!(error.to_string().contains("not the checksums of the image"));
            }
            let image = open(file, sums).await.unwrap();
            assert_eq!(read(&image, 0).await, 3);
            image.close().await.unwrap();
        });
    }
}

/// What was only read, or opened for nothing, is still what its copy is.
#[test]
fn a_session_without_changes_has_no_close_to_write() {
    block_on(async {
        let (file, sums) = (new_image().await, Arc::new(MemStorage::new()));
        let image = open(file.clone(), sums.clone()).await.unwrap();
        write(&image, 0, 2).await;
        image.close().await.unwrap();
        let image = open(file.clone(), sums.clone()).await.unwrap();
        let copy = Arc::new(MemStorage::with_bytes(file.snapshot()));
        assert_eq!(read(&image, 0).await, 2);
        image.close().await.unwrap();
        let image = open(copy, sums).await.unwrap();
        assert_eq!(read(&image, 0).await, 2);
        image.close().await.unwrap();
    });
}

/// Whichever request of a close is the last that is done, or the only one that fails.
#[test]
fn a_close_that_fails_anywhere_leaves_an_image_with_its_checksums() {
    for times in [Times::Once, Times::Always] {
        for operation in [Operation::Write, Operation::Flush] {
            for of_the_image in [true, false] {
                let mut pass = 0;
                while block_on(close_failing(of_the_image, operation, pass, times)) {
                    pass += 1;
                }
                assert!(pass > 0, "some request of a close failed");
            }
        }
    }
}

/// Whether something has failed.
async fn close_failing(of_image: bool, operation: Operation, pass: usize, times: Times) -> bool {
    let (file, sums) = (new_image().await, Arc::new(MemStorage::new()));
    let (faulty_file, faulty_sums) = (
        FaultStorage::new(file.clone()),
        FaultStorage::new(sums.clone()),
    );
    let image = open(faulty_file.clone(), faulty_sums.clone()).await;
    let image = image.unwrap();
    write(&image, 0, 2).await;
    write(&image, 5 << 20, 4).await;
    image.flush().await.unwrap();
    let faults = match of_image {
        true => faulty_file,
        false => faulty_sums,
    };
    faults.fail(Matching::operation(operation), pass, times, 5);
    let closed = image.close().await;
    drop(image);
    for read_only in [true, false] {
        let options = options(sums.clone()).read_only(read_only);
        let image = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
        let image = image.unwrap_or_else(|error| panic!("{operation:?} {pass}: {error}"));
        assert_eq!(read(&image, 0).await, 2);
        assert_eq!(read(&image, 5 << 20).await, 4);
        image.close().await.unwrap();
    }
    closed.is_err()
}

/// Flushes of the files of one disk.
#[derive(Debug, Default)]
struct Flushes {
    done: AtomicUsize,
    /// The numbers of those that fail.
    failing: Mutex<Range<usize>>,
}

/// What a disk has durably, beside what it shows. What a flush that failed was for no later one is for.
#[derive(Debug)]
struct Cached {
    inner: Arc<MemStorage>,
    durable: Mutex<Vec<u8>>,
    written: Mutex<Vec<Range<usize>>>,
    flushes: Arc<Flushes>,
}

impl Cached {
    fn new(inner: Arc<MemStorage>, flushes: &Arc<Flushes>) -> Arc<Cached> {
        Arc::new(Cached {
            durable: Mutex::new(inner.snapshot()),
            inner,
            written: Mutex::default(),
            flushes: flushes.clone(),
        })
    }

    /// What is there after a power cut.
    fn cut(&self) -> Arc<MemStorage> {
        Arc::new(MemStorage::with_bytes(self.durable.lock().clone()))
    }

    fn note(&self, range: Range<u64>) {
        self.written
            .lock()
            .push(range.start as usize..range.end as usize);
    }
}

impl Storage for Cached {
    delegate!(
        inner: capabilities, name, len_bytes, modified_at, read, block_status
    );

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let len: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        self.note(offset_bytes..offset_bytes + len as u64);
        self.inner.write(offset_bytes, buffers, flags)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        self.note(offset_bytes..offset_bytes + len_bytes);
        self.inner.write_zeroes(offset_bytes, len_bytes, flags)
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        self.durable.lock().resize(len_bytes as usize, 0);
        self.inner.truncate(len_bytes)
    }

    fn flush(&self) -> Io<()> {
        let number = self.flushes.done.fetch_add(1, Ordering::Relaxed);
        let written = std::mem::take(&mut *self.written.lock());
        if self.flushes.failing.lock().contains(&number) {
            let error = Error::new(ErrorKind::Io, "flush", "broken").with_errno(5);
            return Io::ready(Err(error));
        }
        let now = self.inner.snapshot();
        let mut durable = self.durable.lock();
        durable.resize(now.len(), 0);
        for range in written {
            let range = range.start.min(now.len())..range.end.min(now.len());
            durable[range.clone()].copy_from_slice(&now[range]);
        }
        Io::ready(Ok(()))
    }
}

/// A header or superblock that was written, and that never became durable, is no previous one.
#[test]
fn a_power_cut_behind_a_failed_close_leaves_an_image_with_its_checksums() {
    for pass in 0.. {
        let has_failed = block_on(async {
            let (file, sums) = (new_image().await, Arc::new(MemStorage::new()));
            let image = open(file.clone(), sums.clone()).await.unwrap();
            image.close().await.unwrap();
            let flushes = Arc::<Flushes>::default();
            let (disk, sums) = (Cached::new(file, &flushes), Cached::new(sums, &flushes));
            let image = open(disk.clone(), sums.clone()).await.unwrap();
            write(&image, 0, 2).await;
            image.flush().await.unwrap();
            let done = flushes.done.load(Ordering::Relaxed);
            *flushes.failing.lock() = done + pass..done + pass + 1;
            let closed = image.close().await;
            for flush in 0..8 {
                let next = flushes.done.load(Ordering::Relaxed) + flush;
                *flushes.failing.lock() = next..usize::MAX;
                drop(open(disk.clone(), sums.clone()).await);
                let options = options(sums.cut()).read_only(true);
                let opened = Qcow2::open(disk.cut(), Arc::new(DenyAll), options).await;
                let image = opened.unwrap_or_else(|error| panic!("{pass}, {flush}: {error}"));
                assert_eq!(read(&image, 0).await, 2);
                image.close().await.unwrap();
            }
            let image = open(disk.cut(), sums.cut()).await.unwrap();
            assert_eq!(read(&image, 0).await, 2);
            image.close().await.unwrap();
            closed.is_err()
        });
        if !has_failed {
            assert!(pass > 1, "some flush of a close failed");
            return;
        }
    }
}

/// A full file system of the checksums is not taken for one of the image.
#[test]
fn errors_of_the_checksums_name_their_file() {
    block_on(async {
        let (file, sums) = (new_image().await, Arc::new(MemStorage::new()));
        let faults = FaultStorage::new(sums.clone());
        let image = open(file.clone(), faults.clone()).await.unwrap();
        write(&image, 0, 1).await;
        image.close().await.unwrap();
        faults.fail(Matching::operation(Operation::Write), 0, Times::Always, 28);
        let opened = open(file, faults).await;
        let error = opened.map(drop).unwrap_err();
        let expected = format!("The checksums in '{}' cannot be written", sums.name());
        assert!(error.to_string().contains(&expected), "{error}");
        assert_eq!((error.kind(), error.errno()), (ErrorKind::NoSpace, 28));
    });
}

/// The header that a seal vouches for stays as it is.
#[test]
fn a_sealed_image_keeps_its_identity() {
    block_on(async {
        let (file, sums) = (new_image().await, Arc::new(MemStorage::new()));
        let image = open(file.clone(), sums.clone()).await.unwrap();
        write(&image, 0, 2).await;
        image.seal(SealOptions::default()).await.unwrap();
        image.close().await.unwrap();
        let options = options(sums).read_only(true);
        let image = Qcow2::open(file, Arc::new(DenyAll), options).await.unwrap();
        assert_eq!(read(&image, 0).await, 2);
        let report = image.verify(VerifyOptions::default()).await.unwrap();
        assert_eq!(report.differences, 0);
        image.close().await.unwrap();
    });
}
