//! Failing storages below the write buffer: what was acknowledged stays readable, a
//! full disk leaves nothing behind once it has room again, and no failure is lost.

use std::sync::Arc;

use crate::common::{Random, fill_disk, run_on_memory as run};
use futures_util::future::join_all;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, CacheOptions, OpenOptions, PreallocateAhead, Qcow2};
use vellum::{BlockDevice, Buffer, RequestFlags, Storage, ZeroRequest};
use vellum_storage::MemStorage;
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};

const ENOSPC: i32 = 28;
const EIO: i32 = 5;
const BLOCK: u64 = 512;

/// A block of the backing file.
fn behind(number: u64) -> [u8; BLOCK as usize] {
    [(number % 251) as u8 + 1; BLOCK as usize]
}

struct Bed {
    memory: Arc<dyn Storage>,
    file: Arc<FaultStorage>,
    image: Arc<Qcow2>,
    size: u64,
    cluster: u64,
}

async fn bed(random: &mut Random) -> Bed {
    let extended_l2 = random.below(2) == 0;
    let cluster = match extended_l2 {
        true => 16384 << random.below(3),
        false => 512 << (3 * random.below(3)),
    };
    let size = cluster * (40 + random.below(200)) + random.below(cluster / BLOCK) * BLOCK;
    let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = CreateOptions::default()
        .size_bytes(size)
        .cluster_size_bytes(cluster)
        .extended_l2(extended_l2)
        .refcount_bits(64)
        .lazy_refcounts(random.below(5) == 0);
    create(memory.clone(), None, &options).await.unwrap();
    let file = FaultStorage::new(memory.clone());
    let len = (random.below(3 * size / 1024) + 1) * BLOCK;
    let below = Arc::new(MemStorage::with_bytes(
        (0..len.min(size) / BLOCK).flat_map(behind).collect(),
    ));
    let options = OpenOptions::default()
        .cache(
            CacheOptions::default()
                .l2_cache_size_bytes(Some(2048))
                .l2_cache_entry_size_bytes(Some(512)),
        )
        .ahead(
            PreallocateAhead::default()
                .after_clusters(random.below(100))
                .max_bytes(cluster << random.below(8)),
        )
        .backing(Backing::Given(
            vellum::Raw::open(below, Default::default()).unwrap(),
        ))
        .data_cache_size_bytes([Some(0), Some(8192), Some(65536), None][random.below(4) as usize])
        .discard(true);
    let image = Qcow2::open(file.clone(), Arc::new(DenyAll), options)
        .await
        .unwrap();
    Bed {
        memory,
        file,
        image,
        size,
        cluster,
    }
}

/// What every block of the guest may hold.
type Model = Vec<Vec<u8>>;

fn model_of(size: u64, backing: &[u8]) -> Model {
    (0..size / BLOCK)
        .map(|block| vec![backing[(block * BLOCK) as usize]])
        .collect()
}

/// Compares blocks from number `from` on with `model`, their part of the model.
fn compare(model: &[Vec<u8>], bytes: &[u8], from: u64, what: &str) {
    for (index, block) in bytes.chunks(BLOCK as usize).enumerate() {
        let number = from as usize + index;
        let allowed = &model[index];
        // Most blocks hold one byte: comparing these whole is what makes this fast.
        let uniform = allowed.contains(&block[0]) && block[1..] == block[..block.len() - 1];
        assert!(
            uniform || block.iter().all(|byte| allowed.contains(byte)),
            "{what}: block {number} holds {:?}, which is none of {allowed:?}",
            &block[..4]
        );
    }
}

/// Several requests side by side on ranges of their own.
async fn batch(bed: &Bed, random: &mut Random, model: &mut Model, errno: i32) {
    let blocks = bed.size / BLOCK;
    let mut from = random.below(blocks);
    let mut requests: Vec<std::pin::Pin<Box<dyn Future<Output = _>>>> = Vec::new();
    while from < blocks && requests.len() < 6 {
        let first = from + random.below((blocks - from).min(64));
        let count = (random.below(24) + 1).min(blocks - first);
        from = first + count;
        let (offset, len) = (first * BLOCK, count * BLOCK);
        let image = bed.image.clone();
        let fill = random.below(250) as u8 + 1;
        let choice = random.below(10);
        let fua = random.below(12) == 0;
        let old: Model = model[first as usize..from as usize].to_vec();
        requests.push(Box::pin(async move {
            match choice {
                0 => {
                    let zero = ZeroRequest::default().may_unmap(true).fua(fua);
                    let result = image.write_zeroes(offset, len, zero).await;
                    (first, count, 0, result)
                }
                1 | 2 => {
                    let result = image.read(offset, Buffer::for_read(len as usize)).await;
                    if let Ok(bytes) = &result {
                        compare(&old, bytes, first, "read");
                    }
                    (first, 0, 0, result.map(drop))
                }
                _ => {
                    let mut buffer = Buffer::zeroed(len as usize);
                    buffer.fill(fill);
                    let result = image
                        .write(offset, buffer, RequestFlags::default().fua(fua))
                        .await;
                    (first, count, fill, result.map(drop))
                }
            }
        }));
    }
    for (first, count, fill, result) in join_all(requests).await {
        let touched = &mut model[first as usize..(first + count) as usize];
        match result {
            Ok(()) => touched.iter_mut().for_each(|seen| *seen = vec![fill]),
            Err(error) => {
                assert_eq!(error.errno(), errno, "{error}");
                touched.iter_mut().for_each(|seen| seen.push(fill));
            }
        }
    }
    if random.below(5) == 0
        && let Err(error) = bed.image.flush().await
    {
        assert_eq!(error.errno(), errno, "{error}");
    }
}

async fn read_all(bed: &Bed) -> Buffer {
    bed.image
        .read(0, Buffer::for_read(bed.size as usize))
        .await
        .unwrap()
}

async fn full_disk(seed: u64) {
    let mut random = Random::new(seed);
    let bed = bed(&mut random).await;
    let first = read_all(&bed).await;
    let mut model = model_of(bed.size, &first);
    for _ in 0..12 {
        if random.below(3) != 0 {
            fill_disk(&bed.file, &mut random);
        }
        for _ in 0..10 {
            batch(&bed, &mut random, &mut model, ENOSPC).await;
        }
        let seen = read_all(&bed).await;
        compare(&model, &seen, 0, "after failures");
        bed.file.heal();
        if random.below(3) == 0 {
            bed.image.flush().await.unwrap();
        }
    }
    bed.image.close().await.unwrap();
    let seen = bed
        .image
        .read(0, Buffer::for_read(bed.size as usize))
        .await
        .unwrap();
    compare(&model, &seen, 0, "after the close");
    let options = CheckOptions::default()
        .on_finding(Some(Arc::new(|finding| println!("{}", finding.message))));
    let report = check(bed.memory.clone(), &options).await.unwrap();
    assert_eq!(
        (report.corruptions, report.check_errors, report.leaks),
        (0, 0, 0),
        "clusters of {}",
        bed.cluster
    );
}

#[test]
fn a_full_disk_below_the_data_cache_leaves_nothing_behind() {
    for seed in 0..150 {
        run(full_disk(seed));
    }
}

/// Reads that fail for once, of metadata and of data: nothing is lost or leaked.
async fn failing_reads(seed: u64) {
    let mut random = Random::new(seed);
    let bed = bed(&mut random).await;
    let first = read_all(&bed).await;
    let mut model = model_of(bed.size, &first);
    for _ in 0..12 {
        let pass = random.below(30) as usize;
        bed.file
            .fail(Matching::operation(Operation::Read), pass, Times::Once, EIO);
        for _ in 0..10 {
            batch(&bed, &mut random, &mut model, EIO).await;
        }
        bed.file.heal();
        let seen = read_all(&bed).await;
        compare(&model, &seen, 0, "after failures");
    }
    bed.image.flush().await.unwrap();
    bed.image.close().await.unwrap();
    let options = CheckOptions::default()
        .on_finding(Some(Arc::new(|finding| println!("{}", finding.message))));
    let report = check(bed.memory.clone(), &options).await.unwrap();
    assert_eq!((report.corruptions, report.check_errors), (0, 0));
    assert_eq!(report.leaks, 0, "clusters of {}", bed.cluster);
}

#[test]
fn failing_reads_lose_and_leak_nothing() {
    for seed in 0..200 {
        run(failing_reads(seed));
    }
}

/// Required writes that fail with EIO: whoever closes without a flush must learn of
/// it, and until then everything that was acknowledged can be read.
async fn no_failure_is_lost(seed: u64) {
    let mut random = Random::new(seed);
    let bed = bed(&mut random).await;
    let first = read_all(&bed).await;
    let model = &mut model_of(bed.size, &first);
    let operation = match random.below(3) {
        0 => Operation::Flush,
        _ => Operation::Write,
    };
    let pass = random.below(60) as usize;
    bed.file
        .fail(Matching::operation(operation), pass, Times::Always, EIO);
    let mut acknowledged = 0;
    for _ in 0..40 {
        let first = random.below(bed.size / BLOCK);
        let fill = random.below(250) as u8 + 1;
        let mut buffer = Buffer::zeroed(BLOCK as usize);
        buffer.fill(fill);
        match bed
            .image
            .write(first * BLOCK, buffer, RequestFlags::default())
            .await
        {
            Ok(_) => {
                acknowledged += 1;
                model[first as usize] = vec![fill];
            }
            Err(_) => model[first as usize].push(fill),
        }
    }
    let seen = read_all(&bed).await;
    compare(model, &seen, 0, "while failing");
    let closed = bed.image.close().await;
    bed.file.heal();
    if closed.is_err() || acknowledged == 0 {
        return;
    }
    let below = Arc::new(MemStorage::with_bytes(first.to_vec()));
    let options = OpenOptions::default()
        .read_only(true)
        .backing(Backing::Given(
            vellum::Raw::open(below, Default::default()).unwrap(),
        ));
    let again = Qcow2::open(bed.memory.clone(), Arc::new(DenyAll), options)
        .await
        .unwrap();
    let seen = again
        .read(0, Buffer::for_read(bed.size as usize))
        .await
        .unwrap();
    compare(model, &seen, 0, "close() reported success, but");
}

#[test]
fn a_close_that_succeeds_has_written_everything() {
    for seed in 0..150 {
        run(no_failure_is_lost(seed));
    }
}
