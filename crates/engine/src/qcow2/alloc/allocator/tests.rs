use std::time::{Duration, Instant};

use vellum_format::Header;
use vellum_format::refcount;
use vellum_io::executor::Executor;
use vellum_io::lane::block_on;
use vellum_io::{Buffer, Buffers, Io};
use vellum_storage::file::{FileOptions, FileStorage};
use vellum_storage::{MemStorage, Storage, WriteFlags, delegate};

use super::*;
use crate::qcow2::create::{CreateOptions, create};
use crate::qcow2::header::load;
use crate::qcow2::integrity::overlap::{OverlapChecks, OverlapMap};
use crate::qcow2::open::read_refcount_table;

/// A storage that remembers what a power cut would leave at worst.
#[derive(Debug, Default)]
struct Volatile {
    now: MemStorage,
    durable: Mutex<Vec<u8>>,
}

impl Storage for Volatile {
    delegate!(
        now: capabilities, len_bytes, read, write, write_zeroes, discard, allocate, truncate,
        block_status,
    );

    fn name(&self) -> &str {
        "volatile"
    }
    fn flush(&self) -> Io<()> {
        *self.durable.lock() = self.now.snapshot();
        Io::ready(Ok(()))
    }
}

impl Allocator {
    async fn allocate(self: &Arc<Self>, want: u64) -> Result<Allocation> {
        self.allocate_near(want, None).await
    }
}

fn run<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    let executor = Executor::new(|| {});
    let (sender, receiver) = std::sync::mpsc::channel();
    drop(executor.spawn(async move { sender.send(future.await) }));
    executor.run_ready();
    receiver.try_recv().expect("memory never waits")
}

async fn allocator(file: Arc<dyn Storage>, options: PreallocateAhead) -> Arc<Allocator> {
    let header = load::header(&file, vellum_format::header::Purpose::Use)
        .await
        .unwrap();
    let geometry = header.geometry();
    let table = read_refcount_table(&file, &header, &geometry)
        .await
        .unwrap();
    let overlap = OverlapMap::new(OverlapChecks::default(), &header);
    let refcounts = Refcounts::new(geometry, file, 256 << 10, table, overlap);
    Allocator::new(refcounts, options).unwrap()
}

async fn commit(allocator: &Allocator) {
    let mark = allocator.begin_commit();
    allocator.refcounts.write_back().await.unwrap();
    allocator.refcounts.file.flush().await.unwrap();
    allocator.barrier_passed(mark);
}

/// The count of a cluster in the bytes of an image.
fn count_in(bytes: &[u8], cluster: u64) -> u64 {
    let header = Header::decode(bytes).unwrap();
    let geometry = header.geometry();
    let be64 = |at: u64| {
        let at = at as usize;
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
    };
    let table = header.refcount_table_offset.bytes();
    let index = geometry.refcount_table_index(cluster);
    if index * 8 >= u64::from(header.refcount_table_clusters) * geometry.cluster_size_bytes() {
        return 0;
    }
    match be64(table + 8 * index) {
        0 => 0,
        block => refcount::get(
            &bytes[block as usize..][..geometry.cluster_size_bytes() as usize],
            geometry.refcount_order,
            geometry.refcount_block_index(cluster),
        ),
    }
}

/// A task of the background gets its turns while a request waits.
async fn turn() {
    for _ in 0..50 {
        futures_util::future::poll_immediate(std::future::pending::<()>()).await;
        let mut once = false;
        std::future::poll_fn(|cx| {
            if std::mem::replace(&mut once, true) {
                return std::task::Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            std::task::Poll::Pending
        })
        .await;
    }
}

fn small() -> CreateOptions {
    CreateOptions {
        size_bytes: 4 << 20,
        cluster_size_bytes: 512,
        refcount_bits: 64,
        ..CreateOptions::default()
    }
}

#[test]
fn a_counted_cluster_is_counted_on_disk_and_inside_the_file() {
    run(async {
        let file = Arc::new(Volatile::default());
        create(file.clone(), None, &small()).await.unwrap();
        file.flush().await.unwrap();
        let options = PreallocateAhead {
            after_clusters: 5,
            max_bytes: 40 * 512,
        };
        let allocator = allocator(file.clone(), options).await;
        let (mut durable, mut zeroes) = (0, 0);
        for round in 0..3000u64 {
            let allocation = allocator.allocate(1 + round % 3).await.unwrap();
            let first = allocation.start.bytes() / 512;
            zeroes += u64::from(allocation.reads_as_zeroes);
            if allocation.refcount_durable {
                durable += 1;
                let durable = file.durable.lock();
                for cluster in first..first + allocation.clusters {
                    assert_eq!(count_in(&durable, cluster), 1, "cluster {cluster}");
                    assert!((cluster + 1) * 512 <= durable.len() as u64);
                }
            }
            turn().await;
            // Fewer clusters than are counted ahead are handed out between two commits.
            if round % 2 == 0 {
                commit(&allocator).await;
            }
        }
        assert!(durable > 2500, "{durable} of 3000");
        assert!(
            zeroes > 2900,
            "all but old refcount tables: {zeroes} of 3000"
        );
        let handed_out = allocator.state().length.needed_bytes();
        allocator.release_reserve().await.unwrap();
        commit(&allocator).await;
        assert_eq!(file.len_bytes().unwrap(), handed_out);
        let bytes = file.now.snapshot();
        let last = handed_out / 512;
        assert_eq!(count_in(&bytes, last - 1), 1);
        for cluster in last..last + 100 {
            assert_eq!(count_in(&bytes, cluster), 0, "cluster {cluster}");
        }
    });
}

#[test]
fn a_program_that_writes_little_leaves_nothing_behind() {
    run(async {
        let file = Arc::new(MemStorage::new());
        create(file.clone(), None, &small()).await.unwrap();
        let allocator = allocator(file.clone(), PreallocateAhead::default()).await;
        let mut last = 0;
        for _ in 0..64 {
            last = allocator.allocate(1).await.unwrap().start.bytes() / 512;
            turn().await;
        }
        allocator.refcounts.write_back().await.unwrap();
        let bytes = file.snapshot();
        assert_eq!((count_in(&bytes, last), count_in(&bytes, last + 1)), (1, 0));
        assert!(bytes.len() as u64 <= (last + 1) * 512);
    });
}

#[test]
fn freed_clusters_are_used_again_lowest_first() {
    run(async {
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        create(file.clone(), None, &small()).await.unwrap();
        let allocator = allocator(file, PreallocateAhead::default()).await;
        let mut starts = Vec::new();
        for _ in 0..20 {
            starts.push(allocator.allocate(1).await.unwrap().start.bytes() / 512);
        }
        for index in [11, 3, 4] {
            allocator
                .release(HostCluster(starts[index]), 1)
                .await
                .unwrap();
        }
        let in_one_piece = allocator.allocate(8).await.unwrap();
        assert_eq!(in_one_piece.clusters, 8);
        assert!(in_one_piece.start.bytes() / 512 > starts[19]);
        let again = allocator.allocate(2).await.unwrap();
        let expected = (starts[3] * 512, 2, false);
        assert_eq!(
            (again.start.bytes(), again.clusters, again.reads_as_zeroes),
            expected
        );
        let again = allocator.allocate(1).await.unwrap();
        assert_eq!((again.start.bytes(), again.clusters), (starts[11] * 512, 1));
    });
}

/// Makes a file of `len_bytes` whose clusters are all counted as used.
fn full_image(path: &std::path::Path, len_bytes: u64, cluster_bytes: u64, refcount_bits: u64) {
    use std::os::unix::fs::FileExt;
    let options = CreateOptions {
        size_bytes: 1 << 40,
        cluster_size_bytes: cluster_bytes,
        refcount_bits,
        ..CreateOptions::default()
    };
    let storage: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let target = storage.clone();
    run(async move { create(target, None, &options).await.unwrap() });
    let head = run(async move {
        load::read_bytes(&storage, 0, storage.len_bytes().unwrap())
            .await
            .unwrap()
    });
    let file = std::fs::File::create(path).unwrap();
    file.write_all_at(&head, 0).unwrap();
    file.set_len(len_bytes).unwrap();
    let per_block = cluster_bytes * 8 / refcount_bits;
    let blocks = (len_bytes / cluster_bytes).div_ceil(per_block);
    let table_clusters = (blocks * 8).div_ceil(cluster_bytes);
    let table_at = (head.len() as u64).next_multiple_of(cluster_bytes);
    let first_block = table_at + table_clusters * cluster_bytes;
    let one: &[u8] = match refcount_bits {
        1 => &[0xff],
        _ => &[0, 1],
    };
    let counts = one.repeat((16 << 20) / one.len());
    let mut at = 0;
    while at < blocks * cluster_bytes {
        let len = (blocks * cluster_bytes - at).min(16 << 20) as usize;
        file.write_all_at(&counts[..len], first_block + at).unwrap();
        at += len as u64;
    }
    let table: Vec<u8> = (0..blocks)
        .flat_map(|block| (first_block + block * cluster_bytes).to_be_bytes())
        .collect();
    file.write_all_at(&table, table_at).unwrap();
    file.write_all_at(&table_at.to_be_bytes(), 48).unwrap();
    file.write_all_at(&(table_clusters as u32).to_be_bytes(), 56)
        .unwrap();
    file.sync_all().unwrap();
}

/// Prints how long allocations take on a full image of 10 TB while a guest writes
/// 4 KiB into each new cluster, eight requests at a time, and flushes now and then.
async fn measure(path: std::path::PathBuf, clusters: u64) {
    const LANES: u64 = 8;
    let storage = FileStorage::open(&path, &FileOptions::default()).unwrap();
    let opened = Instant::now();
    let allocator = allocator(storage.clone(), PreallocateAhead::default()).await;
    let opened = opened.elapsed();
    let writers = (0..LANES).map(|_| {
        let (allocator, storage) = (allocator.clone(), storage.clone());
        async move {
            let mut took = Vec::new();
            for round in 0..clusters / LANES {
                let begun = Instant::now();
                let allocation = allocator.allocate(1).await.unwrap();
                took.push(begun.elapsed());
                let buffers = Buffers::from_buf([Buffer::zeroed(4096)]);
                let write = storage.write(allocation.start.bytes(), buffers, WriteFlags::default());
                write.await.unwrap();
                if round % 512 == 511 {
                    commit(&allocator).await;
                }
            }
            took
        }
    });
    let begun = Instant::now();
    let took = futures_util::future::join_all(writers).await;
    let whole = begun.elapsed();
    let mut took: Vec<Duration> = took.into_iter().flatten().collect();
    println!("first {:?}, opened in {opened:?}", took[0]);
    took.sort();
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    println!(
        "{} allocations in {whole:?}: p50 {:?}, p99 {:?}, p99.9 {:?}, max {:?}",
        took.len(),
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0)
    );
    allocator.release_reserve().await.unwrap();
}

/// Takes 0.7 GB of disk: run it by hand with `--ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn allocation_on_a_full_image_of_10_tb() {
    let dir = tempfile::tempdir().unwrap();
    for (cluster_bytes, refcount_bits) in [(64 << 10, 16), (4 << 10, 1)] {
        let path = dir.path().join("image");
        // The last refcount block, and for small clusters the table, ends nearby.
        full_image(&path, (10 << 40) - (64 << 20), cluster_bytes, refcount_bits);
        println!("clusters of {cluster_bytes}, refcounts of {refcount_bits} bits:");
        block_on(measure(path, 100_000));
    }
}

#[test]
fn an_area_is_claimed_beside_what_was_counted_ahead() {
    run(async {
        let file = Arc::new(MemStorage::new());
        create(file.clone(), None, &small()).await.unwrap();
        let options = PreallocateAhead {
            after_clusters: 5,
            max_bytes: 40 * 512,
        };
        let allocator = allocator(file.clone(), options).await;
        let mut taken = std::collections::BTreeSet::new();
        // Every count of areas, so that they end before, at and behind the refcount
        // blocks that were made ahead, and need larger refcount tables.
        for round in 0..400u64 {
            let one = allocator.allocate(1 + round % 3).await.unwrap();
            let first = one.start.bytes() / 512;
            turn().await;
            let count = 1 + round % 150;
            let area = allocator.allocate_at_end(count).await.unwrap().bytes() / 512;
            for cluster in (first..first + one.clusters).chain(area..area + count) {
                assert!(taken.insert(cluster), "{cluster} was given out twice");
            }
            assert!(area >= first, "areas lie at the end");
        }
        allocator.release_reserve().await.unwrap();
        commit(&allocator).await;
        let bytes = file.snapshot();
        for cluster in taken {
            assert_eq!(count_in(&bytes, cluster), 1, "cluster {cluster}");
        }
    });
}

#[test]
fn a_length_from_before_a_cut_is_not_durable_after_it() {
    run(async {
        let file = Arc::new(Volatile::default());
        // The next refcount block is far away, and not made ahead.
        let wide = CreateOptions {
            refcount_bits: 16,
            ..small()
        };
        create(file.clone(), None, &wide).await.unwrap();
        let options = PreallocateAhead {
            after_clusters: 0,
            max_bytes: 40 * 512,
        };
        let allocator = allocator(file.clone(), options).await;
        let mut starts = Vec::new();
        for _ in 0..100 {
            starts.push(allocator.allocate(1).await.unwrap().start);
            turn().await;
        }
        let mark = allocator.begin_commit();
        allocator.refcounts.write_back().await.unwrap();
        let geometry = allocator.refcounts.geometry;
        for start in starts.split_off(3) {
            let cluster = start.cluster(&geometry);
            allocator.release(cluster, 1).await.unwrap();
        }
        allocator.cut_tail().await.unwrap();
        let end = starts[2].bytes() + 512;
        assert_eq!(file.len_bytes().unwrap(), end);
        allocator.barrier_passed(mark);
        let next = allocator.allocate(1).await.unwrap();
        assert_eq!((next.start.bytes(), next.reads_as_zeroes), (end, true));
        assert!(
            !next.refcount_durable,
            "neither its count nor the length is durable"
        );
        turn().await;
        commit(&allocator).await;
        let durable = file.durable.lock().len() as u64;
        let allocation = allocator.allocate(1).await.unwrap();
        let reaches = allocation.start.bytes() + 512 <= durable;
        assert!(reaches || !allocation.refcount_durable);
    });
}
