//! Several lanes on one image in a real file, at random: their requests share
//! clusters, the write buffer, tables and commits. Each lane owns every so many bytes
//! and knows what they must be.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use crate::common::{Random, on_lane};
use futures_util::future::join_all;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, CacheOptions, OpenOptions, PreallocateAhead, Qcow2};
use vellum::{BlockDevice, Buffer, RequestFlags, Storage, ZeroRequest};
use vellum_io::lane::{self, Backend};
use vellum_storage::MemStorage;
use vellum_storage::file::{FileOptions, FileStorage};

const LANES: u64 = 3;

#[derive(Debug, Clone)]
struct Case {
    cluster: u64,
    size: u64,
    extended_l2: bool,
    version: u32,
    lazy: bool,
    refcount_bits: u64,
    backing: Option<u64>,
    l2_cache: Option<u64>,
    data_cache: Option<u64>,
    ahead: Option<(u64, u64)>,
    no_unref: bool,
    chunk: u64,
    rounds: u64,
    threads_backend: bool,
}

fn case(random: &mut Random) -> Case {
    let extended_l2 = random.below(2) == 0;
    let cluster = match extended_l2 {
        true => random.pick(&[16384, 32768, 65536, 262144]),
        false => random.pick(&[512, 4096, 65536, 65536, 262144]),
    };
    let version = if !extended_l2 && random.below(6) == 0 {
        2
    } else {
        3
    };
    let size = (random.below(30) + 10) * cluster.max(16384) + random.below(cluster / 512) * 512;
    let backing = (random.below(4) != 0).then(|| (random.below(3 * size / 1024) + 1) * 512);
    Case {
        cluster,
        size,
        extended_l2,
        version,
        lazy: version == 3 && random.below(4) == 0,
        refcount_bits: if version == 2 {
            16
        } else {
            random.pick(&[1, 16, 64])
        },
        backing,
        l2_cache: random.pick(&[None, Some(1), Some(1024)]),
        data_cache: random.pick(&[
            None,
            Some(0),
            Some(1),
            Some(8192),
            Some(65536),
            Some(2 << 20),
        ]),
        ahead: random.pick(&[None, Some((0, 1 << 20)), Some((2, 8 * 4096))]),
        no_unref: version == 3 && random.below(5) == 0,
        chunk: random.pick(&[512, 1000, 3000, 4096, 20_000, 70_000]),
        rounds: 25,
        threads_backend: random.below(3) == 0,
    }
}

fn behind(at: u64) -> u8 {
    (at / 512 % 251) as u8 + 1
}

struct Owner {
    lane: u64,
    case: Case,
    /// By number of the chunk.
    model: BTreeMap<u64, Vec<u8>>,
}

impl Owner {
    fn new(lane: u64, case: &Case) -> Self {
        let chunks = case.size.div_ceil(case.chunk);
        let content = |chunk: u64| {
            let start = chunk * case.chunk;
            let end = (start + case.chunk).min(case.size);
            (start..end)
                .map(|at| match case.backing {
                    Some(len) if at < len => behind(at),
                    _ => 0,
                })
                .collect()
        };
        Owner {
            lane,
            case: case.clone(),
            model: (lane..chunks)
                .step_by(LANES as usize)
                .map(|chunk| (chunk, content(chunk)))
                .collect(),
        }
    }

    fn start(&self, chunk: u64) -> u64 {
        chunk * self.case.chunk
    }

    /// Compares what was read at `from` with what this lane owns of it.
    fn check(&self, from: u64, bytes: &[u8], what: &str) {
        let end = from + bytes.len() as u64;
        for chunk in from / self.case.chunk..end.div_ceil(self.case.chunk) {
            let Some(model) = self.model.get(&chunk) else {
                continue;
            };
            let start = self.start(chunk);
            for at in start.max(from)..(start + model.len() as u64).min(end) {
                let (seen, expected) = (bytes[(at - from) as usize], model[(at - start) as usize]);
                assert_eq!(
                    seen, expected,
                    "{what}: byte {at} (chunk {chunk} of lane {}), read {from}..{end}; {:?}",
                    self.lane, self.case
                );
            }
        }
    }

    #[allow(clippy::too_many_lines, reason = "one arm for each kind of request")]
    async fn batch(&mut self, image: &Qcow2, random: &mut Random) {
        let chunks: Vec<u64> = self.model.keys().copied().collect();
        if chunks.is_empty() {
            return;
        }
        let mut used = std::collections::BTreeSet::new();
        let mut requests: Vec<Pin<Box<dyn Future<Output = ()>>>> = Vec::new();
        let hot = random.below(3) == 0;
        let sequential = random.below(3) == 0;
        for number in 0..12 {
            let index = match (hot, sequential) {
                (true, _) => random.below((chunks.len() as u64).min(8)),
                (_, true) => number % chunks.len() as u64,
                _ => random.below(chunks.len() as u64),
            };
            let chunk = chunks[index as usize];
            if !used.insert(chunk) {
                continue;
            }
            let base = self.start(chunk);
            let len = self.model[&chunk].len() as u64;
            let (from, to) = match random.below(3) {
                0 => (0, len),
                _ => {
                    let from = random.below(len);
                    (from, from + 1 + random.below(len - from))
                }
            };
            let range = from as usize..to as usize;
            let fill = random.below(255) as u8 + 1;
            let case = self.case.clone();
            let Some(model) = self.model.get_mut(&chunk) else {
                continue;
            };
            match random.below(12) {
                0..=6 => {
                    model[range].fill(fill);
                    let mut buffer = Buffer::zeroed((to - from) as usize);
                    buffer.fill(fill);
                    let flags = RequestFlags::default().fua(random.below(20) == 0);
                    let io = image.write(base + from, buffer, flags);
                    requests.push(Box::pin(async move { drop(io.await.unwrap()) }));
                }
                7 => {
                    model[range].fill(0);
                    let zero = ZeroRequest::default()
                        .may_unmap(random.below(2) == 0)
                        .fua(random.below(8) == 0);
                    let io = image.write_zeroes(base + from, to - from, zero);
                    requests.push(Box::pin(async move { io.await.unwrap() }));
                }
                8 if case.version == 3 || case.backing.is_none() => {
                    let Range { start, end } = whole_clusters(&case, base + from..base + to);
                    if start < end {
                        model[(start - base) as usize..(end - base) as usize].fill(0);
                    }
                    let io = image.discard(base + from, to - from);
                    requests.push(Box::pin(async move { io.await.unwrap() }));
                }
                _ => {
                    let expected = model[range].to_vec();
                    let io = image.read(base + from, Buffer::for_read((to - from) as usize));
                    let lane = self.lane;
                    requests.push(Box::pin(async move {
                        let seen = io.await.unwrap();
                        assert!(
                            seen[..] == expected,
                            "lane {lane}: read at {}: {} instead of {}; {case:?}",
                            base + from,
                            seen[0],
                            expected[0]
                        );
                    }));
                }
            }
        }
        join_all(requests).await;
    }

    async fn run(mut self, image: Arc<Qcow2>, mut random: Random) -> Self {
        for _ in 0..self.case.rounds {
            self.batch(&image, &mut random).await;
            let size = self.case.size;
            let from = random.below(size);
            let len = (random.below(300_000) + 1).min(size - from);
            match random.below(6) {
                0 => image.flush().await.unwrap(),
                1 | 2 => {
                    let buffer = Buffer::for_read(len as usize);
                    let seen = image.read(from, buffer).await.unwrap();
                    self.check(from, &seen, "long read");
                }
                3 => drop(image.block_status(from, len, 9).await.unwrap()),
                _ => {}
            }
        }
        self
    }
}

fn whole_clusters(case: &Case, range: Range<u64>) -> Range<u64> {
    let start = range.start.div_ceil(case.cluster) * case.cluster;
    let end = match range.end == case.size {
        true => range.end,
        false => range.end / case.cluster * case.cluster,
    };
    start..end.max(start)
}

async fn open(path: &Path, case: &Case) -> (Arc<dyn Storage>, Arc<Qcow2>) {
    let file: Arc<dyn Storage> = FileStorage::open(path, &FileOptions::default()).unwrap();
    let backing = match case.backing {
        None => Backing::None,
        Some(len) => {
            let storage = Arc::new(MemStorage::with_bytes((0..len).map(behind).collect()));
            Backing::Given(vellum::Raw::open(storage, Default::default()).unwrap())
        }
    };
    let options = OpenOptions::default()
        .cache(
            CacheOptions::default()
                .l2_cache_size_bytes(case.l2_cache)
                .l2_cache_entry_size_bytes(case.l2_cache.map(|_| 512)),
        )
        .backing(backing)
        .ahead(case.ahead.map_or(
            PreallocateAhead::default(),
            |(after_clusters, max_bytes)| {
                PreallocateAhead::default()
                    .after_clusters(after_clusters)
                    .max_bytes(max_bytes)
            },
        ))
        .data_cache_size_bytes(case.data_cache)
        .discard(true)
        .discard_no_unref(case.no_unref);
    let image = Qcow2::open(file.clone(), Arc::new(DenyAll), options)
        .await
        .unwrap();
    (file, image)
}

#[allow(clippy::too_many_lines, reason = "one list of options after the other")]
fn scenario(seed: u64) {
    let mut random = Random::new(seed);
    let case = case(&mut random);
    println!("seed {seed}: {case:?}");
    let backend = match case.threads_backend {
        true => Backend::Threads,
        false => Backend::Auto,
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.qcow2");
    std::fs::File::create(&path).unwrap();
    {
        let (case, path) = (case.clone(), path.clone());
        on_lane(backend, move || {
            lane::block_on(async move {
                let file: Arc<dyn Storage> =
                    FileStorage::open(&path, &FileOptions::default()).unwrap();
                let options = CreateOptions::default()
                    .size_bytes(case.size)
                    .cluster_size_bytes(case.cluster)
                    .extended_l2(case.extended_l2)
                    .version(case.version)
                    .refcount_bits(case.refcount_bits as _)
                    .lazy_refcounts(case.lazy);
                create(file, None, &options).await.unwrap();
            })
        })
        .join()
        .unwrap();
    }
    let mut owners: Vec<Owner> = (0..LANES).map(|lane| Owner::new(lane, &case)).collect();
    for session in 0..2 {
        let (file, image) = {
            let (path, case) = (path.clone(), case.clone());
            on_lane(backend, move || {
                lane::block_on(async move { open(&path, &case).await })
            })
            .join()
            .unwrap()
        };
        let running: Vec<_> = owners
            .drain(..)
            .map(|owner| {
                let image = image.clone();
                let seed = seed * 1000 + session * 10 + owner.lane;
                on_lane(backend, move || {
                    lane::block_on(owner.run(image, Random::new(seed)))
                })
            })
            .collect();
        owners = running
            .into_iter()
            .map(|lane| lane.join().unwrap())
            .collect();
        let size = case.size as usize;
        let (seen, report) = on_lane(backend, move || {
            lane::block_on(async move {
                let seen = image.read(0, Buffer::for_read(size)).await.unwrap();
                image.close().await.unwrap();
                let options = CheckOptions::default()
                    .on_finding(Some(Arc::new(|finding| println!("{}", finding.message))));
                (seen.to_vec(), check(file, &options).await.unwrap())
            })
        })
        .join()
        .unwrap();
        for owner in &owners {
            owner.check(0, &seen, "at the end");
        }
        assert_eq!(
            (report.corruptions, report.leaks, report.check_errors),
            (0, 0, 0)
        );
    }
}

#[test]
fn lanes_with_random_requests_keep_their_bytes() {
    let number = |name: &str, otherwise: u64| {
        std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
    };
    let first = number("VELLUM_TEST_SEED", 0);
    for seed in first..first + number("VELLUM_TEST_SEEDS", 25) {
        scenario(seed);
    }
}

/// A thread writes, and goes on with something that has nothing to do with its lane;
/// a flush of another thread must not wait for it.
#[test]
fn a_flush_does_not_wait_for_a_lane_that_rests() {
    let case = Case {
        cluster: 65536,
        size: 1 << 20,
        extended_l2: false,
        version: 3,
        lazy: false,
        refcount_bits: 16,
        backing: Some(1 << 20),
        l2_cache: None,
        data_cache: None,
        ahead: None,
        no_unref: false,
        chunk: 4096,
        rounds: 1,
        threads_backend: true,
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.qcow2");
    std::fs::File::create(&path).unwrap();
    let image = lane::block_on(async {
        let file: Arc<dyn Storage> = FileStorage::open(&path, &FileOptions::default()).unwrap();
        let options = CreateOptions::default().size_bytes(case.size);
        create(file, None, &options).await.unwrap();
        open(&path, &case).await.1
    });
    // Returns as soon as the bytes are in the write buffer.
    lane::block_on(async {
        let buffer = Buffer::zeroed(4096);
        image
            .write(100 * 4096, buffer, RequestFlags::default())
            .await
            .unwrap()
    });
    let (sender, receiver) = std::sync::mpsc::channel();
    let flusher = image.clone();
    drop(on_lane(Backend::Threads, move || {
        let flushed = lane::block_on(async move { flusher.flush().await });
        sender.send(flushed).unwrap();
    }));
    let flushed = receiver.recv_timeout(std::time::Duration::from_secs(5));
    flushed.expect("the flush hangs").unwrap();
}
