//! Jobs on images that are in use: whatever guests write meanwhile, and whatever becomes of
//! the job, every byte is what was written last.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::nodes::{CopyOnRead, Link, nothing};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Extent, Io, RequestFlags, Storage, ZeroRequest, pass_on};
use vellum_jobs::copy::Silent;
use vellum_jobs::job::{Reins, Wish};
use vellum_jobs::live::{Copied, DirtyMap, LiveCommit, LiveCommitOptions, LiveStream, Tracker};
use vellum_storage::lane::{block_on, yield_now};
use vellum_storage::{JoinHandle, MemStorage, spawn};

const SIZE_BYTES: u64 = 1 << 20;
const SECTOR_BYTES: u64 = 512;
const SECTORS: u64 = SIZE_BYTES / SECTOR_BYTES;
const GUESTS: u64 = 4;

/// Numbers that look random, the same for each seed.
#[derive(Debug)]
struct Dice(Cell<u64>);

impl Dice {
    fn new(seed: u64) -> Rc<Dice> {
        Rc::new(Dice(Cell::new(seed.wrapping_mul(2) + 1)))
    }

    fn below(&self, end: u64) -> u64 {
        let next = self
            .0
            .get()
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.0.set(next);
        (next >> 33) % end
    }
}

/// A device whose requests take their time, so that others come between.
#[derive(Debug)]
struct Slow(Arc<dyn BlockDevice>, u64);

impl Slow {
    /// Waits for as many turns as an offset says, before or after the request itself.
    fn late<T: 'static>(
        &self,
        offset_bytes: u64,
        begin: impl FnOnce(&dyn BlockDevice) -> Io<T> + 'static,
    ) -> Io<T> {
        let (device, seed) = (self.0.clone(), self.1);
        Io::task(spawn(async move {
            let mixed = (offset_bytes / SECTOR_BYTES).wrapping_mul(seed | 1) >> 3;
            for _ in 0..mixed % 7 {
                yield_now().await;
            }
            let result = begin(&*device).await;
            for _ in 0..(mixed >> 5) % 7 {
                yield_now().await;
            }
            result
        }))
    }
}

impl BlockDevice for Slow {
    pass_on!(0: info, size_bytes, truncate, close, backing);
    fn read(&self, at: u64, buffer: Buffer) -> Io<Buffer> {
        self.late(at, move |device| device.read(at, buffer))
    }
    fn write(&self, at: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        self.late(at, move |device| device.write(at, buffer, flags))
    }
    fn write_zeroes(&self, at: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.late(at, move |device| {
            device.write_zeroes(at, len_bytes, request)
        })
    }
    fn discard(&self, at: u64, len_bytes: u64) -> Io<()> {
        self.late(at, move |device| device.discard(at, len_bytes))
    }
    fn flush(&self) -> Io<()> {
        self.late(0, |device| device.flush())
    }
    fn block_status(&self, at: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
        self.late(at, move |device| {
            device.block_status(at, len_bytes, max_depth)
        })
    }
}

/// What every sector holds: the byte that fills it.
type Model = Rc<RefCell<Vec<u8>>>;

struct World {
    dice: Rc<Dice>,
    seed: u64,
    model: Model,
    /// What the guests use.
    disk: Arc<Link>,
    over: Rc<Cell<bool>>,
    guests: Vec<JoinHandle<()>>,
}

async fn image(file: &Arc<dyn Storage>, backing: Backing) -> Arc<dyn BlockDevice> {
    let options = OpenOptions {
        backing,
        ..OpenOptions::default()
    };
    let image = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
    image.expect("an image")
}

async fn new_file(cluster_size_bytes: u64) -> Arc<dyn Storage> {
    let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = CreateOptions {
        size_bytes: SIZE_BYTES,
        cluster_size_bytes,
        ..CreateOptions::default()
    };
    create(file.clone(), None, &options)
        .await
        .expect("an image");
    file
}

/// One guest: it writes, zeroes, discards and reads sectors that are its own, among those
/// of others in the same clusters, one request after the other.
async fn guest(number: u64, disk: Arc<Link>, model: Model, dice: Rc<Dice>, over: Rc<Cell<bool>>) {
    while !over.get() {
        let sector = dice.below(SECTORS / GUESTS) * GUESTS + number;
        let (at, byte) = (sector * SECTOR_BYTES, dice.below(255) as u8 + 1);
        let index = sector as usize;
        match dice.below(8) {
            0 => {
                let request = ZeroRequest {
                    may_unmap: dice.below(2) == 0,
                    ..ZeroRequest::default()
                };
                disk.write_zeroes(at, SECTOR_BYTES, request)
                    .await
                    .expect("zeroes");
                model.borrow_mut()[index] = 0;
            }
            1 | 2 => {
                let read = disk
                    .read(at, Buffer::for_read(512))
                    .await
                    .expect("a sector");
                let expected = model.borrow()[index];
                assert!(
                    read.iter().all(|found| *found == expected),
                    "sector {sector}"
                );
            }
            3 => disk.flush().await.expect("a flush"),
            _ => {
                let bytes = Buffer::copy_of(&[byte; 512]);
                let write = disk.write(at, bytes, RequestFlags::default());
                write.await.expect("a write");
                model.borrow_mut()[index] = byte;
            }
        }
        yield_now().await;
    }
}

impl World {
    fn new(seed: u64, disk: Arc<dyn BlockDevice>) -> World {
        let mut world = World {
            dice: Dice::new(seed),
            seed,
            model: Rc::new(RefCell::new(vec![0; SECTORS as usize])),
            disk: Link::new(disk),
            over: Rc::default(),
            guests: Vec::new(),
        };
        for number in 0..GUESTS {
            let (disk, model) = (world.disk.clone(), world.model.clone());
            let (dice, over) = (world.dice.clone(), world.over.clone());
            world
                .guests
                .push(spawn(guest(number, disk, model, dice, over)));
        }
        world
    }

    fn slow(&self, device: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
        Arc::new(Slow(device, self.seed.wrapping_mul(0x9E37_79B9)))
    }

    /// Lets the guests work for a while.
    async fn pass(&self, turns: u64) {
        for _ in 0..self.dice.below(turns) {
            yield_now().await;
        }
    }

    async fn end(&mut self) {
        self.over.set(true);
        for guest in self.guests.drain(..) {
            guest.await;
        }
    }

    async fn check(&self, device: &Arc<dyn BlockDevice>, what: &str) {
        let bytes = device.read(0, Buffer::for_read(SIZE_BYTES as usize)).await;
        let bytes = bytes.expect("the disk");
        for (sector, expected) in self.model.borrow().iter().enumerate() {
            let found = &bytes[sector * 512..][..512];
            assert!(
                found == [*expected; 512],
                "seed {}: {what}: sector {sector} holds {} and not {expected}",
                self.seed,
                found[0]
            );
        }
    }
}

fn options(layers: u32) -> LiveCommitOptions {
    LiveCommitOptions {
        layers,
        parallel: 4,
    }
}

/// Snapshots and commits in turn, beside the guests: some commits complete, others are
/// given up.
async fn commits(seed: u64) {
    let base_file = new_file(65536).await;
    let base = image(&base_file, Backing::None).await;
    let mut world = World::new(seed, base.clone());
    for _ in 0..3 {
        world.pass(400).await;
        let below = Link::new(world.slow(base.clone()));
        let top_file = new_file(if seed.is_multiple_of(2) { 65536 } else { 4096 }).await;
        let top = image(&top_file, Backing::Given(below)).await;
        world.disk.drain().await.set(world.slow(top.clone()));
        world.pass(400).await;
        let completed = loop {
            match commit_once(&world, &top, &base).await {
                true => break true,
                false if world.dice.below(4) == 0 => break false,
                false => world.pass(100).await,
            }
        };
        if !completed {
            // The end: the image that was on top shows everything.
            world.end().await;
            world.check(&top, "the top").await;
            top.close().await.expect("a close");
            base.close().await.expect("a close");
            let below = image(&base_file, Backing::None).await;
            let again = image(&top_file, Backing::Given(below)).await;
            return world.check(&again, "the top, opened again").await;
        }
        top.close().await.expect("a close");
    }
    world.end().await;
    world.check(&base, "the base").await;
    base.close().await.expect("a close");
    let again = image(&base_file, Backing::None).await;
    world.check(&again, "the base, opened again").await;
}

/// One commit; whether it completed.
async fn commit_once(
    world: &World,
    top: &Arc<dyn BlockDevice>,
    base: &Arc<dyn BlockDevice>,
) -> bool {
    let dirty = DirtyMap::new(SIZE_BYTES);
    let source = world.slow(top.clone());
    let tracker = Tracker::new(source.clone(), dirty.clone());
    world.disk.drain().await.set(tracker);
    let target = world.slow(base.clone());
    let job = LiveCommit::new(source.clone(), target, dirty, options(1)).await;
    let job = job.expect("a job");
    let reins = Rc::new(Reins::new());
    let leader = {
        let (reins, dice) = (reins.clone(), world.dice.clone());
        let between = [Wish::Run, Wish::Pause][dice.below(2) as usize];
        let last = [Wish::Run, Wish::Cancel][dice.below(2) as usize];
        spawn(async move {
            for wish in [Wish::Pause, between, last] {
                for _ in 0..dice.below(300) {
                    yield_now().await;
                }
                reins.set(wish);
            }
        })
    };
    let mut copied = job.copy_all(&reins, &mut Silent).await.expect("a copy");
    if copied == Copied::All {
        copied = job.catch_up(&reins).await.expect("a copy");
    }
    leader.await;
    let drained = world.disk.drain().await;
    if copied == Copied::GivenUp || world.dice.below(4) == 0 {
        drained.set(source);
        return false;
    }
    job.finish().await.expect("the last round");
    drained.set(base.clone());
    true
}

/// Brings a base up into an image in use.
async fn streams(seed: u64) {
    let base_file = new_file(65536).await;
    let base = image(&base_file, Backing::None).await;
    let mut world = World::new(seed, base.clone());
    world.pass(2000).await;
    let below = Link::new(world.slow(base.clone()));
    let top_file = new_file(65536).await;
    let top = image(&top_file, Backing::Given(below.clone())).await;
    world.disk.drain().await.set(top.clone());
    world.pass(200).await;
    let slow = world.slow(top.clone());
    let filter = CopyOnRead::fetching(slow.clone());
    world.disk.drain().await.set(filter.clone());
    let stream = LiveStream {
        image: slow,
        filter,
        layers: 1,
        parallel: 4,
    };
    let copied = stream.run(&Reins::new(), &mut Silent).await;
    assert_eq!(copied.expect("a stream"), Copied::All);
    below.drain().await.set(nothing().expect("a device"));
    world.disk.drain().await.set(top.clone());
    world.pass(200).await;
    world.end().await;
    world.check(&top, "the image").await;
    top.close().await.expect("a close");
    let alone = image(&top_file, Backing::None).await;
    world.check(&alone, "the image, alone").await;
}

#[test]
fn no_byte_is_lost_by_snapshots_and_commits() {
    for seed in 0..24 {
        block_on(commits(seed));
    }
}

#[test]
fn no_byte_is_lost_by_a_stream() {
    for seed in 0..12 {
        block_on(streams(seed));
    }
}

#[test]
fn a_slow_stream_is_given_up_at_once() {
    block_on(async {
        let base_file = new_file(65536).await;
        let base = image(&base_file, Backing::None).await;
        for at in 0..4 {
            let bytes = Buffer::copy_of(&[5; 4096]);
            // With gaps between, so that there are several pieces.
            let write = base.write(at * 131_072, bytes, RequestFlags::default());
            write.await.expect("a write");
        }
        let top_file = new_file(65536).await;
        let top = image(&top_file, Backing::Given(base)).await;
        let stream = LiveStream {
            filter: CopyOnRead::fetching(top.clone()),
            image: top,
            layers: 1,
            parallel: 4,
        };
        let reins = Rc::new(Reins::new());
        reins.speed().set(1);
        let running = reins.clone();
        let streaming = spawn(async move { stream.run(&running, &mut Silent).await });
        for _ in 0..50 {
            yield_now().await;
        }
        reins.set(Wish::Cancel);
        assert_eq!(streaming.await.expect("no error"), Copied::GivenUp);
    });
}
