//! Compaction of an image in use: the file gets as short as what is allocated, the guest sees
//! what it saw, and both checks find nothing.

use std::sync::Arc;

use crate::common::{Random, qemu_verdict, vellum_verdict};
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::compact::Compaction;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::survey::{SurveyOptions, survey};
use vellum::qcow2::{
    BitmapOptions, NewSnapshot, OpenOptions, PreallocateAhead, Qcow2, SnapshotSelector,
};
use vellum::{BlockDevice, Buffer, Buffers, Io, RequestFlags, Storage, ZeroRequest};
use vellum_io::{lane, spawn};
use vellum_storage::wrap::{DelayStorage, FaultStorage, Matching, Operation, Times};
use vellum_storage::{MemStorage, WriteFlags};

const KIB: u64 = 1 << 10;

/// What an image of a test is like.
#[derive(Debug, Clone, Copy)]
struct Shape {
    cluster_bytes: u64,
    extended_l2: bool,
    version: u32,
    lazy: bool,
    compressed: bool,
    refcount_bits: u64,
    size_bytes: u64,
}

impl Shape {
    fn random(random: &mut Random) -> Shape {
        let cluster_bytes = random.pick(&[512, 4 * KIB, 16 * KIB, 64 * KIB]);
        let version = random.pick(&[2, 3, 3, 3]);
        Shape {
            cluster_bytes,
            extended_l2: version == 3 && cluster_bytes >= 16 * KIB && random.below(2) == 0,
            version,
            lazy: version == 3 && random.below(4) == 0,
            compressed: random.below(3) == 0,
            refcount_bits: if version == 2 {
                16
            } else {
                random.pick(&[16, 16, 8, 64])
            },
            size_bytes: 128 * cluster_bytes + 512 * random.below(100),
        }
    }

    fn create(self) -> CreateOptions {
        CreateOptions::default()
            .size_bytes(self.size_bytes)
            .cluster_size_bytes(self.cluster_bytes)
            .extended_l2(self.extended_l2)
            .version(self.version)
            .lazy_refcounts(self.lazy)
            .refcount_bits(self.refcount_bits)
    }
}

/// A guest, and what its disk must hold.
struct Guest {
    shape: Shape,
    image: Arc<Qcow2>,
    content: Vec<u8>,
    random: Random,
}

impl Guest {
    async fn new(mut random: Random, shape: Shape, file: Arc<dyn Storage>) -> Guest {
        create(file.clone(), None, &shape.create())
            .await
            .expect("created");
        let options = OpenOptions::default()
            .discard(true)
            .ahead(PreallocateAhead::default().after_clusters(random.pick(&[0, 64])));
        let image = Qcow2::open(file, Arc::new(DenyAll), options)
            .await
            .expect("opened");
        let content = vec![0; shape.size_bytes as usize];
        Guest {
            shape,
            image,
            content,
            random,
        }
    }

    /// A range of the disk, of whole clusters if `whole`.
    fn range(&mut self, whole: bool) -> (u64, u64) {
        let unit = if whole { self.shape.cluster_bytes } else { 512 };
        let units = self.shape.size_bytes / unit;
        let start = self.random.below(units);
        let most = (8 * self.shape.cluster_bytes / unit).min(units - start);
        (start * unit, (1 + self.random.below(most)) * unit)
    }

    async fn write(&mut self, at: u64, len: u64, compressed: bool) {
        let fill = self.random.below(255) as u8 + 1;
        let bytes = &mut self.content[at as usize..(at + len) as usize];
        for (index, byte) in bytes.iter_mut().enumerate() {
            // What is compressed takes some room.
            *byte = fill ^ (index as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] & 0x33;
        }
        let buffer = Buffer::copy_of(bytes);
        let flags = RequestFlags::default();
        match compressed {
            true => self.image.write_compressed(at, buffer, flags).await,
            false => self.image.write(at, buffer, flags).await,
        }
        .expect("written");
    }

    async fn request(&mut self) {
        match self.random.below(8) {
            0..=2 => {
                let (at, len) = self.range(false);
                self.write(at, len, false).await;
            }
            3 if self.shape.compressed => {
                let (at, len) = self.range(true);
                self.write(at, len, true).await;
            }
            3 => {
                let (at, len) = self.range(false);
                let request = ZeroRequest::default().may_unmap(self.random.below(2) == 0);
                self.image
                    .write_zeroes(at, len, request)
                    .await
                    .expect("zeroed");
                self.content[at as usize..(at + len) as usize].fill(0);
            }
            4 => self.image.flush().await.expect("flushed"),
            _ => {
                // In version 2 there is nothing below that could show through.
                let (at, len) = self.range(true);
                self.image.discard(at, len).await.expect("discarded");
                self.content[at as usize..(at + len) as usize].fill(0);
            }
        }
    }

    async fn fill(&mut self) {
        for _ in 0..60 {
            let (at, len) = self.range(self.shape.compressed);
            self.write(at, len, self.shape.compressed).await;
        }
        for _ in 0..20 {
            let (at, len) = self.range(true);
            self.image.discard(at, len).await.expect("discarded");
            self.content[at as usize..(at + len) as usize].fill(0);
        }
    }

    async fn verify(&self, image: &Qcow2) {
        let buffer = Buffer::for_read(self.content.len());
        let bytes = image.read(0, buffer).await.expect("read");
        let wrong = bytes
            .iter()
            .zip(&self.content)
            .position(|(is, was)| is != was);
        assert_eq!(wrong, None, "{:?}", self.shape);
    }

    /// Compacts, with requests of the guest between and beside the steps if it is to be `busy`.
    async fn compact(&mut self, busy: bool) -> Compaction {
        let mut compaction = self.image.compact().await.expect("begun");
        let mut steps = 0;
        loop {
            let step = match busy && self.random.below(2) == 0 {
                true => {
                    let (step, ()) = futures_util::join!(compaction.step(), self.request());
                    step
                }
                false => compaction.step().await,
            };
            if step.expect("a step").is_none() {
                return compaction;
            }
            steps += 1;
            assert!(steps < 10_000, "it never ends: {:?}", compaction.progress());
        }
    }

    /// As [`Guest::length_of`], of an image that is closed, with which nothing may be wrong.
    async fn used_of(&self, file: &Arc<dyn Storage>) -> (u64, u64) {
        let report = check(file.clone(), &CheckOptions::default())
            .await
            .expect("checked");
        assert_eq!(
            (report.corruptions, report.leaks),
            (0, 0),
            "{:?}",
            self.shape
        );
        self.length_of(file).await
    }

    /// How much of the file is in use, and how long it is, in clusters.
    async fn length_of(&self, file: &Arc<dyn Storage>) -> (u64, u64) {
        let len_bytes = file.len_bytes().expect("a length");
        let options = SurveyOptions::default();
        let survey = survey(file.clone(), &options).await.expect("surveyed");
        let cluster = self.shape.cluster_bytes;
        (survey.counted_bytes / cluster, len_bytes.div_ceil(cluster))
    }
}

/// As few clusters as the rule allows, and what there is of metadata that only goes with a close.
fn is_short(used: u64, clusters: u64) -> bool {
    clusters <= used + used / 20 + 4
}

#[test]
fn a_quiet_image_gets_as_short_as_what_is_in_it() {
    for seed in 0..60 {
        lane::block_on(async move {
            let mut random = Random::new(seed);
            let shape = Shape::random(&mut random);
            let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
            let mut guest = Guest::new(random, shape, file.clone()).await;
            guest.fill().await;
            if seed % 2 == 0 {
                guest.image.flush().await.expect("flushed");
            }
            let compaction = guest.compact(false).await;
            let leaked_bytes = compaction.leaked_bytes().await.expect("surveyed");
            assert_eq!(leaked_bytes, 0, "{shape:?}");
            drop(compaction);
            guest.verify(&guest.image).await;
            guest.image.close().await.expect("closed");
            let (used, clusters) = guest.used_of(&file).await;
            assert!(is_short(used, clusters), "{used} of {clusters}: {shape:?}");
            let options = OpenOptions::default();
            let again = Qcow2::open(file, Arc::new(DenyAll), options)
                .await
                .expect("opened");
            guest.verify(&again).await;
            again.close().await.expect("closed");
        });
    }
}

const PLAIN: Shape = Shape {
    cluster_bytes: 4 * KIB,
    extended_l2: false,
    version: 3,
    lazy: false,
    compressed: false,
    refcount_bits: 16,
    size_bytes: 4 << 20,
};

#[test]
fn what_was_discarded_and_not_flushed_is_a_gap() {
    lane::block_on(async {
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let mut guest = Guest::new(Random::new(3), PLAIN, file.clone()).await;
        guest.write(0, 4 << 20, false).await;
        guest.image.flush().await.expect("flushed");
        guest.image.discard(0, 3 << 20).await.expect("discarded");
        guest.content[..3 << 20].fill(0);
        guest.compact(false).await;
        let len_bytes = file.len_bytes().expect("a length");
        assert!(len_bytes < (1 << 20) + (1 << 18), "{len_bytes}");
        guest.verify(&guest.image).await;
        guest.image.close().await.expect("closed");
        guest.used_of(&file).await;
    });
}

/// What a crash has leaked is told as what it is, to the cluster.
#[test]
fn leaks_are_not_taken_for_what_is_in_use() {
    lane::block_on(async {
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        // Version 2 cannot tell the next opening of leaks, which frees them otherwise.
        let shape = Shape {
            version: 2,
            ..PLAIN
        };
        let mut guest = Guest::new(Random::new(4), shape, file.clone()).await;
        for piece in 0..3 {
            guest.write(piece << 20, 1 << 20, false).await;
        }
        // With what was counted ahead.
        guest.image.flush().await.expect("flushed");
        let len_bytes = file.len_bytes().expect("a length");
        let buffers = Buffers::from_buf([Buffer::for_read(len_bytes as usize)]);
        let bytes = file.read(0, buffers).await.expect("read")[0].to_vec();
        let crashed: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(bytes));
        let report = check(crashed.clone(), &CheckOptions::default()).await;
        let leaks = report.expect("checked").leaks;
        assert!(leaks > 0);
        let options = OpenOptions::default();
        let again = Qcow2::open(crashed, Arc::new(DenyAll), options).await;
        let again = again.expect("opened");
        let compaction = again.compact().await.expect("begun");
        let leaked_bytes = compaction.leaked_bytes().await.expect("surveyed");
        assert_eq!(leaked_bytes, leaks * PLAIN.cluster_bytes);
        drop(compaction);
        again.close().await.expect("closed");
        guest.image.close().await.expect("closed");
    });
}

/// What the guest writes, byte for byte, in a file that takes its time for it.
const SLOW: u8 = 0xa5;

/// A file whose writes of [`SLOW`] take a while.
#[derive(Debug)]
struct Slow(MemStorage);

impl Storage for Slow {
    vellum_storage::delegate!(
        0: capabilities, name, len_bytes, read, write_zeroes, discard, allocate, flush,
        truncate, block_status, close,
    );
    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let is_slow = buffers.iter().all(|buffer| buffer[0] == SLOW);
        let written = self.0.write(offset_bytes, buffers, flags);
        Io::task(spawn(async move {
            for _ in 0..if is_slow { 1000 } else { 0 } {
                lane::yield_now().await;
            }
            written.await
        }))
    }
}

/// What a request has allocated, and not mapped before its data is there, is no leak.
#[test]
fn clusters_of_requests_that_run_are_no_leaks() {
    lane::block_on(async {
        let file = Arc::new(Slow(MemStorage::new()));
        let guest = Guest::new(Random::new(5), PLAIN, file.clone()).await;
        let compaction = guest.image.compact().await.expect("begun");
        let (image, flags) = (&guest.image, RequestFlags::default());
        let writes = (0..16).map(|number| {
            let bytes = Buffer::copy_of(&[SLOW; 4096]);
            image.write(number << 17, bytes, flags)
        });
        let writes = vellum_io::finish_all(16, writes);
        let (written, leaked_bytes) = futures_util::join!(writes, compaction.leaked_bytes());
        written.expect("written");
        assert_eq!(leaked_bytes.expect("surveyed"), 0);
        drop(compaction);
        guest.image.close().await.expect("closed");
    });
}

/// Counting looks at every refcount block of the image; nobody waits for that.
#[test]
fn guests_go_on_while_leaks_are_counted() {
    lane::block_on(async {
        let shape = Shape {
            size_bytes: 24 << 20,
            ..PLAIN
        };
        let memory = Arc::new(MemStorage::new());
        let mut guest = Guest::new(Random::new(7), shape, memory.clone()).await;
        guest.write(0, 24 << 20, false).await;
        guest.image.close().await.expect("closed");
        let bytes = memory.snapshot();
        let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let table = number(48) as usize;
        let second_block = number(table + 8);
        let file = DelayStorage::new(memory);
        let options = OpenOptions::default();
        let image = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
        let image = image.expect("opened");
        let compaction = image.compact().await.expect("begun");
        let block = second_block..second_block + shape.cluster_bytes;
        let held = file.hold(Matching::operation(Operation::Read).touching(block));
        let goes_on = async {
            held.arrived().await;
            let bytes = Buffer::copy_of(&guest.content[..4096]);
            let written = image.write(0, bytes, RequestFlags::default()).await;
            written.expect("written");
            image.flush().await.expect("flushed");
            held.release();
        };
        let (leaked_bytes, ()) = futures_util::join!(compaction.leaked_bytes(), goes_on);
        assert_eq!(leaked_bytes.expect("surveyed"), 0);
        drop(compaction);
        image.close().await.expect("closed");
    });
}

/// One that fails at any read leaves no bytes behind that would be written where others are by then.
#[test]
fn a_compaction_that_fails_writes_nothing_later() {
    const READ_ERROR: i32 = 5;
    let fails_at = |number| async move {
        let file = FaultStorage::new(Arc::new(MemStorage::new()));
        let mut guest = Guest::new(Random::new(6), PLAIN, file.clone()).await;
        guest.write(0, 2 << 20, false).await;
        guest.write(3 << 20, 64 * KIB, true).await;
        guest.image.flush().await.expect("flushed");
        guest.image.discard(0, 1 << 20).await.expect("discarded");
        guest.content[..1 << 20].fill(0);
        guest.image.flush().await.expect("flushed");
        let mut compaction = guest.image.compact().await.expect("begun");
        let reads = Matching::operation(Operation::Read);
        file.fail(reads, number, Times::Once, READ_ERROR);
        let has_failed = loop {
            match compaction.step().await {
                Ok(Some(_)) => {}
                Ok(None) => break false,
                Err(_) => break true,
            }
        };
        drop(compaction);
        file.heal();
        // Goes to where the first one was about to put something.
        guest.write(0, 1 << 20, false).await;
        guest.image.flush().await.expect("flushed");
        guest.compact(false).await;
        guest.verify(&guest.image).await;
        guest.image.close().await.expect("closed");
        guest.used_of(&(file as Arc<dyn Storage>)).await;
        has_failed
    };
    lane::block_on(async move {
        let mut number = 0;
        while fails_at(number).await {
            number += 1;
        }
        assert!(number > 16, "{number}");
    });
}

#[test]
fn a_guest_that_goes_on_loses_nothing() {
    for seed in 100..160 {
        lane::block_on(async move {
            let mut random = Random::new(seed);
            let shape = Shape::random(&mut random);
            let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
            let mut guest = Guest::new(random, shape, file.clone()).await;
            guest.fill().await;
            for _ in 0..2 {
                let compaction = guest.compact(true).await;
                let leaked_bytes = compaction.leaked_bytes().await.expect("surveyed");
                assert_eq!(leaked_bytes, 0, "{shape:?}");
                guest.verify(&guest.image).await;
            }
            guest.image.close().await.expect("closed");
            guest.used_of(&file).await;
            let options = OpenOptions::default();
            let again = Qcow2::open(file, Arc::new(DenyAll), options)
                .await
                .expect("opened");
            guest.verify(&again).await;
            again.close().await.expect("closed");
        });
    }
}

#[test]
fn snapshots_keep_what_they_show() {
    // Some free refcount blocks that are still needed to find other clusters to free.
    for seed in (200..240).chain([330, 459, 581]) {
        lane::block_on(async move {
            let mut random = Random::new(seed);
            let shape = Shape::random(&mut random);
            let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
            let mut guest = Guest::new(random, shape, file.clone()).await;
            guest.fill().await;
            let name = |name: &str| NewSnapshot {
                name: name.into(),
                ..NewSnapshot::default()
            };
            guest
                .image
                .create_snapshot(name("gone"))
                .await
                .expect("taken");
            guest.fill().await;
            guest
                .image
                .create_snapshot(name("kept"))
                .await
                .expect("taken");
            let kept = guest.content.clone();
            guest.fill().await;
            let gone = SnapshotSelector::Name("gone".into());
            guest.image.delete_snapshot(gone).await.expect("deleted");
            guest.compact(true).await;
            guest.verify(&guest.image).await;
            guest.image.flush().await.expect("flushed");
            guest.compact(false).await;
            if !shape.compressed && !shape.lazy {
                let (used, clusters) = guest.length_of(&file).await;
                assert!(is_short(used, clusters), "{used} of {clusters}: {shape:?}");
            }
            let which = SnapshotSelector::Name("kept".into());
            guest.image.apply_snapshot(which).await.expect("applied");
            guest.content = kept;
            guest.verify(&guest.image).await;
            guest.image.close().await.expect("closed");
            guest.used_of(&file).await;
        });
    }
}

#[test]
fn bitmaps_call_nothing_dirty_that_was_moved() {
    lane::block_on(async {
        let random = Random::new(7);
        let shape = Shape {
            size_bytes: 1 << 20,
            ..PLAIN
        };
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let mut guest = Guest::new(random, shape, file.clone()).await;
        guest.fill().await;
        let bitmaps = guest.image.bitmaps();
        bitmaps
            .add("since", BitmapOptions::default())
            .await
            .expect("added");
        guest.write(0, 4 * KIB, false).await;
        let dirty = bitmaps.read("since").await.expect("read").dirty_bytes();
        let compaction = guest.compact(false).await;
        assert!(compaction.progress().moved_bytes > 0);
        let after = bitmaps.read("since").await.expect("read").dirty_bytes();
        assert_eq!(after, dirty);
        guest.image.close().await.expect("closed");
        let (used, clusters) = guest.used_of(&file).await;
        assert!(is_short(used, clusters), "{used} of {clusters}");
    });
}

#[test]
fn qemu_finds_nothing_wrong() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    for seed in 300..306 {
        let file = Arc::new(MemStorage::new());
        let storage: Arc<dyn Storage> = file.clone();
        lane::block_on(async move {
            let mut random = Random::new(seed);
            let shape = Shape::random(&mut random);
            let mut guest = Guest::new(random, shape, storage).await;
            guest.fill().await;
            guest.compact(true).await;
            guest.image.close().await.expect("closed");
        });
        std::fs::write(&path, file.snapshot()).expect("written");
        let (qemu, vellum) = (qemu_verdict(&path), vellum_verdict(&path));
        assert_eq!((qemu.exit_code, qemu.messages), (0, vec![]));
        assert_eq!((vellum.exit_code, vellum.messages), (0, vec![]));
    }
}

#[test]
fn an_open_snapshot_keeps_what_it_has_looked_up() {
    lane::block_on(async {
        let random = Random::new(11);
        let shape = Shape {
            cluster_bytes: 4 * KIB,
            extended_l2: false,
            version: 3,
            lazy: false,
            compressed: false,
            refcount_bits: 16,
            size_bytes: 1 << 20,
        };
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let mut guest = Guest::new(random, shape, file.clone()).await;
        guest.fill().await;
        let new = NewSnapshot {
            name: "one".into(),
            ..NewSnapshot::default()
        };
        guest.image.create_snapshot(new).await.expect("taken");
        let which = SnapshotSelector::Name("one".into());
        let view = guest.image.open_snapshot(which).await.expect("opened");
        let shown = guest.content.clone();
        guest.verify(&view).await;
        guest.fill().await;
        guest.compact(true).await;
        guest.image.flush().await.expect("flushed");
        guest.fill().await;
        let buffer = Buffer::for_read(shown.len());
        assert!(view.read(0, buffer).await.expect("read")[..] == shown[..]);
        // When it is closed, what it showed is moved as well.
        view.close().await.expect("closed");
        drop(view);
        guest.compact(false).await;
        guest.verify(&guest.image).await;
        guest.image.close().await.expect("closed");
        let (used, clusters) = guest.used_of(&file).await;
        assert!(is_short(used, clusters), "{used} of {clusters}");
    });
}
