//! What an open image does when its metadata turns out to be damaged, or when it
//! cannot be written.

use std::sync::{Arc, Mutex};

use crate::common::run_on_memory as run;
use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Messages, Metadata, OpenOptions, OverlapChecks, Qcow2, read_header};
use vellum::{BlockDevice, Buffer, Error, ErrorKind, RequestFlags, Storage};
use vellum_format::features::Incompatible;
use vellum_io::Buffers;
use vellum_storage::{MemStorage, WriteFlags};

const CLUSTER: u64 = 65536;

async fn new_image(options: CreateOptions) -> Arc<dyn Storage> {
    let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    create(file.clone(), None, &options).await.unwrap();
    file
}

async fn open(file: &Arc<dyn Storage>, read_only: bool) -> Result<Arc<Qcow2>, Error> {
    let options = OpenOptions::default().read_only(read_only);
    Qcow2::open(file.clone(), Arc::new(DenyAll), options).await
}

async fn put(file: &Arc<dyn Storage>, offset: u64, bytes: &[u8]) {
    let buffers = Buffers::from_iter([Buffer::copy_of(bytes)]);
    file.write(offset, buffers, WriteFlags::default())
        .await
        .unwrap();
}

async fn write(image: &Qcow2, offset: u64) -> Result<Buffer, Error> {
    image
        .write(offset, Buffer::zeroed(512), RequestFlags::default())
        .await
}

/// An image with one written cluster whose L2 entry is then made unaligned.
async fn damaged() -> Arc<dyn Storage> {
    let size_bytes = 16 * CLUSTER;
    let file = new_image(CreateOptions::default().size_bytes(size_bytes)).await;
    let image = open(&file, false).await.unwrap();
    write(&image, 0).await.unwrap();
    image.close().await.unwrap();
    let header = read_header(&file).await.unwrap();
    let l1 = file.read(
        header.l1_table_offset.bytes(),
        Buffers::from_iter([Buffer::zeroed(8)]),
    );
    let entry = Buffer::join_all(l1.await.unwrap());
    let l2 = u64::from_be_bytes(entry[..8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00;
    put(&file, l2, &(1 << 63 | 0x50200_u64).to_be_bytes()).await;
    file
}

#[test]
fn damage_found_while_writing_marks_the_image_and_stops_writes() {
    run(async {
        let file = damaged().await;
        let image = open(&file, false).await.unwrap();
        let error = write(&image, 0).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("0x50200"), "{error}");
        assert!(
            write(&image, 5 * CLUSTER).await.is_err(),
            "writes are stopped"
        );
        let sound = image.read(5 * CLUSTER, Buffer::for_read(512)).await;
        assert!(sound.is_ok(), "what is not damaged can still be read");
        let header = read_header(&file).await.unwrap();
        assert!(header.incompatible.contains(Incompatible::CORRUPT));
        let refused = open(&file, false).await.unwrap_err();
        assert_eq!(
            refused.message(),
            "qcow2: Image is corrupt; cannot be opened read/write"
        );
        open(&file, true).await.expect("read-only is allowed");
    });
}

#[test]
fn damage_found_while_reading_only_leaves_the_file_alone() {
    run(async {
        let file = damaged().await;
        let image = open(&file, true).await.unwrap();
        let error = image.read(0, Buffer::for_read(512)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        let header = read_header(&file).await.unwrap();
        assert!(!header.incompatible.contains(Incompatible::CORRUPT));
    });
}

#[test]
fn requests_beyond_the_end_are_refused() {
    run(async {
        let size_bytes = 3 * 512;
        let file = new_image(CreateOptions::default().size_bytes(size_bytes)).await;
        let image = open(&file, false).await.unwrap();
        for offset in [1025, 1536, u64::MAX] {
            let error = write(&image, offset).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OutOfRange, "{offset}");
            let error = image.read(offset, Buffer::for_read(512)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OutOfRange, "{offset}");
            assert!(image.discard(offset, 512).await.is_err());
            assert!(
                image
                    .write_zeroes(offset, 512, Default::default())
                    .await
                    .is_err()
            );
            assert!(image.block_status(offset, 512, 0).await.is_err());
        }
        write(&image, 1024).await.expect("the last sector");
    });
}

#[test]
fn a_closed_image_refuses_changes() {
    run(async {
        let size_bytes = CLUSTER;
        let file = new_image(CreateOptions::default().size_bytes(size_bytes)).await;
        let image = open(&file, false).await.unwrap();
        image.close().await.unwrap();
        assert!(write(&image, 0).await.is_err());
    });
}

#[test]
fn clusters_of_refcount_blocks_are_never_handed_out() {
    run(async {
        let size_bytes = 16 * CLUSTER;
        let file = new_image(CreateOptions::default().size_bytes(size_bytes)).await;
        let header = read_header(&file).await.unwrap();
        let table = header.refcount_table_offset.bytes();
        let entry = file.read(table, Buffers::from_iter([Buffer::zeroed(8)]));
        let entry = Buffer::join_all(entry.await.unwrap());
        let block = u64::from_be_bytes(entry[..8].try_into().unwrap());
        put(&file, block + block / CLUSTER * 2, &[0, 0]).await;
        let image = open(&file, false).await.unwrap();
        let error = write(&image, 0).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(
            write(&image, 5 * CLUSTER).await.is_err(),
            "writes are stopped"
        );
        let header = read_header(&file).await.unwrap();
        assert!(header.incompatible.contains(Incompatible::CORRUPT));
    });
}

/// Where an L1 table leads, and where its first L2 table does.
async fn tables(file: &Arc<dyn Storage>) -> (u64, u64) {
    let header = read_header(file).await.unwrap();
    let l1 = header.l1_table_offset.bytes();
    let read = file.read(l1, Buffers::from_iter([Buffer::zeroed(8)]));
    let entry = Buffer::join_all(read.await.unwrap());
    let l2 = u64::from_be_bytes(entry[..8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00;
    (l1, l2)
}

/// An image whose clusters 0 to 3 are written, the first L2 entry of which then leads
/// to `target`, told from the places of the L1 and L2 table.
async fn misled(target: impl Fn(u64, u64) -> u64) -> Arc<dyn Storage> {
    let size_bytes = 16 * CLUSTER;
    let file = new_image(CreateOptions::default().size_bytes(size_bytes)).await;
    let image = open(&file, false).await.unwrap();
    for cluster in 0..4 {
        write(&image, cluster * CLUSTER).await.unwrap();
    }
    image.close().await.unwrap();
    let (l1, l2) = tables(&file).await;
    put(&file, l2, &(1 << 63 | target(l1, l2)).to_be_bytes()).await;
    file
}

#[test]
fn writes_that_would_hit_metadata_are_refused_and_reported_once() {
    run(async {
        let file = misled(|l1, _| l1).await;
        let said: Arc<Mutex<Vec<String>>> = Arc::default();
        let sink = said.clone();
        let options = OpenOptions::default().messages(Messages::to(move |line| {
            sink.lock().unwrap().push(line.to_owned())
        }));
        let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options);
        let image = opened.await.unwrap();
        write(&image, CLUSTER).await.expect("others are fine");
        let zeroes = image.write_zeroes(0, 4096, Default::default()).await;
        assert_eq!(zeroes.unwrap_err().kind(), ErrorKind::Corrupt);
        let refused = write(&image, CLUSTER).await.unwrap_err();
        assert_eq!(refused.errno(), 123, "no medium: {refused}");
        assert_eq!(
            *said.lock().unwrap(),
            [
                "qcow2: Marking image as corrupt: Preventing invalid write on metadata (overlaps \
                 with active L1 table); further corruption events will be suppressed"
            ]
        );
        let header = read_header(&file).await.unwrap();
        assert!(header.incompatible.contains(Incompatible::CORRUPT));
        let (_, l2) = tables(&file).await;
        assert!(l2 > 0, "the L1 table is as it was");
    });
}

#[test]
fn checks_that_are_switched_off_refuse_nothing() {
    run(async {
        let file = misled(|_, l2| l2).await;
        let options = OpenOptions::default()
            .overlap_checks(OverlapChecks::CACHED.with(Metadata::ActiveL2, false));
        let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options);
        let image = opened.await.unwrap();
        let far = 4096;
        let written = image.write(far, Buffer::zeroed(512), RequestFlags::default());
        written.await.expect("nobody objects");
    });
}

#[test]
fn a_table_that_a_freed_cluster_held_is_forgotten() {
    run(async {
        let size_bytes = 1 << 30;
        let cluster_size_bytes = 512;
        let file = new_image(
            CreateOptions::default()
                .size_bytes(size_bytes)
                .cluster_size_bytes(cluster_size_bytes),
        )
        .await;
        let options = OpenOptions::default().discard(true);
        let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options);
        let image = opened.await.unwrap();
        // L2 tables come and go with the end of the disk; data takes their clusters.
        for round in 0..8 {
            image.resize(1 << 30, Default::default()).await.unwrap();
            for table in 0..20 {
                write(&image, (1 << 29) + table * 32768).await.unwrap();
            }
            image.flush().await.unwrap();
            image.resize(1 << 28, Default::default()).await.unwrap();
            let data = image.write(round * 8192, Buffer::zeroed(8192), RequestFlags::default());
            data.await.expect("room that a table had");
        }
        image.close().await.unwrap();
    });
}
