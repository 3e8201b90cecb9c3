//! Power cuts: of what a cache has written any sectors are lost. No flush and no order helps it, so
//! any subset of sectors may be there.

use std::path::Path;
use std::sync::{Arc, Mutex};

use vellum_io::{Buffers, Io, Result, lane};
use vellum_remote::CacheStorage;
use vellum_storage::{MemStorage, Storage, WriteFlags, ZeroFlags, delegate};

use crate::below::{Below, Shared};
use crate::{check_all, check_some, content, options};

const SECTOR: usize = 512;

/// What was written, in its order.
type Log = Arc<Mutex<Vec<(u64, Vec<u8>)>>>;

/// Notes writes.
#[derive(Debug)]
struct Recorded {
    inner: Arc<MemStorage>,
    log: Log,
}

impl Storage for Recorded {
    delegate!(inner: capabilities, name, len_bytes, read, flush, truncate);

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let bytes: Vec<u8> = buffers.iter().flat_map(|one| one.to_vec()).collect();
        self.log.lock().unwrap().push((offset_bytes, bytes));
        self.inner.write(offset_bytes, buffers, flags)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        let zeroes = vec![0; len_bytes as usize];
        self.log.lock().unwrap().push((offset_bytes, zeroes));
        self.inner.write_zeroes(offset_bytes, len_bytes, flags)
    }
}

fn recorded(bytes: Vec<u8>) -> (Arc<Recorded>, Log) {
    let log = Log::default();
    let storage = Recorded {
        inner: Arc::new(MemStorage::with_bytes(bytes)),
        log: log.clone(),
    };
    (Arc::new(storage), log)
}

/// What is there after a cut: of each write each sector, or not.
fn cut(before: &[u8], log: &Log, random: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes = before.to_vec();
    let kept = random.f64();
    for (offset, written) in log.lock().unwrap().iter() {
        let end = *offset as usize + written.len();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        let mut at = 0;
        while at < written.len() {
            // Sectors of the file, whatever the write begins with.
            let start = *offset as usize + at;
            let len = (SECTOR - start % SECTOR).min(written.len() - at);
            if random.f64() < kept {
                bytes[start..start + len].copy_from_slice(&written[at..at + len]);
            }
            at += len;
        }
    }
    bytes
}

async fn use_it(
    below: &Arc<Below>,
    (data, index): (Arc<dyn Storage>, Arc<dyn Storage>),
    seed: u64,
) -> Result<()> {
    let shared = Arc::new(Shared(below.clone()));
    let cache = CacheStorage::in_storages(shared, data, index, options(Path::new("")))?;
    check_some(&*cache, &below.bytes, seed, 6).await;
    if seed.is_multiple_of(3) {
        check_all(&*cache, &below.bytes).await;
    }
    cache.close().await
}

/// The cuts of one seed: each goes on from what the one before has left.
fn cuts(seed: u64, rounds: usize) {
    let mut random = fastrand::Rng::with_seed(seed);
    let len = random.usize(1..5 << 20);
    let below = Below::new(content(seed, len));
    let (mut data, mut index) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let (data_storage, data_log) = recorded(data.clone());
        let (index_storage, index_log) = recorded(index.clone());
        lane::block_on(async {
            let storages = (data_storage as Arc<dyn Storage>, index_storage as _);
            use_it(&below, storages, seed + round as u64)
                .await
                .unwrap_or_else(|error| panic!("seed {seed}, round {round}: {error}"));
        });
        data = cut(&data, &data_log, &mut random);
        index = cut(&index, &index_log, &mut random);
    }
}

/// `VELLUM_CACHE_CUTS=100000` makes more of them.
#[test]
fn no_byte_is_wrong_after_a_power_cut() {
    let wanted = std::env::var("VELLUM_CACHE_CUTS").ok();
    let wanted: u64 = wanted.map_or(200, |count| count.parse().expect("a number"));
    for seed in 0..wanted.div_ceil(20) {
        cuts(seed, 20);
    }
}

#[test]
fn a_cut_is_seen() {
    // The test itself: torn blocks do come about.
    let mut random = fastrand::Rng::with_seed(1);
    let log = Log::default();
    log.lock().unwrap().push((100, vec![1; 10_000]));
    let after = cut(&[], &log, &mut random);
    assert!(after[100..10_100].contains(&0) && after[100..10_100].contains(&1));
}
