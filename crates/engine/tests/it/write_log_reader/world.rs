//! An image and its log in memory, what must be in them, and copies of both at random moments.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use vellum::Storage;
use vellum::qcow2::create::{CreateOptions, create};
use vellum_io::buffer::total_len;
use vellum_io::{Buffers, Io};
use vellum_storage::{MemStorage, WriteFlags, delegate};

use crate::common::Random;
use crate::write_log_reader::memory;

/// Bytes of the disk.
pub const SIZE: u64 = 192 << 10;
/// Where in a log the batches begin.
const RING: u64 = 8192;
const SECTOR: usize = 512;
/// Copies of one use of an image.
const MOST_KILLS: usize = 4;

/// What the disk may hold after a kill.
#[derive(Debug, Clone)]
pub struct Model {
    durable: Vec<u8>,
    /// For each byte the number of changes before the durable one.
    since: Vec<usize>,
    /// What may be there instead, as far as it is newer.
    changes: Vec<(Range<usize>, Vec<u8>)>,
}

impl Model {
    fn new(durable: Vec<u8>) -> Model {
        Model {
            since: vec![0; durable.len()],
            durable,
            changes: Vec::new(),
        }
    }

    pub fn begin(&mut self, at: u64, bytes: Vec<u8>) {
        let at = at as usize;
        self.changes.push((at..at + bytes.len(), bytes));
    }

    /// The newest change is done.
    pub fn end(&mut self, durable: bool) {
        if let Some((range, bytes)) = self.changes.last()
            && durable
        {
            self.durable[range.clone()].copy_from_slice(bytes);
            self.since[range.clone()].fill(self.changes.len());
        }
    }

    pub fn flushed(&mut self) {
        for (range, bytes) in self.changes.drain(..) {
            self.durable[range].copy_from_slice(&bytes);
        }
        self.since.fill(0);
    }

    pub fn check(&self, found: &[u8]) {
        for (at, byte) in found.iter().enumerate() {
            let newer = &self.changes[self.since[at]..];
            let is_newer = |(range, bytes): &(Range<usize>, Vec<u8>)| {
                range.contains(&at) && bytes[at - range.start] == *byte
            };
            let holds = *byte == self.durable[at] || newer.iter().any(is_newer);
            assert!(
                holds,
                "byte {at:#x} is {byte:#x}, not {:#x}",
                self.durable[at]
            );
        }
    }
}

/// What a kill left.
#[derive(Debug)]
pub struct Kill {
    pub image: Vec<u8>,
    pub log: Vec<u8>,
    pub model: Model,
    /// A batch that was about to be written, and the log with it.
    append: Option<(Range<usize>, Vec<u8>)>,
}

impl Kill {
    /// The log with some sectors of the batch that was about to be written.
    pub fn torn(&self, random: &mut Random) -> Option<Vec<u8>> {
        let (range, with_batch) = self.append.as_ref()?;
        let mut log = self.log.clone();
        log.resize(with_batch.len(), 0);
        let sectors = range.len() / SECTOR;
        let first_ones = random.below(sectors as u64 + 1) as usize;
        let is_cut = random.below(2) == 0;
        for sector in 0..sectors {
            if (is_cut && sector < first_ones) || (!is_cut && random.below(2) == 0) {
                let at = range.start + sector * SECTOR;
                log[at..at + SECTOR].copy_from_slice(&with_batch[at..at + SECTOR]);
            }
        }
        Some(log)
    }
}

#[derive(Debug)]
struct Moments {
    random: Random,
    kills: Vec<Kill>,
}

#[derive(Debug)]
pub struct World {
    image: Arc<MemStorage>,
    log: Arc<MemStorage>,
    model: Mutex<Model>,
    moments: Mutex<Moments>,
    last_append: AtomicU64,
    wraps: AtomicU64,
}

impl World {
    pub fn new(image: &[u8], log: &[u8], shown: Vec<u8>, seed: u64) -> Arc<World> {
        Arc::new(World {
            image: memory(image),
            log: memory(log),
            model: Mutex::new(Model::new(shown)),
            moments: Mutex::new(Moments {
                random: Random::new(seed),
                kills: Vec::new(),
            }),
            last_append: AtomicU64::new(0),
            wraps: AtomicU64::new(0),
        })
    }

    pub fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock()
    }

    pub fn file(self: &Arc<Self>) -> Arc<dyn Storage> {
        Arc::new(Watched {
            inner: self.image.clone(),
            world: self.clone(),
            is_log: false,
        })
    }

    pub fn log_file(self: &Arc<Self>) -> Arc<dyn Storage> {
        Arc::new(Watched {
            inner: self.log.clone(),
            world: self.clone(),
            is_log: true,
        })
    }

    pub fn bytes(&self) -> (Vec<u8>, Vec<u8>) {
        (self.image.snapshot(), self.log.snapshot())
    }

    pub fn kills(&self) -> Vec<Kill> {
        std::mem::take(&mut self.moments.lock().kills)
    }

    /// How often a batch was written before the place of the one before.
    pub fn wraps(&self) -> u64 {
        self.wraps.load(Ordering::Relaxed)
    }

    /// Does a change, and perhaps keeps how things were before it.
    fn change<T>(&self, append: Option<Range<usize>>, start: impl FnOnce() -> Io<T>) -> Io<T> {
        if let Some(range) = &append {
            let at = range.start as u64;
            let wrapped = self.last_append.swap(at, Ordering::Relaxed) > at;
            self.wraps.fetch_add(u64::from(wrapped), Ordering::Relaxed);
        }
        let mut moments = self.moments.lock();
        let one_in = if append.is_some() { 20 } else { 80 };
        if moments.kills.len() == MOST_KILLS || moments.random.below(one_in) != 0 {
            drop(moments);
            return start();
        }
        let (image, log) = self.bytes();
        let started = start();
        let append = append.map(|range| (range, self.log.snapshot()));
        let model = self.model().clone();
        moments.kills.push(Kill {
            image,
            log,
            model,
            append,
        });
        started
    }
}

/// One of the two files.
#[derive(Debug)]
struct Watched {
    inner: Arc<MemStorage>,
    world: Arc<World>,
    is_log: bool,
}

impl Watched {
    fn change<T>(&self, start: impl FnOnce(&dyn Storage) -> Io<T>) -> Io<T> {
        self.world.change(None, || start(&*self.inner))
    }
}

impl Storage for Watched {
    delegate!(inner: capabilities, name, len_bytes, read, flush, block_status);
    delegate!(self.change: write_zeroes, discard, allocate, truncate);

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let end = offset_bytes + total_len(&buffers);
        let is_append = self.is_log && offset_bytes >= RING;
        let append = is_append.then_some(offset_bytes as usize..end as usize);
        self.world
            .change(append, || self.inner.write(offset_bytes, buffers, flags))
    }
}

/// A new image of any kind that takes a log.
pub async fn image(random: &mut Random) -> Vec<u8> {
    let lazy_refcounts = random.below(4) == 0;
    image_with(random, lazy_refcounts).await
}

/// A new image that takes a log; with lazy refcounts each opening for writing changes it.
pub async fn image_with(random: &mut Random, lazy_refcounts: bool) -> Vec<u8> {
    let extended_l2 = random.below(3) == 0;
    let bits = match extended_l2 {
        true => 14 + random.below(3),
        false => 9 + random.below(8),
    };
    let options = CreateOptions::default()
        .size_bytes(SIZE)
        .cluster_size_bytes(1 << bits)
        .extended_l2(extended_l2)
        .lazy_refcounts(lazy_refcounts);
    let file = memory(&[]);
    create(file.clone(), None, &options).await.expect("made");
    file.snapshot()
}
