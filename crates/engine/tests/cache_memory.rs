//! What the metadata caches really take, as the allocator sees it: never more than
//! their budget and a small constant, whether tables are clean or dirty.

#[path = "../../io/tests/common/heap.rs"]
mod heap;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{CacheOptions, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Storage, ZeroRequest};
use vellum_io::lane;
use vellum_storage::file::{Create, FileOptions, FileStorage};

use heap::live_bytes;

const CLUSTER_BYTES: u64 = 65536;
const ENTRIES: u64 = CLUSTER_BYTES / 8;
const SLICE_GUEST_BYTES: u64 = 512 * CLUSTER_BYTES;
/// An image that needs 16 MiB of L2 tables.
const TABLES: u64 = 256;
const SIZE_BYTES: u64 = TABLES * ENTRIES * CLUSTER_BYTES;
/// The refcount cache's default, which is its minimum too.
const REFCOUNT_BYTES: u64 = 4 * CLUSTER_BYTES;
/// What requests and lanes keep beside the caches, and a table that is being put
/// in the place of another.
const SLACK_BYTES: usize = 32 << 10;
/// The same with writes: what else they keep, and the slots of the requests of a
/// commit, which writes up to half of the cache's tables at once.
const WRITE_SLACK_BYTES: usize = 512 << 10;

fn open_file(path: &Path) -> Arc<dyn Storage> {
    let options = FileOptions::default().create(Create::IfMissing);
    FileStorage::open(path, &options).unwrap()
}

fn empty_image(path: &Path) {
    let options = CreateOptions::default().size_bytes(SIZE_BYTES);
    lane::block_on(create(open_file(path), None, &options)).unwrap();
}

/// Gives an empty image all its L2 tables. `packable`: host clusters in no order,
/// else anything, behind an unallocated first entry in each slice.
fn fill_tables(path: &Path, packable: bool) {
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut l1_offset = [0; 8];
    file.read_exact_at(&mut l1_offset, 40).unwrap();
    let first_table = 1 << 30;
    let mut random = fastrand::Rng::with_seed(1);
    for table in 0..TABLES {
        let offset = first_table + table * CLUSTER_BYTES;
        let entry = (1u64 << 63 | offset).to_be_bytes();
        let l1_entry = u64::from_be_bytes(l1_offset) + table * 8;
        file.write_all_at(&entry, l1_entry).unwrap();
        let words = (0..ENTRIES).flat_map(|index| {
            let word = match packable {
                true => 1 << 63 | (random.u64(..TABLES * ENTRIES) << 16),
                false if index % 512 == 0 => 0,
                false => random.u64(..),
            };
            word.to_be_bytes()
        });
        file.write_all_at(&words.collect::<Vec<u8>>(), offset)
            .unwrap();
    }
}

async fn open_image(path: &Path, l2_cache_size_bytes: Option<u64>, read_only: bool) -> Arc<Qcow2> {
    let options = OpenOptions::default()
        .read_only(read_only)
        .cache(CacheOptions::default().l2_cache_size_bytes(l2_cache_size_bytes));
    Qcow2::open(open_file(path), Arc::new(DenyAll), options)
        .await
        .unwrap()
}

/// Offsets of every slice, in no order, several times.
fn offsets() -> impl Iterator<Item = u64> {
    let slices = SIZE_BYTES / SLICE_GUEST_BYTES;
    (0..3 * slices).map(move |at| at * 1237 % slices * SLICE_GUEST_BYTES)
}

/// Lanes keep the memory of dropped buffers, within bounds of their own: let that
/// be full, so that it counts for nothing.
fn fill_buffer_pool() {
    let buffers: Vec<_> = (0..1024).map(|_| Buffer::zeroed(4096)).collect();
    drop(buffers);
}

async fn reads_stay_within(path: &Path, budget_bytes: u64) -> usize {
    let image = open_image(path, Some(budget_bytes), true).await;
    // What a lane keeps once and for all.
    image.block_status(0, 512, 1).await.unwrap();
    fill_buffer_pool();
    let before = live_bytes();
    let mut most = 0;
    for offset in offsets() {
        image.block_status(offset, 512, 1).await.unwrap();
        let live = live_bytes().saturating_sub(before);
        assert!(
            live <= budget_bytes as usize + SLACK_BYTES,
            "{live} bytes with a budget of {budget_bytes}"
        );
        most = most.max(live);
    }
    let usage = image.cache_usage();
    assert!(usage.l2_bytes <= budget_bytes);
    assert!(
        most <= usage.l2_bytes as usize + SLACK_BYTES,
        "{most} bytes where {} are accounted for",
        usage.l2_bytes
    );
    most
}

async fn writes_stay_within(path: &Path, budget_bytes: u64) {
    let image = open_image(path, Some(budget_bytes), false).await;
    let zero = ZeroRequest::default();
    // The first change of all makes what stays.
    image.write_zeroes(0, CLUSTER_BYTES, zero).await.unwrap();
    fill_buffer_pool();
    let before = live_bytes();
    for offset in offsets().step_by(3) {
        image
            .write_zeroes(offset, CLUSTER_BYTES, zero)
            .await
            .unwrap();
        let live = live_bytes().saturating_sub(before);
        let usage = image.cache_usage();
        assert!(usage.l2_bytes <= budget_bytes, "{usage:?}");
        assert!(usage.refcount_bytes <= REFCOUNT_BYTES);
        let most = (usage.l2_bytes + usage.refcount_bytes) as usize + WRITE_SLACK_BYTES;
        assert!(live <= most, "{live} bytes, where {usage:?}");
    }
    image.close().await.unwrap();
}

/// One test: nothing else may allocate meanwhile.
#[test]
fn the_caches_stay_within_their_budget() {
    let folder = tempfile::tempdir().unwrap();
    let budgets = [32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20];
    for packable in [true, false] {
        let path = folder.path().join("full.qcow2");
        empty_image(&path);
        fill_tables(&path, packable);
        for budget in budgets {
            lane::block_on(async {
                let used = reads_stay_within(&path, budget).await;
                assert!(used >= budget as usize * 2 / 3, "{used} of {budget} bytes");
            });
        }
        let everything = lane::block_on(reads_stay_within(&path, 16 << 20));
        match packable {
            // 21 bits an entry.
            true => assert!(everything < (16 << 20) * 40 / 100, "{everything}"),
            false => assert!(everything > 15 << 20, "{everything}"),
        }
        std::fs::remove_file(&path).unwrap();
    }
    for budget in budgets {
        let path = folder.path().join("new.qcow2");
        empty_image(&path);
        lane::block_on(writes_stay_within(&path, budget));
        std::fs::remove_file(&path).unwrap();
    }
}
