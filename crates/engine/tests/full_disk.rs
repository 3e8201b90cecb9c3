//! A disk that is full now and then: whatever fails for want of room must leave
//! nothing behind. After room was made and the image closed, no cluster is leaked,
//! and every write that succeeded is there.

mod common;

use std::sync::Arc;

use common::{Random, fill_disk, run_on_memory as run};
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{CacheOptions, OpenOptions, PreallocateAhead, Qcow2};
use vellum::{BlockDevice, Buffer, ErrorKind, Preallocation, RequestFlags, Storage, ZeroRequest};
use vellum_storage::MemStorage;
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};

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
