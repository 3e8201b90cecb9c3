//! Caches of files on other machines: bytes are right whatever happens to the cache's files, to the
//! server, and to other processes; and they are fetched once.

mod below;
mod cuts;
mod damage;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use below::{BLOCK, Below, Shared};
use vellum_io::{Buffer, Buffers, ErrorKind, Result, lane};
use vellum_remote::{CacheOptions, CacheStorage, Found};
use vellum_storage::Storage;
use vellum_storage::lock::ranges;

/// Bytes of which no two blocks are the same.
fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}

/// A folder that a cache can have.
fn private_folder() -> tempfile::TempDir {
    let mode = fs::Permissions::from_mode(0o700);
    tempfile::Builder::new()
        .permissions(mode)
        .tempdir()
        .expect("a folder")
}

fn options(folder: &Path) -> CacheOptions {
    CacheOptions {
        readahead_bytes: 0,
        ..CacheOptions::new(folder)
    }
}

async fn open(below: &Arc<Below>, options: CacheOptions) -> Arc<CacheStorage> {
    let shared = Arc::new(Shared(below.clone()));
    CacheStorage::open("somewhere", "1", shared, options)
        .await
        .expect("a cache")
}

async fn read(storage: &dyn Storage, offset: u64, len: usize) -> Result<Vec<u8>> {
    let buffers = Buffers::from_iter([Buffer::for_read(len)]);
    let read = storage.read(offset, buffers).await?;
    Ok(Buffer::join_all(read).to_vec())
}

async fn check_all(storage: &dyn Storage, bytes: &[u8]) {
    let got = read(storage, 0, bytes.len()).await.expect("a read");
    assert!(got == bytes, "wrong bytes");
}

/// Reads here and there, and compares.
async fn check_some(storage: &dyn Storage, bytes: &[u8], seed: u64, count: usize) {
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..count {
        let offset = random.usize(0..bytes.len() + 5000);
        let len = match random.u8(0..4) {
            0 => random.usize(1..1 << 20),
            _ => random.usize(1..10_000),
        };
        let got = read(storage, offset as u64, len).await.expect("a read");
        let end = bytes.len().min(offset + len);
        let mut wanted = bytes[offset.min(end)..end].to_vec();
        wanted.resize(len, 0);
        assert!(got == wanted, "seed {seed}: {offset} + {len}");
    }
}

#[test]
fn each_byte_is_fetched_once_and_stays() {
    let folder = private_folder();
    let bytes = content(1, 9 << 20 | 12_345);
    let below = Below::new(bytes.clone());
    lane::block_on(async {
        let cache = open(&below, options(folder.path())).await;
        check_some(&*cache, &bytes, 1, 300).await;
        check_all(&*cache, &bytes).await;
        assert_eq!(below.fetched_bytes(), bytes.len() as u64);
        cache.close().await.unwrap();
        let cache = open(&below, options(folder.path())).await;
        check_some(&*cache, &bytes, 2, 300).await;
        check_all(&*cache, &bytes).await;
        cache.close().await.unwrap();
    });
    assert_eq!(below.fetched_bytes(), bytes.len() as u64);
}

#[test]
fn disks_on_several_threads_fetch_each_byte_once() {
    let folder = private_folder();
    let bytes = content(3, 6 << 20);
    let below = Below::slow(bytes.clone(), Duration::from_millis(2));
    thread::scope(|scope| {
        for seed in 0..6 {
            let (below, bytes, folder) = (&below, &bytes, folder.path());
            scope.spawn(move || {
                lane::block_on(async {
                    // Each has files of its own open, as another process would.
                    let cache = open(below, options(folder)).await;
                    check_some(&*cache, bytes, seed, 40).await;
                    check_all(&*cache, bytes).await;
                    cache.close().await.unwrap();
                });
            });
        }
    });
    assert_eq!(below.fetched_bytes(), bytes.len() as u64);
}

fn used_bytes(folder: &Path) -> u64 {
    let files = fs::read_dir(folder).unwrap();
    let blocks = files.map(|file| file.unwrap().metadata().map_or(0, |found| found.blocks()));
    blocks.sum::<u64>() * 512
}

#[test]
fn the_folder_keeps_its_limit_while_others_read() {
    let folder = private_folder();
    let limit = 12 << 20;
    let bytes = content(4, 40 << 20);
    let below = Below::new(bytes.clone());
    let limited = || CacheOptions {
        limit_bytes: Some(limit),
        ..options(folder.path())
    };
    thread::scope(|scope| {
        for seed in 0..3 {
            let (below, bytes, limited) = (&below, &bytes, &limited);
            scope.spawn(move || {
                lane::block_on(async {
                    let cache = open(below, limited()).await;
                    check_some(&*cache, bytes, seed, 400).await;
                    cache.close().await.unwrap();
                });
            });
        }
    });
    // Each of three has stored 1/16 before it looks, and what was on its way.
    let used = used_bytes(folder.path());
    assert!(used < 2 * limit, "{used}");
    assert!(below.fetched_bytes() > bytes.len() as u64);
    // A file that nobody uses any more goes as a whole.
    lane::block_on(async {
        let other = Arc::new(Shared(Below::new(content(5, 40 << 20))));
        let cache = CacheStorage::open("elsewhere", "1", other.clone(), limited());
        let cache = cache.await.unwrap();
        check_all(&*cache, &other.0.bytes).await;
        cache.close().await.unwrap();
    });
    let used = used_bytes(folder.path());
    assert!(used < limit + limit / 8, "{used}");
    let indexes = fs::read_dir(folder.path()).unwrap();
    let is_index = |name: &Path| name.extension().is_some_and(|kind| kind == "index");
    let indexes = indexes.filter(|file| is_index(&file.as_ref().unwrap().path()));
    assert_eq!(indexes.count(), 1);
}

#[test]
fn versions_are_told_apart() {
    let folder = private_folder();
    lane::block_on(async {
        for version in ["1", "2", "1"] {
            let seed = version.parse().unwrap();
            let below = Arc::new(Shared(Below::new(content(seed, 1 << 20))));
            let cache = CacheStorage::open("one", version, below.clone(), options(folder.path()));
            let cache = cache.await.unwrap();
            check_all(&*cache, &below.0.bytes).await;
            cache.close().await.unwrap();
        }
    });
}

#[test]
fn during_an_outage_what_is_here_goes_on_and_the_rest_waits() {
    let folder = private_folder();
    let bytes = content(6, 4 << 20);
    let below = Below::new(bytes.clone());
    lane::block_on(async {
        let patient = CacheOptions {
            outage: Duration::MAX,
            ..options(folder.path())
        };
        let cache = open(&below, patient).await;
        check_some(&*cache, &bytes[..1 << 20], 1, 1).await;
        read(&*cache, 0, 1 << 20).await.unwrap();
        below.is_away.store(true, Ordering::SeqCst);
        let waiting = lane::spawn({
            let cache = cache.clone();
            async move { read(&*cache, 3 << 20, 4096).await }
        });
        for _ in 0..100 {
            assert!(read(&*cache, 0, 1 << 20).await.unwrap() == bytes[..1 << 20]);
            lane::sleep(Duration::from_millis(10)).await;
        }
        below.is_away.store(false, Ordering::SeqCst);
        assert!(waiting.await.unwrap() == bytes[3 << 20..(3 << 20) + 4096]);
        cache.close().await.unwrap();
    });
}

/// He may be stopped, or stuck: what he has claimed comes from the server, and goes into the cache later.
#[test]
fn who_claims_blocks_and_does_nothing_holds_nobody_up() {
    let folder = private_folder();
    let below = Below::new(content(8, 2 << 20));
    lane::block_on(async {
        let impatient = CacheOptions {
            outage: Duration::ZERO,
            ..options(folder.path())
        };
        let cache = open(&below, impatient).await;
        let mut files = fs::read_dir(folder.path()).unwrap();
        let index_path = files.find_map(|file| {
            let path = file.unwrap().path();
            path.extension()?.eq("index").then_some(path)
        });
        let path = index_path.unwrap();
        let index = fs::File::options().read(true).write(true).open(path);
        let index = index.unwrap();
        // All but the header.
        let all = 4096..index.metadata().unwrap().len();
        assert!(ranges::try_claim(&index, &all).unwrap());
        let begun = std::time::Instant::now();
        check_all(&*cache, &below.bytes).await;
        assert!(begun.elapsed() < Duration::from_secs(8));
        cache.close().await.unwrap();
    });
}

#[test]
fn an_outage_ends_and_a_changed_file_does_not_wait() {
    let folder = private_folder();
    let below = Below::new(content(7, 1 << 20));
    lane::block_on(async {
        let patient = CacheOptions {
            outage: Duration::from_millis(300),
            ..options(folder.path())
        };
        let cache = open(&below, patient).await;
        below.is_away.store(true, Ordering::SeqCst);
        let error = read(&*cache, 0, 512).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        below.is_away.store(false, Ordering::SeqCst);
        below.is_changed.store(true, Ordering::SeqCst);
        let error = read(&*cache, 0, 512).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Changed);
        below.is_changed.store(false, Ordering::SeqCst);
        check_all(&*cache, &below.bytes).await;
        cache.close().await.unwrap();
    });
}

#[test]
fn when_everything_is_here_the_server_is_not_needed() {
    let folder = private_folder();
    let below = Below::new(content(8, 5 << 20 | 1));
    lane::block_on(async {
        let find = || CacheStorage::find_whole(folder.path(), "somewhere", None);
        let cache = open(&below, options(folder.path())).await;
        read(&*cache, 0, 1 << 20).await.unwrap();
        assert_eq!(find().await, None);
        cache.close().await.unwrap();
        let prefetch = CacheOptions {
            prefetch: true,
            ..options(folder.path())
        };
        let cache = open(&below, prefetch).await;
        while cache.fetched_bytes() < 4 << 20 {
            lane::sleep(Duration::from_millis(5)).await;
        }
        let found = Found {
            version: "1".to_owned(),
            len_bytes: below.bytes.len() as u64,
        };
        while find().await.as_ref() != Some(&found) {
            lane::sleep(Duration::from_millis(5)).await;
        }
        cache.close().await.unwrap();
        assert_eq!(below.fetched_bytes(), below.bytes.len() as u64);
        let alone = CacheStorage::open_alone("somewhere", &found, "name", options(folder.path()));
        let alone = alone.await.unwrap();
        check_all(&*alone, &below.bytes).await;
        alone.close().await.unwrap();
    });
}

#[test]
fn only_the_version_that_is_meant_is_found_without_a_server() {
    let folder = private_folder();
    let below = Below::new(content(12, 300_000));
    lane::block_on(async {
        let open = |version: &'static str| {
            let shared = Arc::new(Shared(below.clone()));
            CacheStorage::open("somewhere", version, shared, options(folder.path()))
        };
        let find = async |version| {
            let found = CacheStorage::find_whole(folder.path(), "somewhere", version).await;
            found.map(|found| found.version)
        };
        let first = open("1").await.unwrap();
        check_all(&*first, &below.bytes).await;
        assert_eq!(find(None).await.as_deref(), Some("1"));
        // One that was asked for by its name is that one.
        assert_eq!(find(Some("1")).await.as_deref(), Some("1"));
        assert_eq!(find(Some("2")).await, None);
        // A newer one, of which only a part is here, takes nothing from the older one, and is not shown as it;
        // also if somebody has the older one open still.
        let second = open("2").await.unwrap();
        read(&*second, 0, 10).await.unwrap();
        check_all(&*first, &below.bytes).await;
        assert_eq!(find(None).await, None);
        assert_eq!(find(Some("2")).await, None);
        assert_eq!(find(Some("1")).await.as_deref(), Some("1"));
        check_all(&*second, &below.bytes).await;
        assert_eq!(find(None).await.as_deref(), Some("2"));
        // The server has the older one again.
        let again = open("1").await.unwrap();
        assert_eq!(find(None).await.as_deref(), Some("1"));
        for cache in [first, second, again] {
            cache.close().await.unwrap();
        }
    });
}

#[test]
fn what_was_wanted_is_fetched_ahead_the_next_time() {
    let (recorded, replayed) = (private_folder(), private_folder());
    let below = Below::new(content(9, 8 << 20));
    lane::block_on(async {
        let record = CacheOptions {
            record_trace: true,
            ..options(recorded.path())
        };
        let cache = open(&below, record).await;
        for block in [50_u64, 3, 4, 90] {
            read(&*cache, block * BLOCK + 5, 10).await.unwrap();
        }
        cache.close().await.unwrap();
        let files = fs::read_dir(recorded.path()).unwrap();
        let trace = files.map(|file| file.unwrap().path());
        let mut traces = trace.filter(|path| path.extension().is_some_and(|kind| kind == "trace"));
        let trace = traces.next().expect("a trace");
        below.reads.lock().unwrap().clear();
        // Another host is given the trace.
        let replay = CacheOptions {
            trace: Some(trace),
            ..options(replayed.path())
        };
        let cache = open(&below, replay).await;
        while cache.fetched_bytes() < 4 * BLOCK {
            lane::sleep(Duration::from_millis(5)).await;
        }
        let reads = below.reads.lock().unwrap().clone();
        let at = |block: u64, count: u64| (block * BLOCK, count * BLOCK);
        assert_eq!(reads, [at(50, 1), at(3, 2), at(90, 1)]);
        read(&*cache, 50 * BLOCK, 10).await.unwrap();
        assert_eq!(below.reads.lock().unwrap().len(), 3);
        cache.close().await.unwrap();
    });
}

#[test]
fn who_reads_on_is_read_ahead_of() {
    let folder = private_folder();
    let below = Below::slow(content(10, 16 << 20), Duration::from_millis(5));
    lane::block_on(async {
        let ahead = CacheOptions {
            readahead_bytes: 256 << 10,
            ..options(folder.path())
        };
        let cache = open(&below, ahead).await;
        for at in 0..below.bytes.len() / 65_536 {
            let got = read(&*cache, at as u64 * BLOCK, 65_536).await.unwrap();
            assert!(got == below.bytes[at * 65_536..(at + 1) * 65_536]);
        }
        let reads = below.reads.lock().unwrap().len();
        assert!(reads < 80, "{reads} reads");
        assert_eq!(below.fetched_bytes(), below.bytes.len() as u64);
        cache.close().await.unwrap();
    });
}

#[test]
fn nobody_writes() {
    let folder = private_folder();
    let below = Below::new(content(11, 1 << 20));
    lane::block_on(async {
        let cache = open(&below, options(folder.path())).await;
        let buffers = Buffers::from_iter([Buffer::zeroed(512)]);
        let refused = cache.write(0, buffers, Default::default()).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::ReadOnly);
        cache.flush().await.unwrap();
        cache.close().await.unwrap();
    });
}
