//! Cache sizes that change while an image is in use: by the user, by the need, and
//! by the cleaner, which gives the memory back to the system.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{CacheOptions, OpenOptions, Qcow2};
use vellum::{BlockDevice, ErrorKind};
use vellum_io::lane;
use vellum_storage::file::Create;

mod common;

const CLUSTER_BYTES: u64 = 65536;
const SLICE_GUEST_BYTES: u64 = 512 * CLUSTER_BYTES;
/// An image that needs 32 MiB of L2 tables.
const TABLES: u64 = 512;
const SIZE_BYTES: u64 = TABLES * (CLUSTER_BYTES / 8) * CLUSTER_BYTES;

/// An image whose L2 slices cannot be packed; the first entry of each is unused.
fn image_of_garbage(path: &Path) {
    let options = CreateOptions::default().size_bytes(SIZE_BYTES);
    let storage = common::open(path, Create::IfMissing);
    lane::block_on(create(storage, None, &options)).unwrap();
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut l1_offset = [0; 8];
    file.read_exact_at(&mut l1_offset, 40).unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    for table in 0..TABLES {
        let offset = (1 << 30) + table * CLUSTER_BYTES;
        let l1_entry = u64::from_be_bytes(l1_offset) + table * 8;
        let entry = (1u64 << 63 | offset).to_be_bytes();
        file.write_all_at(&entry, l1_entry).unwrap();
        let words = (0..CLUSTER_BYTES / 8)
            .flat_map(|index| (if index % 512 == 0 { 0 } else { random.u64(..) }).to_be_bytes());
        file.write_all_at(&words.collect::<Vec<u8>>(), offset)
            .unwrap();
    }
}

fn open_image(path: &Path, l2_cache_size_bytes: Option<u64>) -> Arc<Qcow2> {
    let options = OpenOptions::default()
        .read_only(true)
        .cache(CacheOptions::default().l2_cache_size_bytes(l2_cache_size_bytes));
    let file = common::open(path, Create::No);
    lane::block_on(Qcow2::open(file, Arc::new(DenyAll), options)).unwrap()
}

/// Looks at the first `slices` slices, in no order.
fn look_at(image: &Qcow2, slices: u64) {
    lane::block_on(async {
        for at in 0..slices {
            let offset = at * 1237 % slices * SLICE_GUEST_BYTES;
            image.block_status(offset, 512, 1).await.unwrap();
        }
    });
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() * 1024
}

/// One test, since memory is counted for the whole process.
#[test]
fn sizes_follow_the_user_the_need_and_the_cleaner() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.qcow2");
    image_of_garbage(&path);

    // The cleaner gives back what nobody uses.
    let image = open_image(&path, Some(32 << 20));
    look_at(&image, 16);
    let empty = resident_bytes();
    look_at(&image, SIZE_BYTES / SLICE_GUEST_BYTES);
    let full = resident_bytes();
    assert!(full - empty > 24 << 20, "{empty} -> {full}");
    image.clean_caches();
    image.clean_caches();
    let cleaned = resident_bytes();
    assert!(
        cleaned < empty + (full - empty) / 8,
        "{empty} -> {full} -> {cleaned}"
    );

    // The user changes the size.
    look_at(&image, 2000);
    let sizes = |l2| CacheOptions::default().l2_cache_size_bytes(Some(l2));
    image.set_cache_sizes(&sizes(1 << 20)).unwrap();
    assert!(image.cache_usage().l2_bytes <= 1 << 20);
    look_at(&image, 2000);
    assert!(image.cache_usage().l2_bytes <= 1 << 20);
    let wrong = (sizes(1 << 20)).cache_size_bytes(Some(4096));
    let error = image.set_cache_sizes(&wrong).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);

    // Without a size the cache takes what is needed, and no more.
    let image = open_image(&path, None);
    assert!(image.cache_usage().l2_limit_bytes <= 256 << 10);
    look_at(&image, SIZE_BYTES / SLICE_GUEST_BYTES);
    assert!(image.cache_usage().l2_bytes <= 256 << 10, "looked at once");
    (0..40).for_each(|_| look_at(&image, 500));
    let usage = image.cache_usage();
    assert!(usage.l2_bytes >= 500 * 4096, "{usage:?}");
    assert!(usage.l2_limit_bytes <= 8 << 20, "{usage:?}");
    image.clean_caches();
    image.clean_caches();
    assert!(image.cache_usage().l2_limit_bytes <= 256 << 10);
}
