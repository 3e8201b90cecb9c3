//! Caches whose files are damaged, cannot be written, or were left by somebody who died.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_io::lane;
use vellum_remote::CacheStorage;
use vellum_storage::MemStorage;
use vellum_storage::Storage;
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};

use crate::below::{BLOCK, Below, Shared};
use crate::{check_all, check_some, content, open, options, private_folder};

/// `ENOSPC`.
const NO_SPACE: i32 = 28;
/// `EIO`.
const IO: i32 = 5;

fn file(folder: &Path, kind: &str) -> PathBuf {
    let files = fs::read_dir(folder).unwrap();
    let mut paths = files.map(|file| file.unwrap().path());
    let found = paths.find(|path| path.extension().is_some_and(|found| found == kind));
    found.expect("a file of the cache")
}

/// A folder in which all of a file is.
fn filled(below: &Arc<Below>) -> tempfile::TempDir {
    let folder = private_folder();
    lane::block_on(async {
        let cache = open(below, options(folder.path())).await;
        check_all(&*cache, &below.bytes).await;
        cache.close().await.unwrap();
    });
    folder
}

#[test]
fn damaged_files_cost_a_fetch_and_no_byte() {
    let below = Below::new(content(20, 3 << 20 | 777));
    let folder = filled(&below);
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let kind = ["data", "index"][random.usize(0..2)];
        let path = file(folder.path(), kind);
        let mut bytes = fs::read(&path).unwrap();
        let len = bytes.len();
        let start = random.usize(0..len);
        let end = (start + random.usize(1..100_000)).min(len);
        match random.u8(0..3) {
            0 => bytes[start..end].fill(0),
            1 => random.fill(&mut bytes[start..end]),
            _ => bytes.truncate(start),
        }
        fs::write(&path, bytes).unwrap();
        lane::block_on(async {
            let cache = open(&below, options(folder.path())).await;
            check_some(&*cache, &below.bytes, seed, 30).await;
            check_all(&*cache, &below.bytes).await;
            cache.close().await.unwrap();
        });
    }
}

#[test]
fn a_group_that_somebody_has_begun_to_throw_out_comes_back() {
    let below = Below::new(content(21, 6 << 20));
    let folder = filled(&below);
    let fetched = below.fetched_bytes();
    // The first group's generation is odd, as after a kill; half of its bytes are gone.
    let path = file(folder.path(), "index");
    let mut index = fs::read(&path).unwrap();
    let table = index.len() - 2 * 16;
    index[table] = 1;
    fs::write(&path, index).unwrap();
    let path = file(folder.path(), "data");
    let mut data = fs::read(&path).unwrap();
    data[..2 << 20].fill(0);
    fs::write(&path, data).unwrap();
    // Several who read find it so, with several pieces of it each.
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (below, folder) = (&below, folder.path());
            scope.spawn(move || {
                lane::block_on(async {
                    let cache = open(below, options(folder)).await;
                    check_all(&*cache, &below.bytes).await;
                    check_some(&*cache, &below.bytes, seed, 50).await;
                    cache.close().await.unwrap();
                });
            });
        }
    });
    assert_eq!(below.fetched_bytes() - fetched, 4 << 20);
    assert_eq!(fs::read(file(folder.path(), "index")).unwrap()[table], 2);
}

/// A cache whose data lies in a storage that fails.
fn over(below: &Arc<Below>, data: &Arc<FaultStorage>) -> Arc<CacheStorage> {
    CacheStorage::in_storages(
        Arc::new(Shared(below.clone())),
        data.clone(),
        Arc::new(MemStorage::new()),
        options(Path::new("")),
    )
    .expect("a cache")
}

#[test]
fn what_the_disk_does_not_give_back_comes_from_the_server() {
    let below = Below::new(content(23, 2 << 20));
    lane::block_on(async {
        let data = FaultStorage::new(Arc::new(MemStorage::new()));
        let cache = over(&below, &data);
        check_all(&*cache, &below.bytes).await;
        let reads = Matching::operation(Operation::Read);
        data.fail(reads, 2, Times::Always, IO);
        check_some(&*cache, &below.bytes, 5, 100).await;
        data.heal();
        check_all(&*cache, &below.bytes).await;
        cache.close().await.unwrap();
    });
}

#[test]
fn a_cache_that_cannot_be_written_is_passed_by() {
    let below = Below::new(content(22, 2 << 20));
    lane::block_on(async {
        let data = FaultStorage::new(Arc::new(MemStorage::new()));
        let writes = Matching::operation(Operation::Write);
        data.fail(writes, 3, Times::Always, NO_SPACE);
        let cache = over(&below, &data);
        check_some(&*cache, &below.bytes, 5, 100).await;
        check_all(&*cache, &below.bytes).await;
        // Nobody tries again with each read.
        let fetched = below.fetched_bytes();
        check_all(&*cache, &below.bytes).await;
        assert!(below.fetched_bytes() - fetched <= below.bytes.len() as u64 + BLOCK);
        cache.close().await.unwrap();
    });
}
