//! A disk that is full now and then: whatever fails for want of room must leave
//! nothing behind. After room was made and the image closed, no cluster is leaked,
//! and every write that succeeded is there. What needs no room goes on meanwhile, and what the
//! guest gives back is room for what it writes next.

use std::sync::Arc;

use crate::common::{Random, fill_disk, run_on_memory as run};
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{
    Backing, BitmapOptions, CacheOptions, NewSnapshot, OpenOptions, PreallocateAhead, Qcow2,
    WriteLogOptions,
};
use vellum::{
    BlockDevice, Buffer, Buffers, ErrorKind, Preallocation, Raw, RawOptions, RequestFlags, Storage,
    ZeroRequest,
};
use vellum_storage::wrap::{FaultStorage, Matching, Operation, SmallStorage, Times};
use vellum_storage::{MemStorage, WriteFlags};

const CLUSTER_BYTES: u64 = 512;
const BLOCKS: u64 = 4000;

/// What a cluster of the guest may hold.
type Model = Vec<Vec<u8>>;

async fn request(image: &Qcow2, random: &mut Random, model: &mut Model) {
    let first = random.below(BLOCKS);
    let count = (random.below(8) + 1).min(BLOCKS - first);
    let (offset, len) = (first * CLUSTER_BYTES, count * CLUSTER_BYTES);
    let (result, value) = match random.below(11) {
        0 => (image.discard(offset, len).await, 0),
        1 => {
            let zero = ZeroRequest::default().may_unmap(true);
            (image.write_zeroes(offset, len, zero).await, 0)
        }
        2 => (image.flush().await, 0),
        kind => {
            let value = random.below(255) as u8 + 1;
            let mut buffer = Buffer::zeroed(len as usize);
            buffer.fill(value);
            let flags = RequestFlags::default();
            let written = match kind {
                3..=5 => image.write_compressed(offset, buffer, flags),
                _ => image.write(offset, buffer, flags),
            };
            (written.await.map(drop), value)
        }
    };
    let touched = &mut model[first as usize..(first + count) as usize];
    match result {
        Ok(()) if value == 0 => touched.iter_mut().for_each(|seen| seen.push(0)),
        Ok(()) => touched.iter_mut().for_each(|seen| *seen = vec![value]),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            touched.iter_mut().for_each(|seen| seen.push(value));
        }
    }
}

async fn scenario(seed: u64) {
    let mut random = Random::new(seed);
    let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = CreateOptions::default()
        .size_bytes(BLOCKS * CLUSTER_BYTES)
        .cluster_size_bytes(CLUSTER_BYTES)
        .refcount_bits(64);
    create(memory.clone(), None, &options).await.unwrap();
    let file = FaultStorage::new(memory.clone());
    let options = OpenOptions::default()
        .cache(
            CacheOptions::default()
                .l2_cache_size_bytes(Some(2048))
                .refcount_cache_size_bytes(Some(2048)),
        )
        .ahead(
            PreallocateAhead::default()
                .after_clusters(random.below(100))
                .max_bytes(CLUSTER_BYTES << random.below(8)),
        )
        .discard(true);
    let image = Qcow2::open(file.clone(), Arc::new(DenyAll), options)
        .await
        .unwrap();
    let mut model: Model = vec![vec![0]; BLOCKS as usize];
    for _ in 0..25 {
        if random.below(2) == 0 {
            fill_disk(&file, &mut random);
        }
        for _ in 0..40 {
            request(&image, &mut random, &mut model).await;
        }
        file.heal();
    }
    let all = image
        .read(0, Buffer::for_read((BLOCKS * CLUSTER_BYTES) as usize))
        .await
        .unwrap();
    for (cluster, bytes) in all.chunks(CLUSTER_BYTES as usize).enumerate() {
        let allowed = &model[cluster];
        assert!(
            allowed
                .iter()
                .any(|value| bytes.iter().all(|byte| byte == value)),
            "cluster {cluster} holds {:?}, which is none of {allowed:?}",
            &bytes[..4]
        );
    }
    image.close().await.unwrap();
    let options = CheckOptions::default()
        .on_finding(Some(Arc::new(|finding| println!("{}", finding.message))));
    let report = check(memory, &options).await.unwrap();
    assert_eq!(
        (report.corruptions, report.check_errors, report.leaks),
        (0, 0, 0)
    );
}

#[test]
fn nothing_is_leaked_for_want_of_room() {
    for seed in 0..60 {
        run(scenario(seed));
    }
}

/// An image that cannot grow as it was asked to has its old size, and nothing was taken for the new one.
async fn resize_scenario(seed: u64) {
    let mut random = Random::new(seed);
    let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let old_bytes = 40 * CLUSTER_BYTES;
    let options = CreateOptions::default()
        .size_bytes(old_bytes)
        .cluster_size_bytes(CLUSTER_BYTES)
        .refcount_bits(16 << random.below(3));
    create(memory.clone(), None, &options).await.unwrap();
    let file = FaultStorage::new(memory.clone());
    let cache = CacheOptions::default().l2_cache_size_bytes(Some(2048));
    let options = OpenOptions::default().cache(cache);
    let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
    let image = opened.unwrap();
    for _ in 0..20 {
        let mut buffer = Buffer::zeroed(CLUSTER_BYTES as usize);
        buffer.fill(7);
        let offset = random.below(40) * CLUSTER_BYTES;
        let written = image.write(offset, buffer, RequestFlags::default());
        drop(written.await.unwrap());
    }
    for _ in 0..20 {
        let before = image.size_bytes();
        let pass = random.below(30) as usize;
        let operation = [Operation::Write, Operation::Truncate][(random.below(9) / 8) as usize];
        // What has its room already may fail once, but for the header: an image of which that cannot be
        // written is given up.
        let (from, times) = match random.below(2) {
            0 => (memory.len_bytes().unwrap(), Times::Always),
            _ => (CLUSTER_BYTES, Times::Once),
        };
        let behind = Matching::operation(operation).touching(from..u64::MAX);
        file.fail(behind, pass, times, 28);
        let bytes = before + (1 + random.below(400)) * CLUSTER_BYTES;
        let grown = image.resize(bytes, Preallocation::Metadata).await;
        let failed = grown.is_err();
        let size_bytes = if failed { before } else { bytes };
        assert_eq!(image.size_bytes(), size_bytes);
        file.heal();
        if failed {
            break;
        }
    }
    image.close().await.unwrap();
    let options = CheckOptions::default()
        .on_finding(Some(Arc::new(|finding| println!("{}", finding.message))));
    let report = check(memory, &options).await.unwrap();
    assert_eq!(
        (report.corruptions, report.check_errors, report.leaks),
        (0, 0, 0),
        "seed {seed}"
    );
}

#[test]
fn a_resize_that_fails_leaves_nothing_behind() {
    for seed in 0..300 {
        run(resize_scenario(seed));
    }
}

pub(crate) const MIB: u64 = 1 << 20;

/// A new image of clusters of 64 KiB on a file system of which nothing else is used.
pub(crate) async fn small_image() -> (Arc<SmallStorage>, Arc<Qcow2>) {
    let file = SmallStorage::new(Arc::new(MemStorage::new()));
    let options = CreateOptions::default().size_bytes(4 << 30);
    create(file.clone(), None, &options).await.unwrap();
    let image = open_small(&file).await;
    (file, image)
}

pub(crate) async fn open_small(file: &Arc<SmallStorage>) -> Arc<Qcow2> {
    let options = OpenOptions::default().discard(true);
    let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
    opened.unwrap()
}

pub(crate) async fn put(image: &Qcow2, offset: u64, len: u64, value: u8) -> vellum::Result<()> {
    let mut buffer = Buffer::zeroed(len as usize);
    buffer.fill(value);
    let written = image.write(offset, buffer, RequestFlags::default());
    written.await.map(drop)
}

pub(crate) async fn holds(image: &Qcow2, offset: u64, len: u64, value: u8) {
    let bytes = image.read(offset, Buffer::for_read(len as usize)).await;
    let all = bytes.unwrap().iter().all(|byte| *byte == value);
    assert!(all, "{value} is not what is at {offset:#x}");
}

pub(crate) async fn close_and_check(file: &Arc<SmallStorage>, image: &Qcow2) {
    image.close().await.unwrap();
    let report = check(file.clone(), &CheckOptions::default()).await.unwrap();
    assert_eq!(
        (report.corruptions, report.check_errors, report.leaks),
        (0, 0, 0)
    );
}

/// A write that found no room takes nothing with it that needs none, and the guest frees its own disk.
#[test]
fn after_a_write_that_found_no_room_the_rest_goes_on() {
    run(async {
        let (file, image) = small_image().await;
        put(&image, 0, 12 * MIB, 1).await.unwrap();
        image.flush().await.unwrap();
        for left_bytes in [0, 4096, 100 << 10, 1 << 20] {
            file.set_left_bytes(Some(left_bytes));
            // A piece of a table that was never written, and a table that is new.
            for far in [100 * MIB, 3 << 30] {
                let full = put(&image, far, 4 * MIB, 2).await.unwrap_err();
                assert_eq!(full.kind(), ErrorKind::NoSpace);
                let value = 3 + (left_bytes / 4096 % 200) as u8;
                put(&image, MIB, 64 << 10, value).await.unwrap();
                image.flush().await.unwrap();
                holds(&image, MIB, 64 << 10, value).await;
            }
        }
        image.discard(2 * MIB, 8 * MIB).await.unwrap();
        image.flush().await.unwrap();
        assert!(file.left_bytes() >= Some(8 * MIB));
        put(&image, 200 * MIB, 4 * MIB, 9).await.unwrap();
        image.flush().await.unwrap();
        holds(&image, 200 * MIB, 4 * MIB, 9).await;
        holds(&image, 0, MIB, 1).await;
        holds(&image, 2 * MIB, 8 * MIB, 0).await;
        holds(&image, 10 * MIB, 2 * MIB, 1).await;
        close_and_check(&file, &image).await;
    });
}

/// What was discarded and is not durable yet is looked for when room is missing.
#[test]
fn discards_without_a_flush_make_room() {
    run(async {
        let (file, image) = small_image().await;
        put(&image, 0, 12 * MIB, 1).await.unwrap();
        image.flush().await.unwrap();
        file.set_left_bytes(Some(100 << 10));
        image.discard(0, 8 * MIB).await.unwrap();
        put(&image, 100 * MIB, 4 * MIB, 2).await.unwrap();
        image.flush().await.unwrap();
        holds(&image, 100 * MIB, 4 * MIB, 2).await;
        close_and_check(&file, &image).await;
    });
}

/// A new image over a device that is full of fives.
async fn small_overlay() -> (Arc<SmallStorage>, Arc<Qcow2>) {
    let file = SmallStorage::new(Arc::new(MemStorage::new()));
    let options = CreateOptions::default().size_bytes(16 * MIB);
    create(file.clone(), None, &options).await.unwrap();
    let image = open_overlay(&file).await;
    (file, image)
}

async fn open_overlay(file: &Arc<SmallStorage>) -> Arc<Qcow2> {
    open_overlay_with(file, None).await.unwrap()
}

async fn open_overlay_with(
    file: &Arc<SmallStorage>,
    log: Option<WriteLogOptions>,
) -> vellum::Result<Arc<Qcow2>> {
    let base = Arc::new(MemStorage::with_bytes(vec![5; 16 << 20]));
    let base = Raw::open(base, RawOptions::default()).unwrap();
    let options = OpenOptions::default()
        .discard(true)
        .write_log(log)
        .backing(Backing::Given(base));
    Qcow2::open(file.clone(), Arc::new(DenyAll), options).await
}

/// Pieces of clusters at random until some are refused: what was acknowledged is not the worse for it.
async fn fill_with_pieces(image: &Qcow2, seed: u64) -> Vec<Option<u8>> {
    const PIECE_BYTES: u64 = 4096;
    let mut random = Random::new(seed);
    let mut model = vec![Some(5); (16 * MIB / PIECE_BYTES) as usize];
    let mut refused = 0;
    while refused < 20 {
        let first = random.below(model.len() as u64 - 16);
        let count = [1, 1, 2, 5, 16][random.below(5) as usize];
        let value = random.below(250) as u8 + 1;
        let written = put(image, first * PIECE_BYTES, count * PIECE_BYTES, value).await;
        refused += u32::from(written.is_err());
        let seen = written.is_ok().then_some(value);
        model[first as usize..(first + count) as usize].fill(seen);
    }
    model
}

/// Bytes that would wait for a copy are acknowledged only while there is room for that.
#[test]
fn pieces_of_clusters_meet_a_full_disk_before_they_are_acknowledged() {
    for seed in 0..20 {
        run(async move {
            let (file, image) = small_overlay().await;
            if seed % 2 == 0 {
                put(&image, 0, 4 * MIB, 5).await.unwrap();
                image.create_snapshot(NewSnapshot::default()).await.unwrap();
            }
            image.close().await.unwrap();
            file.set_left_bytes(Some(3 * MIB));
            let image = open_overlay(&file).await;
            let model = fill_with_pieces(&image, seed).await;
            image.flush().await.unwrap();
            image.close().await.unwrap();
            let image = open_overlay(&file).await;
            for (piece, value) in model.iter().enumerate() {
                if let Some(value) = value {
                    holds(&image, piece as u64 * 4096, 4096, *value).await;
                }
            }
            close_and_check(&file, &image).await;
        });
    }
}

/// What waits already gets the room that is left before a request that takes much.
#[test]
fn what_waits_gets_its_room_before_a_large_write() {
    run(async {
        let (file, image) = small_overlay().await;
        for cluster in 0..16 {
            put(&image, cluster * MIB, 512, 2).await.unwrap();
        }
        file.set_left_bytes(Some(3 * MIB));
        for len_bytes in [4 * MIB, 5 << 19] {
            let full = put(&image, 8 * MIB, len_bytes, 4).await.unwrap_err();
            assert_eq!(full.kind(), ErrorKind::NoSpace);
        }
        put(&image, 8 * MIB, MIB, 4).await.unwrap();
        image.flush().await.unwrap();
        holds(&image, 0, 512, 2).await;
        holds(&image, 15 * MIB, 512, 2).await;
        close_and_check(&file, &image).await;
    });
}

/// A few bytes that wait for their cluster get the room that the same flush gives back.
#[test]
fn a_flush_finds_the_room_that_it_gives_back() {
    run(async {
        let (file, image) = small_overlay().await;
        put(&image, 0, 4 * MIB, 1).await.unwrap();
        image.flush().await.unwrap();
        put(&image, 8 * MIB, 512, 2).await.unwrap();
        file.set_left_bytes(Some(0));
        image.flush().await.unwrap_err();
        image.discard(0, MIB).await.unwrap();
        image.flush().await.unwrap();
        holds(&image, 0, MIB, 0).await;
        holds(&image, 8 * MIB, 512, 2).await;
        holds(&image, 8 * MIB + 512, MIB, 5).await;
        close_and_check(&file, &image).await;
    });
}

/// A flush that finds no room is tried again once something was freed.
#[test]
fn a_flush_that_finds_no_room_once_is_tried_again() {
    run(async {
        let file = FaultStorage::new(Arc::new(MemStorage::new()));
        let options = CreateOptions::default().size_bytes(16 * MIB);
        create(file.clone(), None, &options).await.unwrap();
        let options = OpenOptions::default().discard(true);
        let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
        let image = opened.unwrap();
        put(&image, 0, MIB, 1).await.unwrap();
        image.flush().await.unwrap();
        image.discard(0, MIB).await.unwrap();
        file.fail(Matching::operation(Operation::Write), 0, Times::Once, 28);
        image.flush().await.unwrap();
        image.close().await.unwrap();
    });
}

/// A copy in which only blocks that are not all zeroes take room.
async fn sparse_copy(file: &SmallStorage) -> Arc<SmallStorage> {
    let copy = SmallStorage::new(Arc::new(MemStorage::new()));
    let len_bytes = file.len_bytes().unwrap();
    copy.truncate(len_bytes).await.unwrap();
    for at in (0..len_bytes).step_by(4096) {
        let read = file.read(at, Buffers::from_buf([Buffer::for_read(4096)]));
        let block = read.await.unwrap();
        if block[0].iter().any(|byte| *byte != 0) {
            let written = copy.write(at, block, WriteFlags::default());
            drop(written.await.unwrap());
        }
    }
    copy
}

/// Tables of an image from elsewhere may be holes: a copy of it may have been made sparse.
#[test]
fn tables_that_a_copy_left_out_get_their_room_first() {
    run(async {
        let (file, image) = small_image().await;
        for far in [0, 2 << 30, 3 << 30] {
            put(&image, far, MIB, 1).await.unwrap();
        }
        image.flush().await.unwrap();
        // Its tables are there, and map nothing any more.
        image.discard(0, 4 << 30).await.unwrap();
        image.close().await.unwrap();
        let file = sparse_copy(&file).await;
        let image = open_small(&file).await;
        put(&image, 0, MIB, 1).await.unwrap();
        image.flush().await.unwrap();
        file.set_left_bytes(Some(0));
        put(&image, 2 << 30, 4 * MIB, 2).await.unwrap_err();
        put(&image, 0, MIB, 3).await.unwrap();
        image.flush().await.unwrap();
        image.discard(0, MIB).await.unwrap();
        image.flush().await.unwrap();
        put(&image, 3 << 30, 512 << 10, 4).await.unwrap();
        image.flush().await.unwrap();
        close_and_check(&file, &image).await;
    });
}

/// What a write log keeps is not lost on a full disk, and whoever opens it is told what to do.
#[test]
fn a_write_log_that_finds_no_room_says_so_and_keeps_everything() {
    run(async {
        let (file, image) = small_overlay().await;
        image.close().await.unwrap();
        let log = WriteLogOptions::inside().len_bytes(WriteLogOptions::MIN_LEN_BYTES);
        let image = open_overlay_with(&file, Some(log)).await.unwrap();
        put(&image, 8 * MIB, 512, 2).await.unwrap();
        image.flush().await.unwrap();
        let killed = sparse_copy(&file).await;
        killed.set_left_bytes(Some(0));
        let full = open_overlay_with(&killed, None).await.unwrap_err();
        assert_eq!(full.kind(), ErrorKind::NoSpace);
        assert!(full.to_string().contains("make room"), "{full}");
        killed.set_left_bytes(None);
        let image = open_overlay(&killed).await;
        holds(&image, 8 * MIB, 512, 2).await;
        holds(&image, 8 * MIB + 512, MIB, 5).await;
        close_and_check(&killed, &image).await;
    });
}

/// A disk that is refused another size has none; one that has got it is not refused.
#[test]
fn bitmaps_need_no_room_when_a_disk_gets_smaller() {
    let bitmap = |granularity: u64, disabled: bool| {
        let options = BitmapOptions::default().granularity_bytes(Some(granularity));
        options.disabled(disabled)
    };
    run(async move {
        let file = SmallStorage::new(Arc::new(MemStorage::new()));
        let options = CreateOptions::default()
            .size_bytes(64 * MIB)
            .cluster_size_bytes(CLUSTER_BYTES);
        create(file.clone(), None, &options).await.unwrap();
        let image = open_small(&file).await;
        for (name, first) in [("old", 15 * MIB), ("new", 16 * MIB - 4096)] {
            let bitmaps = image.bitmaps();
            bitmaps.add(name, bitmap(512, false)).await.unwrap();
            bitmaps.set(name, vec![first..19 * MIB]).await.unwrap();
        }
        image.bitmaps().disable("old").await.unwrap();
        image.flush().await.unwrap();
        file.set_left_bytes(Some(0));
        let refused = image.truncate(128 * MIB).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NoSpace);
        assert_eq!(image.size_bytes(), 64 * MIB);
        let mut filled = 0;
        while put(&image, filled, CLUSTER_BYTES, 1).await.is_ok() {
            filled += CLUSTER_BYTES;
        }
        // In the middle of what a byte of bits is about.
        let end = 16 * MIB + 1536;
        image.truncate(end).await.unwrap();
        assert_eq!(image.size_bytes(), end);
        image.close().await.unwrap();
        file.set_left_bytes(None);
        let image = open_small(&file).await;
        // The write that failed may be dirty.
        let new = [0..filled + CLUSTER_BYTES, 16 * MIB - 4096..end];
        for (name, expected) in [("old", vec![15 * MIB..end]), ("new", new.to_vec())] {
            let info = image.bitmaps().find(name).await.unwrap();
            assert!(info.consistent, "{info:?}");
            let dirty = image.bitmaps().read(name).await.unwrap();
            assert_eq!(dirty.ranges().collect::<Vec<_>>(), expected, "{name}");
        }
        // What comes into being is not what was there before.
        image.truncate(20 * MIB).await.unwrap();
        let dirty = image.bitmaps().read("old").await.unwrap();
        assert_eq!(dirty.ranges().collect::<Vec<_>>(), [15 * MIB..end]);
        close_and_check(&file, &image).await;
    });
}

/// A limit of file sizes, or a disk without room for its own metadata, may keep the file from its
/// end. The counts of what was given back are written nevertheless.
#[test]
fn a_close_that_cannot_set_the_length_leaks_nothing() {
    const EFBIG: i32 = 27;
    const ENOSPC: i32 = 28;
    for errno in [EFBIG, ENOSPC] {
        run(async move {
            let file = FaultStorage::new(Arc::new(MemStorage::new()));
            let options = CreateOptions::default().size_bytes(16 * MIB);
            create(file.clone(), None, &options).await.unwrap();
            let options = OpenOptions::default().ahead(PreallocateAhead::NONE);
            let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
            let image = opened.unwrap();
            put(&image, 0, MIB, 1).await.unwrap();
            image.flush().await.unwrap();
            let writes = Matching::operation(Operation::Write);
            file.fail(writes, 0, Times::Always, errno);
            let full = put(&image, 8 * MIB, MIB, 2).await.unwrap_err();
            assert_eq!((full.kind(), full.errno()), (ErrorKind::NoSpace, errno));
            file.heal();
            file.fail(
                Matching::operation(Operation::Truncate),
                0,
                Times::Always,
                errno,
            );
            drop(image.close().await);
            file.heal();
            let report = check(file, &CheckOptions::default()).await.unwrap();
            assert_eq!((report.corruptions, report.leaks), (0, 0));
        });
    }
}
