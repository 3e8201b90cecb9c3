//! Places of fixed length, and how far a file grows: an image of the fully allocated size takes every
//! sequence of writes and discards, no file grows while freed clusters can be used, and a process
//! that is killed leaks little, which the next opening frees.

use std::sync::Arc;

use crate::common::{Random, run_on_memory as run};
use futures_util::future::join_all;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, CheckReport, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Buffers, RequestFlags, Storage, ZeroRequest};
use vellum_io::{Error, Io};
use vellum_storage::wrap::SmallStorage;
use vellum_storage::{Capabilities, MemStorage, WriteFlags, ZeroFlags, delegate};

const ENOSPC: i32 = 28;

/// A device: nothing is written behind its end.
#[derive(Debug)]
struct Device {
    bytes: MemStorage,
    len_bytes: u64,
}

impl Device {
    fn new(len_bytes: u64) -> Arc<Device> {
        let bytes = MemStorage::with_bytes(vec![0; len_bytes as usize]);
        Arc::new(Device { bytes, len_bytes })
    }

    fn refuse(&self, end_bytes: u64) -> Option<Error> {
        (end_bytes > self.len_bytes).then(|| Error::from_errno("write", ENOSPC))
    }
}

impl Storage for Device {
    delegate!(bytes: name, len_bytes, read, discard, flush, block_status);

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            growable: false,
            has_zero_init: false,
            ..self.bytes.capabilities()
        }
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let len_bytes: u64 = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        match self.refuse(offset_bytes + len_bytes) {
            Some(error) => Io::ready(Err(error)),
            None => self.bytes.write(offset_bytes, buffers, flags),
        }
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        match self.refuse(offset_bytes + len_bytes) {
            Some(error) => Io::ready(Err(error)),
            None => self.bytes.write_zeroes(offset_bytes, len_bytes, flags),
        }
    }

    fn truncate(&self, _: u64) -> Io<()> {
        Io::ready(Err(Error::from_errno("truncate", 22)))
    }
}

/// What `measure` calls fully allocated.
fn full_bytes(options: &CreateOptions) -> u64 {
    let cluster = options.cluster_size_bytes;
    let entry = if options.extended_l2 { 16 } else { 8 };
    let data = options.size_bytes.div_ceil(cluster);
    let tables = data.div_ceil(cluster / entry);
    let used = 1 + (tables * 8).div_ceil(cluster) + tables + data;
    let per_block = cluster * 8 / options.refcount_bits;
    let (mut blocks, mut table) = (0, 0);
    loop {
        let next = (used + blocks + table).div_ceil(per_block);
        let next_table = (next * 8).div_ceil(cluster);
        if (next, next_table) == (blocks, table) {
            return (used + blocks + table) * cluster;
        }
        (blocks, table) = (next, next_table);
    }
}

fn geometry(random: &mut Random) -> CreateOptions {
    let extended_l2 = random.below(3) == 0;
    let least = if extended_l2 { 14 } else { 9 };
    let bits = least + random.below(18 - least);
    CreateOptions::default()
        .size_bytes((40 + random.below(100)) << bits)
        .cluster_size_bytes(1 << bits)
        .extended_l2(extended_l2)
        .refcount_bits(1 << random.below(7))
}

async fn open(storage: Arc<dyn Storage>) -> Arc<Qcow2> {
    let options = OpenOptions::default().discard(true);
    Qcow2::open(storage, Arc::new(DenyAll), options)
        .await
        .expect("a sound image")
}

async fn verdict(storage: Arc<dyn Storage>) -> CheckReport {
    let options = CheckOptions::default()
        .on_finding(Some(Arc::new(|finding| println!("{}", finding.message))));
    let report = check(storage, &options).await.expect("it can be checked");
    assert_eq!((report.corruptions, report.check_errors), (0, 0));
    report
}

fn filled(len_bytes: u64, value: u8) -> Buffer {
    let mut buffer = Buffer::zeroed(len_bytes as usize);
    buffer.fill(value);
    buffer
}

fn shuffled(count: u64, random: &mut Random) -> Vec<u64> {
    let mut order: Vec<u64> = (0..count).collect();
    for at in (1..count as usize).rev() {
        order.swap(at, random.below(at as u64 + 1) as usize);
    }
    order
}

/// Writes whole clusters, some at a time.
async fn write_all(image: &Qcow2, clusters: &[u64], cluster: u64, value: u8, depth: usize) {
    for some in clusters.chunks(depth) {
        let flags = RequestFlags::default();
        let end = image.size_bytes();
        let writes = some.iter().map(|index| {
            let at = index * cluster;
            image.write(at, filled(cluster.min(end - at), value), flags)
        });
        for written in join_all(writes).await {
            written.expect("there is room for all clusters");
        }
    }
}

async fn every_cluster_in_any_order(seed: u64) {
    let mut random = Random::new(seed);
    let options = geometry(&mut random);
    let device = Device::new(full_bytes(&options));
    create(device.clone(), None, &options).await.expect("room");
    println!("seed {seed}: {options:?} in {}", full_bytes(&options));
    let image = open(device.clone()).await;
    let cluster = options.cluster_size_bytes;
    let count = options.size_bytes.div_ceil(cluster);
    let depth = 1 + random.below(8) as usize;
    let order = shuffled(count, &mut random);
    write_all(&image, &order, cluster, 1, depth).await;
    for round in 0..6 {
        let first = random.below(count);
        let len = 1 + random.below(count - first);
        let range = first * cluster..((first + len) * cluster).min(options.size_bytes);
        let dropped = match random.below(2) {
            0 => image.discard(range.start, range.end - range.start).await,
            _ => {
                let request = ZeroRequest::default().may_unmap(true);
                let len_bytes = range.end - range.start;
                image.write_zeroes(range.start, len_bytes, request).await
            }
        };
        dropped.expect("nothing is needed for that");
        if random.below(2) == 0 {
            image.flush().await.expect("a flush");
        }
        let mut again: Vec<u64> = (first..first + len).collect();
        if random.below(2) == 0 {
            again = shuffled(len, &mut random)
                .iter()
                .map(|at| first + at)
                .collect();
        }
        write_all(&image, &again, cluster, round + 2, depth).await;
    }
    let read = image.read(0, Buffer::for_read(options.size_bytes as usize));
    let bytes = read.await.expect("a read");
    assert!(bytes.iter().all(|&byte| byte > 0), "seed {seed}");
    image.close().await.expect("a close");
    assert_eq!(verdict(device).await.leaks, 0, "seed {seed}");
}

#[test]
fn an_image_of_the_full_size_takes_every_write() {
    for seed in 0..120 {
        run(every_cluster_in_any_order(seed));
    }
}

/// A file system of which so much is left as the image may still take, by the count of a model.
async fn every_cluster_within_a_quota(seed: u64) {
    let mut random = Random::new(seed);
    let options = CreateOptions::default()
        .size_bytes(4 << 20)
        .cluster_size_bytes(64 << 10);
    let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
    create(memory.clone(), None, &options).await.expect("room");
    let disk = SmallStorage::new(memory.clone());
    disk.note_taken(0..memory.len_bytes().expect("a length"));
    let cluster = options.cluster_size_bytes;
    // One table, and all clusters of the guest.
    disk.set_left_bytes(Some(65 * cluster));
    let image = open(disk.clone()).await;
    let all: Vec<u64> = shuffled(64, &mut random);
    write_all(&image, &all, cluster, 1, 4).await;
    for round in 0..8 {
        let first = random.below(64);
        let len = 1 + random.below(64 - first);
        let (start, len_bytes) = (first * cluster, len * cluster);
        image.discard(start, len_bytes).await.expect("a discard");
        let again: Vec<u64> = (first..first + len).collect();
        write_all(&image, &again, cluster, round + 2, 4).await;
    }
    image.close().await.expect("a close");
    assert_eq!(verdict(memory).await.leaks, 0, "seed {seed}");
}

#[test]
fn freed_room_of_a_full_file_system_is_used_again() {
    for seed in 0..40 {
        run(every_cluster_within_a_quota(seed));
    }
}

/// Discards and writes without a flush: the file grows little beyond what is in use at most.
async fn churn(seed: u64) {
    let mut random = Random::new(seed);
    let cluster = 4096 << random.below(5);
    let count = 24 * 16;
    let options = CreateOptions::default()
        .size_bytes(count * cluster)
        .cluster_size_bytes(cluster);
    let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
    create(memory.clone(), None, &options).await.expect("room");
    let image = open(memory.clone()).await;
    let mut held = vec![false; count as usize];
    let mut peak = 0;
    for round in 0..2000u64 {
        let first = random.below(count);
        let len = 1 + random.below(16.min(count - first));
        let clusters: Vec<u64> = (first..first + len).collect();
        let keeps = round % 3 != 0;
        if keeps {
            write_all(&image, &clusters, cluster, round as u8, 4).await;
        } else {
            let discarded = image.discard(first * cluster, len * cluster);
            discarded.await.expect("a discard");
        }
        clusters.iter().for_each(|&at| held[at as usize] = keeps);
        peak = peak.max(held.iter().filter(|&&held| held).count() as u64);
    }
    image.close().await.expect("a close");
    let report = verdict(memory.clone()).await;
    println!(
        "seed {seed}: {cluster} {peak} {}",
        report.image_end_offset / cluster
    );
    assert_eq!(report.leaks, 0);
    let most = (peak + 8) * cluster * 11 / 10 + (1 << 20);
    let end = report.image_end_offset;
    assert!(
        end <= most,
        "seed {seed}: the file ends at {end}, with {peak} clusters in use"
    );
}

#[test]
fn a_file_under_churn_stays_compact() {
    for seed in 0..12 {
        run(churn(seed));
    }
}

/// A process is killed behind a flush: what its file holds then is all that is left.
async fn killed(seed: u64) {
    let mut random = Random::new(seed);
    let count = 2000;
    // Clusters below 16 KiB have no room for a note.
    let cluster = [512, 4096, 16 << 10, 64 << 10][(seed % 4) as usize];
    let requests = [3, 100][(seed / 4 % 2) as usize];
    let options = CreateOptions::default()
        .size_bytes(count * cluster)
        .cluster_size_bytes(cluster);
    let memory = Arc::new(MemStorage::new());
    create(memory.clone(), None, &options).await.expect("room");
    let image = open(memory.clone()).await;
    for round in 0..8u8 {
        for _ in 0..requests {
            let at = random.below(count);
            let len = 1 + random.below(20.min(count - at));
            match random.below(4) {
                0 => image
                    .discard(at * cluster, len * cluster)
                    .await
                    .expect("a discard"),
                1 => {
                    write_all(
                        &image,
                        &(at..at + len).collect::<Vec<_>>(),
                        cluster,
                        round,
                        8,
                    )
                    .await
                }
                _ => {
                    let flags = RequestFlags::default();
                    let part = filled(4096.min((count - at) * cluster), round);
                    let written = image.write(at * cluster, part, flags);
                    written.await.map(drop).expect("a write");
                }
            }
        }
        image.flush().await.expect("a flush");
        let left: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(memory.snapshot()));
        let leaks = verdict(left.clone()).await.leaks;
        assert!(leaks <= 16, "seed {seed}, round {round}: {leaks} leaks");
        let after = open(left.clone()).await;
        let flags = RequestFlags::default();
        let written = after.write(0, filled(512, 1), flags).await;
        written.expect("a write");
        after.close().await.expect("a close");
        assert_eq!(verdict(left).await.leaks, 0, "seed {seed}, round {round}");
    }
    image.close().await.expect("a close");
    assert_eq!(verdict(memory).await.leaks, 0);
}

#[test]
fn a_killed_process_leaks_little_and_the_next_opening_frees_it() {
    for seed in 0..20 {
        run(killed(seed));
    }
}

/// With lazy refcounts a killed process leaves counts that must all be corrected, in a place without
/// room for others.
async fn killed_when_full(seed: u64) {
    let mut random = Random::new(seed);
    let options = geometry(&mut random).lazy_refcounts(true);
    let len_bytes = full_bytes(&options);
    let device = Device::new(len_bytes);
    create(device.clone(), None, &options).await.expect("room");
    let image = open(device.clone()).await;
    let cluster = options.cluster_size_bytes;
    let order = shuffled(options.size_bytes / cluster, &mut random);
    write_all(&image, &order, cluster, 7, 4).await;
    image.flush().await.expect("a flush");
    let bytes = MemStorage::with_bytes(device.bytes.snapshot());
    let left = Arc::new(Device { bytes, len_bytes });
    let again = open(left.clone()).await;
    write_all(&again, &order, cluster, 8, 4).await;
    again.close().await.expect("a close");
    assert_eq!(verdict(left).await.leaks, 0, "seed {seed}");
    image.close().await.expect("a close");
}

#[test]
fn a_full_image_with_lazy_refcounts_survives_a_kill() {
    for seed in 0..40 {
        run(killed_when_full(seed));
    }
}
