//! Images on storages of fixed length, as block devices and NBD exports are: what is laid out at
//! creation, and features that need clusters of their own, leave room for all of the disk.

use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::nodes::DeviceStorage;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{BitmapOptions, DirtyBitmap, NewBitmap, OpenOptions, Qcow2, WriteLogOptions};
use vellum::{BlockDevice, Buffer, Buffers, ErrorKind, Raw, RawOptions, RequestFlags, Storage};
use vellum_storage::{MemStorage, WriteFlags};

use crate::common::run_on_memory as run;

const MIB: u64 = 1 << 20;

/// Memory that reads as anything where nothing was written, as a block device does.
fn device(len_bytes: u64) -> Arc<MemStorage> {
    Arc::new(MemStorage::with_bytes(vec![0xcc; len_bytes as usize]))
}

/// A storage that keeps its length. An image that is closed closes it, but not what is below.
fn fixed(memory: &Arc<MemStorage>) -> Arc<dyn Storage> {
    let len_bytes = memory.len_bytes().expect("it is in memory");
    let window = RawOptions::default().size_bytes(Some(len_bytes));
    let raw = Raw::open(memory.clone(), window).expect("whole sectors");
    let storage = DeviceStorage::new(raw);
    assert!(!storage.capabilities().growable);
    storage
}

async fn open(storage: &Arc<dyn Storage>, options: OpenOptions) -> vellum::Result<Arc<Qcow2>> {
    Qcow2::open(storage.clone(), Arc::new(DenyAll), options).await
}

/// Writes all of a disk, in order.
async fn fill(image: &Qcow2) {
    const CHUNK: u64 = 64 << 10;
    for at in (0..image.size_bytes()).step_by(CHUNK as usize) {
        let mut bytes = Buffer::zeroed(CHUNK.min(image.size_bytes() - at) as usize);
        bytes.fill((at / CHUNK % 251) as u8 + 1);
        let written = image.write(at, bytes, RequestFlags::default()).await;
        written.unwrap_or_else(|error| panic!("at {at:#x}: {error}"));
    }
}

async fn assert_clean(storage: Arc<MemStorage>) {
    let report = check(storage, &CheckOptions::default()).await;
    let report = report.expect("it can be checked");
    assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?}");
}

#[test]
fn a_disk_of_small_clusters_fits_and_its_refcount_table_stays() {
    for (cluster, bits, size) in [
        (512, 16, 12 * MIB),
        (512, 64, 4 * MIB),
        (1024, 64, 20 * MIB),
    ] {
        run(async move {
            let options = CreateOptions::default()
                .size_bytes(size)
                .cluster_size_bytes(cluster)
                .refcount_bits(bits);
            let memory = device(options.full_size_bytes().unwrap());
            let storage = fixed(&memory);
            create(storage.clone(), None, &options).await.unwrap();
            let image = open(&storage, OpenOptions::default()).await.unwrap();
            let table = image.header().refcount_table_offset;
            assert!(image.header().refcount_table_clusters > 1);
            fill(&image).await;
            image.flush().await.unwrap();
            assert_eq!(image.header().refcount_table_offset, table);
            image.close().await.unwrap();
            assert_clean(memory).await;
        });
    }
}

/// As QEMU makes them: with a refcount table of one cluster, which has to grow.
#[test]
fn a_disk_fits_whose_refcount_table_was_made_short() {
    run(async {
        let options = CreateOptions::default()
            .size_bytes(8_280_064)
            .cluster_size_bytes(512)
            .refcount_bits(32);
        let memory = device(options.full_size_bytes().unwrap());
        let made = Arc::new(MemStorage::new());
        create(made.clone(), None, &options).await.unwrap();
        let made_bytes = Buffer::zeroed(made.len_bytes().unwrap() as usize);
        let made = made
            .read(0, Buffers::from_iter([made_bytes]))
            .await
            .unwrap();
        memory.write(0, made, WriteFlags::default()).await.unwrap();
        let storage = fixed(&memory);
        let image = open(&storage, OpenOptions::default()).await.unwrap();
        assert_eq!(image.header().refcount_table_clusters, 1);
        fill(&image).await;
        image.close().await.unwrap();
        let image = open(&fixed(&memory), OpenOptions::default()).await.unwrap();
        assert_eq!(image.header().refcount_table_clusters, 3);
        image.close().await.unwrap();
        assert_clean(memory).await;
    });
}

/// Every second granule: no cluster of bits is all zeroes or all ones.
fn stripes(size_bytes: u64, granularity_bytes: u64) -> Vec<std::ops::Range<u64>> {
    (0..size_bytes)
        .step_by(2 * granularity_bytes as usize)
        .map(|at| at..at + granularity_bytes)
        .collect()
}

/// `convert --bitmaps` into as much as `measure` counts.
#[test]
fn bitmaps_that_are_added_together_take_what_measure_counts() {
    const GRANULARITY: u64 = 512;
    run(async {
        // 4 KiB of bits in each bitmap, and tables of one cluster.
        let options = CreateOptions::default()
            .size_bytes(16 * MIB)
            .cluster_size_bytes(4096);
        let source = Arc::new(MemStorage::new());
        create(source.clone(), None, &options).await.unwrap();
        let source: Arc<dyn Storage> = source;
        let source = open(&source, OpenOptions::default()).await.unwrap();
        let granularity = BitmapOptions::default()
            .granularity_bytes(Some(GRANULARITY))
            .disabled(true);
        source
            .bitmaps()
            .add("a", granularity.clone())
            .await
            .unwrap();
        let ranges = stripes(16 * MIB, GRANULARITY);
        source.bitmaps().set("a", ranges.clone()).await.unwrap();
        let content = source.bitmaps().read("a").await.unwrap();

        let count = 3;
        let bits_clusters = 16 * MIB / GRANULARITY / 8 / 4096;
        let bitmaps_bytes = 4096 * (count * (bits_clusters + 1) + 1);
        let memory = device(options.full_size_bytes().unwrap() + bitmaps_bytes);
        let storage = fixed(&memory);
        create(storage.clone(), None, &options).await.unwrap();
        let image = open(&storage, OpenOptions::default()).await.unwrap();
        fill(&image).await;
        image.flush().await.unwrap();
        let add = |name: &str, content: &DirtyBitmap| {
            NewBitmap::new(name, granularity.clone()).content(content.clone())
        };
        let taken = image.bitmaps().add_all(vec![
            add("a", &content),
            add("b", &content),
            add("c", &content),
        ]);
        taken.await.unwrap();
        for name in ["a", "b", "c"] {
            let read = image.bitmaps().read(name).await.unwrap();
            assert_eq!(read.ranges().collect::<Vec<_>>(), ranges, "{name}");
        }
        image.close().await.unwrap();
        assert_clean(memory).await;
        source.close().await.unwrap();
    });
}

#[test]
fn bitmaps_are_added_all_or_none() {
    run(async {
        let options = CreateOptions::default().size_bytes(MIB);
        let memory = Arc::new(MemStorage::new());
        let file: Arc<dyn Storage> = memory.clone();
        create(file.clone(), None, &options).await.unwrap();
        let image = open(&file, OpenOptions::default()).await.unwrap();
        let new = |name: &str| NewBitmap::new(name, BitmapOptions::default());
        let other_size = DirtyBitmap::all_dirty(2 * MIB, 65536);
        for refused in [
            vec![new("a"), new("a")],
            vec![new("a"), new("")],
            vec![new("a"), new("b").content(other_size)],
        ] {
            let error = image.bitmaps().add_all(refused).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(image.bitmaps().list().await.unwrap().is_empty());
        }
        let all = DirtyBitmap::all_dirty(MIB, 65536);
        let both = vec![new("a"), new("b").content(all)];
        image.bitmaps().add_all(both).await.unwrap();
        // Both record writes.
        let byte = Buffer::zeroed(512);
        image.write(0, byte, RequestFlags::default()).await.unwrap();
        let dirty = |name| {
            let read = image.bitmaps().read(name);
            async { read.await.unwrap().dirty_bytes() }
        };
        assert_eq!((dirty("a").await, dirty("b").await), (65536, MIB));
        image.close().await.unwrap();
        assert_clean(memory).await;
    });
}

#[test]
fn a_write_log_is_as_long_as_a_small_device() {
    run(async {
        let options = CreateOptions::default().size_bytes(MIB);
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        create(file.clone(), None, &options).await.unwrap();
        let empty = |len: u64| fixed(&Arc::new(MemStorage::with_bytes(vec![0; len as usize])));
        // Not a whole number of blocks.
        let log = WriteLogOptions::new(empty(2 * MIB + 512), "log");
        let with_log = OpenOptions::default().write_log(Some(log));
        let image = open(&file, with_log).await.unwrap();
        let usage = image.write_log_usage().expect("there is a log");
        assert!((MIB..2 * MIB).contains(&usage.capacity_bytes), "{usage:?}");
        let byte = Buffer::zeroed(512);
        image.write(0, byte, RequestFlags::default()).await.unwrap();
        image.flush().await.unwrap();
        image.close().await.unwrap();

        let log = WriteLogOptions::new(empty(64 << 10), "log");
        let too_short = OpenOptions::default().write_log(Some(log));
        let refused = open(&file, too_short).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{refused}");
    });
}
