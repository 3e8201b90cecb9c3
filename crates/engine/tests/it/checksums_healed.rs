//! What a disk has changed is read from the backing file, if that has what was there.

use std::sync::Arc;

use parking_lot::Mutex;
use vellum::gate::{DenyAll, FileRequest, Gate};
use vellum::qcow2::checksums::{ChecksumOptions, ScrubReport};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, Messages, OpenOptions, Qcow2};
use vellum::raw::{Raw, RawOptions};
use vellum::{BlockDevice, Buffer, ErrorKind, Io, RequestFlags, Storage};
use vellum_io::Buffers;
use vellum_io::lane::block_on;
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};
use vellum_storage::{MemStorage, WriteFlags};

const SIZE_BYTES: u64 = 1 << 20;

/// An image over a backing file full of fives, with its checksums.
struct Disk {
    image: Arc<MemStorage>,
    sums: Arc<MemStorage>,
    below: Arc<MemStorage>,
    said: Arc<Mutex<Vec<String>>>,
}

#[derive(Debug)]
struct Beside(Arc<MemStorage>);

impl Gate for Beside {
    fn open_backing(&self, request: FileRequest) -> Io<Arc<dyn BlockDevice>> {
        DenyAll.open_backing(request)
    }

    fn open_data_file(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        DenyAll.open_data_file(request)
    }

    fn open_checksums(&self, _request: FileRequest) -> Io<Arc<dyn Storage>> {
        Io::ready(Ok(self.0.clone()))
    }
}

fn one(buffer: Buffer) -> Buffers {
    Buffers::from_iter([buffer])
}

impl Disk {
    /// The first clusters hold fives too, but for the first sector.
    async fn new(cluster_bits: u32) -> Disk {
        let disk = Disk {
            image: Arc::new(MemStorage::new()),
            sums: Arc::new(MemStorage::new()),
            below: Arc::new(MemStorage::with_bytes(vec![5; SIZE_BYTES as usize])),
            said: Arc::default(),
        };
        let options = CreateOptions::default()
            .size_bytes(SIZE_BYTES)
            .cluster_size_bytes(1 << cluster_bits);
        create(disk.image.clone(), None, &options).await.unwrap();
        let image = disk.open(false).await;
        write(&image, 0, 512, 6).await;
        write(&image, 512, 131_072 - 512, 5).await;
        image.close().await.unwrap();
        disk
    }

    fn options(&self, read_only: bool) -> OpenOptions {
        let raw = Raw::open(self.below.clone(), RawOptions::default().read_only(true));
        let said = self.said.clone();
        OpenOptions::default()
            .backing(Backing::Given(raw.unwrap()))
            .read_only(read_only)
            .messages(Messages::to(move |line| said.lock().push(line.to_owned())))
            .checksums(Some(ChecksumOptions::Keep {
                storage: self.sums.clone(),
                name: "disk.vsums".to_owned(),
            }))
    }

    async fn open_over(&self, file: Arc<dyn Storage>, options: OpenOptions) -> Arc<Qcow2> {
        let gate = Arc::new(Beside(self.sums.clone()));
        Qcow2::open(file, gate, options).await.unwrap()
    }

    async fn open(&self, read_only: bool) -> Arc<Qcow2> {
        self.open_over(self.image.clone(), self.options(read_only))
            .await
    }

    /// Changes a byte of what the guest has at an offset.
    async fn damage(&self, image: &Qcow2, guest: u64) {
        let at = host_of(image, guest).await;
        self.image.damage(at, &[0xaa]);
    }

    fn said(&self) -> Vec<String> {
        std::mem::take(&mut *self.said.lock())
    }
}

/// Where the image's file has what the guest has at an offset.
async fn host_of(image: &Qcow2, guest: u64) -> u64 {
    let extent = image.block_status(guest, 512, u32::MAX).await.unwrap();
    extent.host.expect("it is data").offset_bytes
}

async fn write(image: &Qcow2, at: u64, len: usize, byte: u8) {
    let bytes = Buffer::copy_of(&vec![byte; len]);
    let written = image.write(at, bytes, RequestFlags::default());
    written.await.unwrap();
}

async fn scrub(image: &Qcow2, repairs: bool, force: bool) -> ScrubReport {
    let mut scrub = image.scrub().unwrap();
    if force {
        scrub.assume_unmodified();
    }
    while scrub.step().await.unwrap() {}
    scrub.finish(repairs).await.unwrap()
}

async fn damaged_bytes(image: &Qcow2) -> u64 {
    scrub(image, false, false).await.damaged_bytes
}

#[test]
fn a_read_gets_what_the_backing_file_has_and_the_block_too() {
    for bits in [12, 16] {
        block_on(async {
            let disk = Disk::new(bits).await;
            let image = disk.open(false).await;
            for guest in [8192, 12_288 + 100, 90_000] {
                disk.damage(&image, guest).await;
            }
            // Inside of a block, and over many.
            let bytes = image.read(8192 + 10, Buffer::for_read(20)).await.unwrap();
            assert_eq!(bytes[..], [5; 20]);
            let said = disk.said();
            assert!(said[0].contains("is written to them again"), "{said:?}");
            assert_eq!(damaged_bytes(&image).await, 2 * 4096);
            let len = SIZE_BYTES as usize - 4096;
            let bytes = image.read(4096, Buffer::for_read(len)).await.unwrap();
            assert!(bytes.iter().all(|byte| *byte == 5));
            assert_eq!(damaged_bytes(&image).await, 0);
            assert!(!disk.said().is_empty());
            image.read(4096, Buffer::for_read(len)).await.unwrap();
            assert_eq!(disk.said(), <[String; 0]>::default());
            image.close().await.unwrap();
            assert_eq!(disk.sums_left().await, 0);
        });
    }
}

impl Disk {
    /// Damaged bytes, for who opens the image next.
    async fn sums_left(&self) -> u64 {
        let image = self.open(true).await;
        let damaged = damaged_bytes(&image).await;
        image.close().await.unwrap();
        damaged
    }
}

#[test]
fn what_the_backing_file_does_not_have_is_an_error() {
    block_on(async {
        let disk = Disk::new(16).await;
        let image = disk.open(false).await;
        disk.damage(&image, 100).await;
        disk.damage(&image, 4096).await;
        let error = image.read(0, Buffer::for_read(65536)).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.errno()),
            (ErrorKind::ChecksumMismatch, 5)
        );
        let other = one(Buffer::copy_of(&[4; 1]));
        let change = disk.below.write(4100, other, WriteFlags::default());
        change.await.unwrap();
        let error = image.read(4096, Buffer::for_read(512)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ChecksumMismatch);
        assert_eq!(damaged_bytes(&image).await, 8192);
        assert_eq!(disk.said(), <[String; 0]>::default());
        image.close().await.unwrap();
    });
}

/// QEMU commits into a backing file without clearing the bit of the checksums: what it has written is not
/// overwritten with what was there before.
#[test]
fn what_another_program_has_written_is_not_repaired() {
    block_on(async {
        let disk = Disk::new(16).await;
        let image = disk.open(true).await;
        let at = host_of(&image, 8192).await;
        image.close().await.unwrap();
        let newer = one(Buffer::copy_of(&[9; 4096]));
        let written = disk.image.write(at, newer, WriteFlags::default());
        written.await.unwrap();
        for read_only in [true, false, false] {
            let image = disk.open(read_only).await;
            let error = image.read(8192, Buffer::for_read(512)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ChecksumMismatch);
            assert!(error.to_string().contains("another program"), "{error}");
            // Also a session that writes elsewhere, and closes.
            if !read_only {
                write(&image, 65_536, 512, 7).await;
            }
            let report = scrub(&image, true, false).await;
            assert_eq!((report.left_bytes(), report.may_be_newer), (4096, true));
            image.close().await.unwrap();
        }
        let there = disk.image.snapshot();
        assert_eq!(there[at as usize..at as usize + 4096], [9; 4096]);
        // Somebody who knows better.
        let image = disk.open(false).await;
        let report = scrub(&image, true, true).await;
        assert_eq!((report.left_bytes(), report.may_be_newer), (0, false));
        image.close().await.unwrap();
        assert_eq!(disk.said(), <[String; 0]>::default());
    });
}

/// A program that was killed has not told when it wrote last; a scrub that finds nothing is as good.
#[test]
fn a_scrub_after_a_crash_has_reads_repaired_again() {
    block_on(async {
        let disk = Disk::new(16).await;
        let image = disk.open(false).await;
        let at = host_of(&image, 8192).await;
        drop(image);
        let image = disk.open(false).await;
        let report = scrub(&image, false, false).await;
        assert_eq!((report.damaged_bytes, report.may_be_newer), (0, false));
        image.close().await.unwrap();
        let image = disk.open(false).await;
        disk.image.damage(at, &[0xaa]);
        let bytes = image.read(8192, Buffer::for_read(512)).await.unwrap();
        assert!(bytes.iter().all(|byte| *byte == 5));
        image.close().await.unwrap();
    });
}

#[test]
fn an_image_that_is_only_read_is_not_changed() {
    block_on(async {
        let disk = Disk::new(16).await;
        let image = disk.open(true).await;
        disk.damage(&image, 8192).await;
        let before = disk.image.snapshot();
        for _ in 0..40 {
            let bytes = image.read(0, Buffer::for_read(65536)).await.unwrap();
            assert!(bytes[..512].iter().all(|byte| *byte == 6));
            assert!(bytes[512..].iter().all(|byte| *byte == 5));
        }
        assert!(disk.image.snapshot() == before);
        let said = disk.said();
        assert!(said[0].contains("they stay as they are"), "{said:?}");
        assert_eq!(said.len(), 16, "an image does not fill a log");
        image.close().await.unwrap();
    });
}

/// Layers below another image are read past their own requests where a chain is long.
#[test]
fn a_layer_of_a_long_chain_heals_its_reads() {
    block_on(async {
        let disk = Disk::new(16).await;
        let mut chain: Arc<dyn BlockDevice> = disk.open(true).await;
        let host = chain.block_status(8192, 512, 0).await.unwrap().host;
        for _ in 0..3 {
            let file = Arc::new(MemStorage::new());
            let options = CreateOptions::default().size_bytes(SIZE_BYTES);
            create(file.clone(), None, &options).await.unwrap();
            let options = OpenOptions::default()
                .backing(Backing::Given(chain))
                .read_only(true);
            chain = Qcow2::open(file, Arc::new(DenyAll), options).await.unwrap();
        }
        // The first time by the mapping, then by what is known of it.
        for at in [8192, 8192, 8200] {
            disk.image
                .damage(host.as_ref().unwrap().offset_bytes, &[0xaa]);
            let bytes = chain.read(at, Buffer::for_read(512)).await.unwrap();
            assert!(bytes.iter().all(|byte| *byte == 5));
        }
        chain.close().await.unwrap();
    });
}

/// What the guest writes beside the repair stays; a repair that fails costs the reader nothing.
#[test]
fn a_repair_undoes_no_newer_write() {
    for seed in 0..40 {
        block_on(async {
            let disk = Disk::new(16).await;
            let image = disk.open(false).await;
            disk.damage(&image, 8192).await;
            let reads = async {
                for _ in 0..seed % 5 {
                    vellum_io::lane::yield_now().await;
                }
                image.read(4096, Buffer::for_read(12_288)).await
            };
            let writes = async {
                for _ in 0..seed / 5 {
                    vellum_io::lane::yield_now().await;
                }
                write(&image, 8192, 4096, 9).await;
            };
            let (read, ()) = futures_util::join!(reads, writes);
            let read = read.unwrap();
            assert!(read[..4096].iter().all(|byte| *byte == 5));
            let byte = read[4096];
            assert!(byte == 5 || byte == 9);
            assert!(read[4096..8192].iter().all(|other| *other == byte));
            let bytes = image.read(8192, Buffer::for_read(4096)).await.unwrap();
            assert!(bytes.iter().all(|byte| *byte == 9), "seed {seed}");
            image.close().await.unwrap();
            assert_eq!(disk.sums_left().await, 0);
        });
    }
}

#[test]
fn a_repair_that_fails_costs_the_reader_nothing() {
    block_on(async {
        let disk = Disk::new(16).await;
        let faults = FaultStorage::new(disk.image.clone());
        let image = disk.open_over(faults.clone(), disk.options(false)).await;
        disk.damage(&image, 8192).await;
        faults.fail(Matching::operation(Operation::Write), 0, Times::Always, 28);
        let bytes = image.read(8192, Buffer::for_read(4096)).await.unwrap();
        assert!(bytes.iter().all(|byte| *byte == 5));
        let said = disk.said();
        assert!(said[0].contains("could not be written"), "{said:?}");
        faults.heal();
        assert_eq!(damaged_bytes(&image).await, 4096);
        // A change needs the rest of the cluster, which is healed as well.
        image
            .create_snapshot(vellum::qcow2::NewSnapshot::default())
            .await
            .unwrap();
        write(&image, 512, 512, 7).await;
        let bytes = image.read(8192, Buffer::for_read(4096)).await.unwrap();
        assert!(bytes.iter().all(|byte| *byte == 5));
        image.close().await.unwrap();
    });
}
