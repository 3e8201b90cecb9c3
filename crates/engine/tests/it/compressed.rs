//! Compressed images made by the real qemu-img: any requests from several lanes at
//! once see what the source holds, whatever the budget of the cache is; clusters
//! that are overwritten give their space to others; damage is an error and no more.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use crate::common::{Random, qemu_ok, qemu_verdict};
use futures_util::future::join_all;
use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Error, ErrorKind, RequestFlags, Storage};
use vellum_io::lane;
use vellum_storage::wrap::{Matching, Operation, TraceStorage};
use vellum_storage::{FileOptions, FileStorage, MemStorage};

const LANES: u64 = 3;
const KINDS: [&str; 2] = ["zlib", "zstd"];

/// Stretches of text, of noise, of little noise, and of zeroes.
fn source(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let stretch = (random.below(40_000) + 1) as usize;
        let end = (bytes.len() + stretch).min(len);
        match random.below(4) {
            0 => bytes.resize(end, 0),
            1 => bytes.resize_with(end, || random.next() as u8),
            2 => bytes.resize_with(end, || random.below(3) as u8),
            _ => {
                while bytes.len() < end {
                    let line = format!("{} and {};\n", bytes.len() / 64, random.below(99));
                    bytes.extend_from_slice(line.as_bytes());
                }
                bytes.truncate(end);
            }
        }
    }
    bytes
}

/// Writes `bytes` and compresses them to an image; returns its path.
fn image(dir: &Path, bytes: &[u8], options: &str) -> PathBuf {
    std::fs::write(dir.join("source"), bytes).expect("a file in the test's own directory");
    let arguments = "convert -c -W -m 8 -f raw -O qcow2 -o";
    let mut arguments: Vec<_> = arguments.split(' ').collect();
    arguments.extend([options, "source", "packed"]);
    qemu_ok("qemu-img", dir, &arguments);
    dir.join("packed")
}

async fn open(path: &Path, options: OpenOptions) -> Arc<Qcow2> {
    let direct = FileOptions::default()
        .direct(true)
        .read_only(options.read_only);
    let buffered = direct.clone().direct(false);
    // Not every file system has direct I/O.
    let file = FileStorage::open(path, &direct).or_else(|_| FileStorage::open(path, &buffered));
    let file = file.expect("the test's own file");
    let image = Qcow2::open(file, Arc::new(DenyAll), options).await;
    image.expect("an image of qemu-img's")
}

/// Runs `work` on lanes of their own with the image open in all of them.
fn on_lanes<F>(path: &Path, options: OpenOptions, work: fn(Arc<Qcow2>, u64, Arc<Vec<u8>>) -> F)
where
    F: Future<Output = ()> + 'static,
{
    let bytes = std::fs::read(path.with_file_name("source")).expect("written before");
    let bytes = Arc::new(bytes);
    let path = path.to_owned();
    lane::block_on(async move {
        let image = open(&path, options).await;
        let threads = (0..LANES).map(|lane| {
            let (image, bytes) = (image.clone(), bytes.clone());
            thread::spawn(move || lane::block_on(work(image, lane, bytes)))
        });
        for thread in threads.collect::<Vec<_>>() {
            thread.join().expect("no assertion failed");
        }
        image.close().await.expect("closes");
    });
}

async fn read(image: &Qcow2, offset: u64, len: u64) -> Result<Buffer, Error> {
    image.read(offset, Buffer::for_read(len as usize)).await
}

/// Reads here and there, many at a time, some ranges again and again.
async fn compare_at_random(image: Arc<Qcow2>, lane: u64, bytes: Arc<Vec<u8>>) {
    let mut random = Random::new(lane + 100);
    let size = bytes.len() as u64;
    for round in 0..40 {
        let most = [4096, 20_000, 70_000, 300_000][round % 4];
        let requests = (0..16).map(|_| {
            let start = match random.below(3) {
                0 => random.below(size / 8),
                _ => random.below(size),
            };
            start..(start + 1 + random.below(most)).min(size)
        });
        let requests: Vec<_> = requests.collect();
        let reads = requests
            .iter()
            .map(|range| read(&image, range.start, range.end - range.start));
        for (range, result) in requests.iter().zip(join_all(reads).await) {
            let expected = &bytes[range.start as usize..range.end as usize];
            assert!(result.expect("reads")[..] == *expected, "{range:?}");
        }
    }
}

#[test]
fn any_requests_see_the_source() {
    for kind in KINDS {
        for (cluster_bits, extended) in [(12, false), (16, false), (17, true), (21, false)] {
            let dir = tempfile::tempdir().expect("a directory");
            let size = if cluster_bits == 12 {
                3 << 20
            } else {
                12 << 20
            };
            // Of the last cluster the device has only a part.
            let bytes = source(size + 5 * 512, cluster_bits);
            let mut options = format!("compression_type={kind},cluster_size={}", 1 << cluster_bits);
            if extended {
                options += ",extended_l2=on";
            }
            let path = image(dir.path(), &bytes, &options);
            for budget in [None, Some(0), Some(3 << cluster_bits)] {
                let options = OpenOptions::default()
                    .read_only(true)
                    .decompressed_cache_size_bytes(budget);
                on_lanes(&path, options, compare_at_random);
            }
        }
    }
}

/// Overwrites and reads the clusters of one lane, which others leave alone.
async fn overwrite_at_random(image: Arc<Qcow2>, lane: u64, bytes: Arc<Vec<u8>>) {
    const CLUSTER: u64 = 1 << 16;
    let mut bytes = (*bytes).clone();
    let mut random = Random::new(lane + 7);
    let clusters = bytes.len() as u64 / CLUSTER / LANES;
    for step in 0..400 {
        let cluster = random.below(clusters) * LANES + lane;
        let inside = random.below(CLUSTER);
        let len = 1 + random.below(CLUSTER - inside);
        let start = cluster * CLUSTER + inside;
        let part = &mut bytes[start as usize..(start + len) as usize];
        match random.below(8) {
            0 => {
                part.fill(random.next() as u8);
                let buffer = Buffer::copy_of(part);
                let written = image.write(start, buffer, RequestFlags::default()).await;
                written.expect("writes");
            }
            1 if step % 4 == 0 => image.flush().await.expect("flushes"),
            _ => {
                let result = read(&image, start, len).await.expect("reads");
                assert!(result[..] == *part, "{start} {len}");
            }
        }
    }
    for cluster in (lane..clusters * LANES).step_by(LANES as usize) {
        let start = cluster * CLUSTER;
        let result = read(&image, start, CLUSTER).await.expect("reads");
        assert!(result[..] == bytes[start as usize..(start + CLUSTER) as usize]);
    }
}

#[test]
fn overwritten_clusters_give_their_space_away() {
    for kind in KINDS {
        let dir = tempfile::tempdir().expect("a directory");
        let bytes = source(12 << 20, 3);
        let path = image(dir.path(), &bytes, &format!("compression_type={kind}"));
        let options = OpenOptions::default().discard(true);
        on_lanes(&path, options, overwrite_at_random);
        let verdict = qemu_verdict(&path);
        assert_eq!(verdict.exit_code, 0, "{:?}", verdict.messages);
    }
}

fn number(bytes: &[u8], offset: u64) -> u64 {
    let bytes = &bytes[offset as usize..offset as usize + 8];
    u64::from_be_bytes(bytes.try_into().expect("eight bytes"))
}

/// Where the L2 entry of a cluster lies, in an image with 64 KiB clusters.
fn entry_of(file: &[u8], cluster: u64) -> u64 {
    let table = number(file, number(file, 40)) & 0xff_ffff_ffff_fe00;
    table + cluster * 8
}

/// Damages one cluster; returns what reads of it and around it say.
fn after(path: &Path, damage: fn(&mut Vec<u8>, u64)) -> Vec<Result<Buffer, Error>> {
    const CLUSTER: u64 = 1 << 16;
    let mut file = std::fs::read(path).expect("the image");
    let entry = entry_of(&file, 5);
    damage(&mut file, entry);
    let copy = path.with_file_name("damaged");
    std::fs::write(&copy, file).expect("the copy");
    lane::block_on(async {
        let options = OpenOptions::default().read_only(true);
        let image = open(&copy, options).await;
        let mut results = Vec::new();
        let ranges = [
            (5, 4096),
            (5, CLUSTER),
            (4, 3 * CLUSTER),
            (4, CLUSTER),
            (6, 10),
        ];
        for (cluster, len) in ranges.into_iter().chain(ranges) {
            results.push(read(&image, cluster * CLUSTER, len).await);
        }
        results
    })
}

#[test]
fn damaged_data_is_an_error_of_its_cluster_alone() {
    for kind in KINDS {
        let dir = tempfile::tempdir().expect("a directory");
        let mut random = Random::new(1);
        let bytes: Vec<u8> = (0..1 << 20).map(|_| random.below(17) as u8).collect();
        let path = image(dir.path(), &bytes, &format!("compression_type={kind}"));
        let broken = after(&path, |file, entry| {
            let start = number(file, entry) & ((1 << 54) - 1);
            // No block of deflate begins like this, and no frame of zstd's.
            file[start as usize..start as usize + 40].fill(0xff);
        });
        let cut = after(&path, |file, entry| {
            let one_sector = number(file, entry) & !(0xff << 54);
            file[entry as usize..entry as usize + 8].copy_from_slice(&one_sector.to_be_bytes());
        });
        for results in [&broken, &cut] {
            for results in results.chunks(5) {
                assert!(results[3].is_ok() && results[4].is_ok());
                for result in &results[1..3] {
                    let error = result.as_ref().expect_err("damaged");
                    assert_eq!(error.kind(), ErrorKind::Corrupt);
                    assert!(error.to_string().contains("compressed cluster"), "{error}");
                }
            }
        }
        assert!(broken[0].is_err());
    }
}

/// The lengths of the reads that `requests`, made at once, cause.
fn reads_of(image: &Qcow2, trace: &TraceStorage, requests: &[(u64, u64)]) -> Vec<u64> {
    lane::block_on(async {
        trace.take();
        let reads = requests
            .iter()
            .map(|&(offset, len)| read(image, offset, len));
        for result in join_all(reads).await {
            result.expect("reads");
        }
        let reads = trace.matching(&Matching::operation(Operation::Read));
        reads.iter().map(|record| record.call.len_bytes).collect()
    })
}

/// An image that holds `bytes`, compressed by us: qemu-img packs clusters in the order in
/// which its threads finish, and how many reads they take depends on that.
async fn packed_in_order(bytes: &[u8], cluster: u64) -> Arc<TraceStorage> {
    let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = CreateOptions::default().size_bytes(bytes.len() as u64);
    create(file.clone(), None, &options).await.expect("creates");
    let gate = Arc::new(DenyAll);
    let image = Qcow2::open(file.clone(), gate, OpenOptions::default()).await;
    let image = image.expect("opens");
    for (start, cluster) in (0..)
        .step_by(cluster as usize)
        .zip(bytes.chunks(cluster as usize))
    {
        let flags = RequestFlags::default();
        let written = image.write_compressed(start, Buffer::copy_of(cluster), flags);
        written.await.expect("writes");
    }
    image.close().await.expect("closes");
    TraceStorage::new(file)
}

#[test]
fn few_and_short_reads_are_enough() {
    const CLUSTER: u64 = 1 << 16;
    let mut random = Random::new(5);
    // About half of it is left when compressed.
    let bytes: Vec<u8> = (0..4 << 20).map(|_| random.below(16) as u8).collect();
    let trace = lane::block_on(packed_in_order(&bytes, CLUSTER));
    let options = OpenOptions::default().decompressed_cache_size_bytes(Some(3 * CLUSTER));
    let gate = Arc::new(DenyAll);
    let image = lane::block_on(Qcow2::open(trace.clone(), gate, options)).expect("opens");
    reads_of(&image, &trace, &[(60 * CLUSTER, 1)]);

    let lens = reads_of(&image, &trace, &[(1000, 4096)]);
    assert!(lens.len() == 1 && lens[0] < 8192, "a beginning: {lens:?}");
    // As many at a time as the cache can hold.
    let lens = reads_of(&image, &trace, &[(0, 16 * CLUSTER)]);
    assert!(lens.len() <= 6, "clusters side by side: {lens:?}");

    let same: Vec<_> = (0..16).map(|n| (20 * CLUSTER + n * 4096, 4096)).collect();
    let lens = reads_of(&image, &trace, &same);
    assert!(lens.len() <= 2, "one beginning, or all of it too: {lens:?}");
    assert!(reads_of(&image, &trace, &same).is_empty(), "kept");
    let others: Vec<_> = (30..60).map(|n| (n * CLUSTER, 512)).collect();
    for _ in 0..5 {
        for &one in &others {
            reads_of(&image, &trace, &[one]);
        }
    }
    assert!(reads_of(&image, &trace, &same).is_empty(), "a scan goes by");
}
