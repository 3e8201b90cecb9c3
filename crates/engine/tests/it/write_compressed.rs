//! Compressed clusters that this engine writes: the real qemu-img finds nothing wrong
//! with them and reads what was written, whatever wrote to the same clusters before
//! and after; they lie in the order of the requests, in no more room than QEMU's take.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{Random, open, qemu_ok, qemu_verdict};
use futures_util::future::join_all;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{CompressionOptions, OpenOptions, Qcow2};
use vellum::raw::RawOptions;
use vellum::{BlockDevice, Buffer, ErrorKind, Raw, RequestFlags, Storage, ZeroRequest};
use vellum_io::lane;
use vellum_storage::MemStorage;
use vellum_storage::file::Create;
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};

/// Text, noise and zeroes, in stretches that end anywhere.
fn source(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let end = (bytes.len() + 1 + random.below(100_000) as usize).min(len);
        match random.below(5) {
            0 => bytes.resize(end, 0),
            1 => bytes.resize_with(end, || random.below(256) as u8),
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

async fn open_image(file: Arc<dyn Storage>, compression: CompressionOptions) -> Arc<Qcow2> {
    let options = OpenOptions::default()
        .compression(compression)
        .discard(true);
    let opened = Qcow2::open(file, Arc::new(DenyAll), options).await;
    opened.expect("an image that qemu-img or this engine made")
}

/// Makes an image with qemu-img; returns its path.
fn new_image(dir: &Path, options: &str, size: usize) -> PathBuf {
    let size = size.to_string();
    let words = ["create", "-q", "-f", "qcow2", "-o", options, "image", &size];
    qemu_ok("qemu-img", dir, &words);
    dir.join("image")
}

/// Writes all of `bytes` compressed, `chunk` bytes a request, some requests at a time.
fn write_all(path: &Path, bytes: &[u8], chunk: usize, compression: CompressionOptions) {
    lane::block_on(async {
        let image = open_image(open(path, Create::No), compression).await;
        let chunks: Vec<_> = bytes.chunks(chunk).enumerate().collect();
        for together in chunks.chunks(7) {
            let writes = together.iter().map(|(index, chunk_bytes)| {
                let at = (index * chunk) as u64;
                image.write_compressed(at, Buffer::copy_of(chunk_bytes), RequestFlags::default())
            });
            for (written, (_, chunk_bytes)) in join_all(writes).await.into_iter().zip(together) {
                assert!(
                    written.expect("writes")[..] == **chunk_bytes,
                    "the buffer comes back"
                );
            }
        }
        image.close().await.expect("closes");
    });
}

fn assert_sound(path: &Path) {
    let verdict = qemu_verdict(path);
    assert_eq!(verdict.exit_code, 0, "{:?}", verdict.messages);
}

#[test]
fn qemu_reads_what_was_written() {
    for (options, cluster, compression) in [
        ("cluster_size=64k", 65536, CompressionOptions::default()),
        (
            "cluster_size=64k,compression_type=zstd",
            65536,
            CompressionOptions::default(),
        ),
        (
            "cluster_size=64k",
            65536,
            CompressionOptions::default().level(None).small_window(true),
        ),
        (
            "cluster_size=16k,extended_l2=on",
            16384,
            CompressionOptions::default()
                .level(Some(12))
                .small_window(false),
        ),
        ("cluster_size=512", 512, CompressionOptions::default()),
        (
            "cluster_size=4k,refcount_bits=1",
            4096,
            CompressionOptions::default(),
        ),
        (
            "cluster_size=4k,refcount_bits=2",
            4096,
            CompressionOptions::default(),
        ),
        (
            "cluster_size=4k,lazy_refcounts=on",
            4096,
            CompressionOptions::default(),
        ),
        (
            "cluster_size=4k,compat=0.10",
            4096,
            CompressionOptions::default(),
        ),
        (
            "cluster_size=2M,compression_type=zstd",
            2 << 20,
            CompressionOptions::default(),
        ),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        // Of the last cluster the device has only a part.
        let size = cluster.max(32768) * 61 + 512;
        let bytes = source(size, cluster as u64);
        std::fs::write(dir.path().join("source"), &bytes).expect("a file");
        let path = new_image(dir.path(), options, size);
        write_all(&path, &bytes, cluster.max(32768) * 3, compression);
        assert_sound(&path);
        let words = ["compare", "-f", "raw", "-F", "qcow2", "source", "image"];
        qemu_ok("qemu-img", dir.path(), &words);
    }
}

#[test]
fn no_more_room_is_taken_than_qemu_takes() {
    let dir = tempfile::tempdir().expect("a directory");
    // Without noise: clusters that stay as they are lie between the others, and QEMU
    // too leaves the rest of a cluster then.
    let bytes: Vec<u8> = source(24 << 20, 9).iter().map(|byte| byte % 64).collect();
    std::fs::write(dir.path().join("source"), &bytes).expect("a file");
    // The levels are those that make as much of it as QEMU's.
    for (kind, level) in [("zlib", 6), ("zstd", 3)] {
        let compression = CompressionOptions::default()
            .level(Some(level))
            .small_window(false);
        let options = format!("compression_type={kind}");
        let words = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options];
        let words = [&words[..], &["source", "theirs"]].concat();
        qemu_ok("qemu-img", dir.path(), &words);
        let path = new_image(dir.path(), &options, bytes.len());
        write_all(&path, &bytes, 512 << 10, compression);
        assert_sound(&path);
        let len = |name: &str| {
            std::fs::metadata(dir.path().join(name))
                .expect("a file")
                .len()
        };
        let (ours, theirs) = (len("image"), len("theirs"));
        assert!(
            ours <= theirs + theirs / 100,
            "{kind}: {ours} and {theirs} bytes"
        );
        assert!(ours.is_multiple_of(512), "the file ends with a sector");
    }
}

/// Host offsets of the compressed data of the clusters of an image with one L2 table
/// and 64 KiB clusters; `None` for what is not compressed.
fn hosts(path: &Path) -> Vec<Option<u64>> {
    let file = std::fs::read(path).expect("the image");
    let word = |at: u64| {
        let bytes = &file[at as usize..at as usize + 8];
        u64::from_be_bytes(bytes.try_into().expect("eight bytes"))
    };
    let table = word(word(40)) & 0xff_ffff_ffff_fe00;
    let entries = (0..8192).map(|index| word(table + index * 8));
    let host = |entry: u64| (entry >> 62 & 1 == 1).then_some(entry & ((1 << 54) - 1));
    entries.map(host).collect()
}

#[test]
fn data_lies_in_the_order_of_the_requests_and_end_to_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let bytes: Vec<u8> = source(16 << 20, 4).iter().map(|byte| byte % 32).collect();
    let path = new_image(dir.path(), "cluster_size=64k", bytes.len());
    write_all(&path, &bytes, 256 << 10, CompressionOptions::default());
    let hosts: Vec<u64> = hosts(&path).into_iter().flatten().collect();
    assert_eq!(hosts.len(), 256);
    assert!(hosts.is_sorted(), "{hosts:?}");
    // Each begins where the one before ends, which is less than a cluster away.
    // (The L2 table has come between once.)
    let gaps = hosts.windows(2).filter(|pair| pair[1] - pair[0] >= 65536);
    assert!(gaps.count() <= 1);
    assert!(hosts.iter().any(|host| !host.is_multiple_of(512)));
}

#[test]
fn noise_is_stored_as_it_is() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut random = Random::new(3);
    let mut bytes: Vec<u8> = (0..1 << 20).map(|_| random.below(256) as u8).collect();
    bytes[5 << 16..6 << 16].fill(7);
    let path = new_image(dir.path(), "cluster_size=64k", bytes.len());
    write_all(&path, &bytes, 1 << 20, CompressionOptions::default());
    assert_sound(&path);
    let hosts = hosts(&path);
    let compressed: Vec<usize> = (0..16)
        .filter(|&cluster| hosts[cluster].is_some())
        .collect();
    assert_eq!(compressed, [5]);
}

/// A cluster's content by one byte; every cluster is written by one request at a time.
async fn change_at_random(image: Arc<Qcow2>, cluster: u64, count: u64, seed: u64) {
    let mut random = Random::new(seed);
    let mut model = vec![0_u8; count as usize];
    for round in 0..300 {
        let mut free: Vec<u64> = (0..count).collect();
        let mut requests = Vec::new();
        for _ in 0..6 {
            let first = free.swap_remove(random.below(free.len() as u64) as usize);
            let kind = random.below(8);
            let value = match kind {
                0..=1 => 0,
                _ => random.below(255) as u8 + 1,
            };
            model[first as usize] = value;
            let image = image.clone();
            requests.push(async move {
                let at = first * cluster;
                let mut buffer = Buffer::zeroed(cluster as usize);
                buffer.fill(value);
                let zero = ZeroRequest::default().may_unmap(true);
                let changed = match kind {
                    0 => image.discard(at, cluster).await,
                    1 => image.write_zeroes(at, cluster, zero).await,
                    2..=3 => image
                        .write(at, buffer, RequestFlags::default())
                        .await
                        .map(drop),
                    _ => image
                        .write_compressed(at, buffer, RequestFlags::default())
                        .await
                        .map(drop),
                };
                changed.expect("changes");
            });
        }
        join_all(requests).await;
        if round % 5 == 0 {
            image.flush().await.expect("flushes");
        }
        let looked_at = random.below(count);
        let buffer = Buffer::for_read(cluster as usize);
        let read = image
            .read(looked_at * cluster, buffer)
            .await
            .expect("reads");
        let expected = model[looked_at as usize];
        assert!(read.iter().all(|&byte| byte == expected), "round {round}");
    }
    for (index, &expected) in model.iter().enumerate() {
        let buffer = Buffer::for_read(cluster as usize);
        let read = image.read(index as u64 * cluster, buffer).await;
        assert!(
            read.expect("reads").iter().all(|&byte| byte == expected),
            "{index}"
        );
    }
}

#[test]
fn clusters_are_replaced_again_and_again() {
    for (options, cluster) in [
        ("cluster_size=512", 512),
        ("cluster_size=4k,refcount_bits=1", 4096),
        ("cluster_size=4k,refcount_bits=2", 4096),
        (
            "cluster_size=16k,extended_l2=on,compression_type=zstd",
            16384,
        ),
        ("cluster_size=64k", 65536),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let count = 40;
        let path = new_image(dir.path(), options, (cluster * count) as usize);
        lane::block_on(async {
            let image = open_image(open(&path, Create::No), CompressionOptions::default()).await;
            change_at_random(image.clone(), cluster, count, cluster + 1).await;
            image.close().await.expect("closes");
        });
        assert_sound(&path);
    }
}

#[test]
fn what_fails_gives_its_place_back() {
    lane::block_on(async {
        let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let options = CreateOptions::default()
            .size_bytes(1 << 20)
            .cluster_size_bytes(4096);
        create(memory.clone(), None, &options)
            .await
            .expect("memory takes all");
        let file = FaultStorage::new(memory.clone());
        let image = open_image(file.clone(), CompressionOptions::default()).await;
        let buffer = |value: u8| {
            let mut buffer = Buffer::zeroed(8192);
            buffer.fill(value);
            buffer
        };
        let first = image
            .write_compressed(0, buffer(1), RequestFlags::default())
            .await;
        first.expect("nothing fails yet");
        image.flush().await.expect("nothing fails yet");
        file.fail(
            Matching::operation(Operation::Write),
            0,
            Times::Once,
            libc_eio(),
        );
        let second = image
            .write_compressed(8192, buffer(2), RequestFlags::default())
            .await;
        assert_eq!(second.unwrap_err().errno(), libc_eio());
        // What was written before, in the same sector, is still there; and so is room.
        let third = image
            .write_compressed(16384, buffer(3), RequestFlags::default())
            .await;
        third.expect("the fault has struck");
        image.close().await.expect("closes");
        let report = check(memory.clone(), &CheckOptions::default())
            .await
            .expect("checks");
        assert_eq!((report.corruptions, report.leaks), (0, 0));
        let image = open_image(memory, CompressionOptions::default()).await;
        for (at, expected) in [(0, 1), (8192, 0), (16384, 3)] {
            let read = image.read(at, Buffer::for_read(8192)).await.expect("reads");
            assert!(read.iter().all(|&byte| byte == expected), "{at}");
        }
    });
}

fn libc_eio() -> i32 {
    5
}

#[test]
fn what_cannot_be_compressed_is_refused() {
    lane::block_on(async {
        let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let options = CreateOptions::default().size_bytes(1 << 20);
        create(memory.clone(), None, &options)
            .await
            .expect("memory takes all");
        let image = open_image(memory, CompressionOptions::default()).await;
        for (at, len) in [(512, 65536), (0, 512), (65536, 65537)] {
            let refused = image
                .write_compressed(at, Buffer::zeroed(len), RequestFlags::default())
                .await;
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        let refused = image
            .write_compressed(1 << 20, Buffer::zeroed(65536), RequestFlags::default())
            .await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::OutOfRange);

        let data: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let options = options.data_file(Some("data".into()));
        let created = create(memory.clone(), Some(data.clone()), &options).await;
        created.expect("memory takes all");
        let options = OpenOptions::default().data_file(Some(data));
        let image = Qcow2::open(memory, Arc::new(DenyAll), options)
            .await
            .expect("opens");
        let refused = image
            .write_compressed(0, Buffer::zeroed(65536), RequestFlags::default())
            .await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported);

        let bytes: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(vec![0; 65536]));
        let raw = Raw::open(bytes, RawOptions::default()).expect("opens");
        let refused = raw
            .write_compressed(0, Buffer::zeroed(65536), RequestFlags::default())
            .await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported);
    });
}
