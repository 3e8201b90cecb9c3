//! A copy lays its target out in the order of the guest, whichever of its reads and writes
//! come first.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Io, Raw};
use vellum_io::lane::{block_on, sleep};
use vellum_io::{Buffers, spawn};
use vellum_jobs::copy::{CopyOptions, Silent, copy};
use vellum_storage::{MemStorage, Storage, WriteFlags, ZeroFlags, delegate};

const SIZE_BYTES: usize = 12 << 20;

/// A storage whose requests take a time that a seed decides.
#[derive(Debug)]
struct Shuffled {
    below: Arc<MemStorage>,
    state: AtomicU64,
}

impl Shuffled {
    fn new(below: Arc<MemStorage>, seed: u64) -> Arc<Shuffled> {
        let state = AtomicU64::new(seed);
        Arc::new(Shuffled { below, state })
    }

    fn later<T: 'static>(&self, start: impl FnOnce(&MemStorage) -> Io<T> + 'static) -> Io<T> {
        let below = self.below.clone();
        let random = random(self.state.fetch_add(1, Ordering::Relaxed));
        if random.is_multiple_of(3) {
            return start(&below);
        }
        Io::task(spawn(async move {
            sleep(Duration::from_micros(random % 1500)).await;
            start(&below).await
        }))
    }
}

impl Storage for Shuffled {
    delegate!(below: capabilities, len_bytes, name, block_status);

    fn read(&self, at: u64, buffers: Buffers) -> Io<Buffers> {
        self.later(move |below| below.read(at, buffers))
    }

    fn write(&self, at: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        self.later(move |below| below.write(at, buffers, flags))
    }

    fn write_zeroes(&self, at: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        self.later(move |below| below.write_zeroes(at, len_bytes, flags))
    }

    fn discard(&self, at: u64, len_bytes: u64) -> Io<()> {
        self.later(move |below| below.discard(at, len_bytes))
    }

    fn allocate(&self, at: u64, len_bytes: u64) -> Io<()> {
        self.later(move |below| below.allocate(at, len_bytes))
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        self.later(move |below| below.truncate(len_bytes))
    }

    fn flush(&self) -> Io<()> {
        self.later(|below| below.flush())
    }
}

fn random(number: u64) -> u64 {
    let mixed = (number ^ 0x9e37_79b9).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ mixed >> 31).wrapping_mul(0x94d0_49bb_1331_11eb) >> 17
}

/// Runs of zeroes, of data that compresses well, and of data that does not.
fn content() -> Vec<u8> {
    let mut content = vec![0; SIZE_BYTES];
    for (number, part) in content.chunks_mut(12 << 10).enumerate() {
        match random(number as u64) % 5 {
            0 => {}
            1 | 2 => part.fill(number as u8 | 1),
            _ => {
                let words = part.chunks_exact_mut(8).enumerate();
                words.for_each(|(index, word)| {
                    let place = (number << 20 | index) as u64;
                    word.copy_from_slice(
                        &random(place)
                            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                            .to_le_bytes(),
                    );
                });
            }
        }
    }
    content
}

/// Where the guest's clusters lie in an image's file, those that lie anywhere, and whether
/// they are compressed.
fn places(file: &[u8], cluster_bits: u32) -> Vec<(u64, bool)> {
    let word = |at: usize| u64::from_be_bytes(file[at..at + 8].try_into().unwrap());
    let cluster = 1 << cluster_bits;
    let l1 = word(40) as usize;
    let tables = SIZE_BYTES.div_ceil(cluster * cluster / 8);
    let mut places = Vec::new();
    for table in 0..tables {
        let l2 = (word(l1 + table * 8) & 0x00ff_ffff_ffff_fe00) as usize;
        if l2 == 0 {
            continue;
        }
        places.extend((0..cluster / 8).filter_map(|index| {
            let entry = word(l2 + index * 8);
            let place = match entry >> 62 & 1 {
                1 => entry & ((1 << (62 - (cluster_bits - 8))) - 1),
                _ => entry & 0x00ff_ffff_ffff_fe00,
            };
            (place > 0).then_some((place, entry >> 62 & 1 == 1))
        }));
    }
    places
}

/// Copies the content to a new image of which nothing comes in the order in which it was
/// asked for; the image's file.
fn copied(cluster_bits: u32, compress: bool, reproducible: bool, seed: u64) -> Vec<u8> {
    let file = Arc::new(MemStorage::new());
    let created = file.clone();
    block_on(async move {
        let cluster = 1 << cluster_bits;
        let options = CreateOptions::default()
            .size_bytes(SIZE_BYTES as u64)
            .cluster_size_bytes(cluster);
        create(created.clone(), None, &options).await.unwrap();
        let source = Shuffled::new(Arc::new(MemStorage::with_bytes(content())), seed);
        let source: Arc<dyn BlockDevice> = Raw::open(source, Default::default()).unwrap();
        let target = Shuffled::new(created, seed + 1000);
        let open = OpenOptions::default().reproducible(reproducible);
        let target = Qcow2::open(target, Arc::new(DenyAll), open);
        let target: Arc<dyn BlockDevice> = target.await.unwrap();
        let options = CopyOptions {
            laid_out_in_order: true,
            parallel: if reproducible { 1 } else { 8 },
            target_is_zero: true,
            compressed_clusters_bytes: compress.then_some(cluster),
            ..CopyOptions::default()
        };
        let sources = [source.clone()];
        copy(&sources, &target, &options, &mut Silent)
            .await
            .unwrap();
        let read = target.read(0, Buffer::for_read(SIZE_BYTES)).await.unwrap();
        assert!(read[..] == content()[..], "seed {seed}");
        target.close().await.unwrap();
    });
    file.snapshot()
}

/// Every time the same; those that are not compressed, one behind the other, and so are
/// the compressed ones, which are packed into clusters of their own.
fn is_laid_out_in_order(cluster_bits: u32, compress: bool) {
    let first = places(&copied(cluster_bits, compress, false, 0), cluster_bits);
    assert!(first.len() > 4, "{} clusters", first.len());
    for packed in [false, true] {
        let kind = first.iter().filter(|(_, is_packed)| *is_packed == packed);
        let places: Vec<u64> = kind.map(|(place, _)| *place).collect();
        let disorder = places.windows(2).find(|pair| pair[0] >= pair[1]);
        assert_eq!(disorder, None, "packed: {packed}");
    }
    for seed in 1..6 {
        let places = places(&copied(cluster_bits, compress, false, seed), cluster_bits);
        let other = places.iter().zip(&first).find(|(one, other)| one != other);
        assert_eq!(other, None, "seed {seed}");
    }
}

#[test]
fn clusters_of_4_kib() {
    is_laid_out_in_order(12, false);
}

/// The refcount table moves while the smallest are written.
#[test]
fn reproducible_images_are_the_same_byte_by_byte() {
    for cluster_bits in [9, 10, 12, 16] {
        for compress in [false, true] {
            let first = copied(cluster_bits, compress, true, 0);
            for seed in 1..5 {
                let file = copied(cluster_bits, compress, true, seed);
                assert!(
                    file == first,
                    "clusters of {} bytes, compressed: {compress}, seed {seed}",
                    1 << cluster_bits
                );
            }
        }
    }
}

#[test]
fn clusters_of_64_kib() {
    is_laid_out_in_order(16, false);
}

#[test]
fn clusters_of_2_mib() {
    is_laid_out_in_order(21, false);
}

/// Those that compression makes no smaller lie among the others.
#[test]
fn compressed_clusters() {
    is_laid_out_in_order(16, true);
}

#[test]
fn compressed_clusters_of_4_kib() {
    is_laid_out_in_order(12, true);
}
