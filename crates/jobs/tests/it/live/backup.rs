//! Backups of a disk in use: a target holds what the disk showed when its backup began,
//! whatever guests have written since.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vellum::nodes::Link;
use vellum::qcow2::Backing;
use vellum::{
    BlockDevice, Buffer, ErrorKind, Extent, Io, Raw, RawOptions, RequestFlags, ZeroRequest,
    delegate,
};
use vellum_io::lane::{block_on, sleep, yield_now};
use vellum_io::spawn;
use vellum_jobs::copy::Silent;
use vellum_jobs::job::{JobCommand, JobControl};
use vellum_jobs::live::{
    CopyBeforeWrite, CopyBeforeWriteOptions, CopyOutcome, DirtyMap, FleeceOptions, LiveBackup,
    OnCopyError, WhenFull,
};
use vellum_storage::{MemStorage, Storage};

use super::world::{SECTOR_BYTES, SIZE_BYTES, World, image, new_file};

const GRAIN_BYTES: u64 = 4096;

/// How a backup is made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    /// The target stands on the disk itself.
    ShowsSource,
    /// Old bytes wait in a fleece, with room for some of them.
    Fleeced,
}

/// A fleece; with some seeds one that is full soon.
async fn fleece(seed: u64) -> FleeceOptions {
    let memory = Arc::new(MemStorage::new());
    memory.truncate(SIZE_BYTES).await.expect("a fleece");
    FleeceOptions {
        device: Raw::open(memory, RawOptions::default()).expect("a fleece"),
        max_bytes: match seed % 4 {
            0 => 3 * GRAIN_BYTES,
            1 => 0,
            _ => SIZE_BYTES,
        },
        when_full: WhenFull::Wait,
    }
}

/// A disk with guests whose backup has begun.
struct Begun {
    world: World,
    top: Arc<dyn BlockDevice>,
    target: Arc<dyn BlockDevice>,
    backup: LiveBackup,
    written: Arc<DirtyMap>,
    /// What the disk showed.
    expected: Vec<u8>,
}

async fn content(device: &Arc<dyn BlockDevice>) -> Vec<u8> {
    let read = device.read(0, Buffer::for_read(SIZE_BYTES as usize)).await;
    read.expect("the disk").to_vec()
}

impl Begun {
    /// Guests write for a while to an image on a backing file; then a backup begins.
    async fn new(seed: u64, kind: Kind) -> Begun {
        let base = image(&new_file(65536).await, Backing::None).await;
        let world = World::new(seed, base.clone());
        world.pass(1000).await;
        let top = Backing::Given(Link::new(base));
        let cluster_size_bytes = if seed.is_multiple_of(2) { 65536 } else { 4096 };
        let top = image(&new_file(cluster_size_bytes).await, top).await;
        world.disk.drain().await.set(world.slow(top.clone()));
        world.pass(400).await;
        let below = match kind {
            Kind::ShowsSource => {
                // So slow that a write could overtake a read.
                let slow = (0..8).fold(top.clone(), |device, _| world.slow(device));
                Backing::Given(slow)
            }
            Kind::Plain | Kind::Fleeced => Backing::None,
        };
        let target = image(&new_file(4096).await, below).await;
        let fleece = match kind {
            Kind::Fleeced => Some(fleece(seed).await),
            Kind::Plain | Kind::ShowsSource => None,
        };
        let drained = world.disk.drain().await;
        let written = DirtyMap::in_grains_of(SECTOR_BYTES, SIZE_BYTES);
        let keeping = CopyBeforeWriteOptions {
            compress: seed.is_multiple_of(3),
            fleece,
            ..CopyBeforeWriteOptions::new(GRAIN_BYTES, written.clone())
        };
        let source = world.slow(top.clone());
        let slow_target = world.slow(target.clone());
        let filter = CopyBeforeWrite::new(source.clone(), slow_target.clone(), keeping);
        drained.set(filter.clone());
        let expected = content(&top).await;
        drop(drained);
        Begun {
            backup: LiveBackup {
                source,
                filter,
                parallel: 4,
            },
            world,
            top,
            target,
            written,
            expected,
        }
    }

    /// Ends the backup; the guests go on and end with what they have written.
    async fn end(mut self) {
        let drained = self.world.disk.drain().await;
        let changed = self.written.take();
        let now = content(&self.top).await;
        for at in (0..SIZE_BYTES).step_by(SECTOR_BYTES as usize) {
            let sector = at as usize..(at + SECTOR_BYTES) as usize;
            let is_same = now[sector.clone()] == self.expected[sector];
            assert!(is_same || changed.at(at).0, "{at} was written unseen");
        }
        drained.set(self.top.clone());
        drop(drained);
        self.world.pass(200).await;
        self.world.end().await;
        self.world.check(&self.top, "the disk").await;
    }
}

/// A whole backup, held up now and then.
async fn whole(seed: u64, kind: Kind) {
    let begun = Begun::new(seed, kind).await;
    let control = Rc::new(JobControl::new());
    let (leader, dice) = (control.clone(), begun.world.dice.clone());
    let leader = spawn(async move {
        for command in [JobCommand::Pause, JobCommand::Run] {
            for _ in 0..dice.below(300) {
                yield_now().await;
            }
            leader.set(command);
        }
    });
    let total_bytes = begun.backup.todo_bytes();
    let copied = begun.backup.run(&control, &mut Silent, total_bytes).await;
    assert_eq!(copied.expect("a backup"), CopyOutcome::All);
    assert_eq!(begun.backup.todo_bytes(), 0);
    leader.await;
    assert!(
        content(&begun.target).await == begun.expected,
        "seed {seed}: the target holds something else"
    );
    begun.end().await;
}

/// A backup of some ranges: nothing else comes into the target, but for what was about to
/// be overwritten before it was known that nobody wants it.
async fn some(seed: u64, kind: Kind) {
    let begun = Begun::new(seed, kind).await;
    let dice = begun.world.dice.clone();
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < SIZE_BYTES {
        let start = at + dice.below(100_000);
        at = start + 1 + dice.below(20_000);
        ranges.push(start.min(SIZE_BYTES)..at.min(SIZE_BYTES));
    }
    begun.backup.keep_only(ranges.iter().cloned());
    let total_bytes = begun.backup.todo_bytes();
    let control = JobControl::new();
    let copied = begun.backup.run(&control, &mut Silent, total_bytes).await;
    assert_eq!(copied.expect("a backup"), CopyOutcome::All);
    let found = content(&begun.target).await;
    for range in ranges {
        let range = range.start as usize..range.end as usize;
        assert!(
            found[range.clone()] == begun.expected[range.clone()],
            "seed {seed}: {range:?}"
        );
    }
    let grains = begun.expected.chunks(GRAIN_BYTES as usize);
    for (expected, found) in grains.zip(found.chunks(GRAIN_BYTES as usize)) {
        assert!(found == expected || found.iter().all(|byte| *byte == 0));
    }
    begun.end().await;
}

/// Only what is overwritten is copied, and readers of the target see all of the disk as it
/// was.
async fn seen_through(seed: u64) {
    let begun = Begun::new(seed, Kind::ShowsSource).await;
    let seen = Link::new(begun.backup.filter.snapshot_view());
    let control = Rc::new(JobControl::new());
    let over = Rc::new(Cell::new(false));
    let mut readers = Vec::new();
    for _ in 0..3 {
        let (seen, over, dice) = (seen.clone(), over.clone(), begun.world.dice.clone());
        let expected = begun.expected.clone();
        readers.push(spawn(async move {
            while !over.get() {
                let at = dice.below(SIZE_BYTES - 16384);
                let len = 1 + dice.below(16384) as usize;
                let read = seen.read(at, Buffer::for_read(len)).await.expect("bytes");
                let at = at as usize;
                assert!(read[..] == expected[at..at + len], "seed {seed}: {at}");
                yield_now().await;
            }
        }));
    }
    let (waiting, running) = (control.clone(), begun.backup);
    let waiting = spawn(async move {
        let waited = running.wait(&waiting, &mut Silent).await;
        waited.expect("no failure");
        running
    });
    begun.world.pass(2000).await;
    over.set(true);
    for reader in readers {
        reader.await;
    }
    control.set(JobCommand::Cancel);
    let backup = waiting.await;
    backup.filter.end();
    Begun { backup, ..begun }.end().await;
}

#[test]
fn a_backup_holds_what_there_was_when_it_began() {
    for seed in 0..6 {
        block_on(whole(seed, Kind::Plain));
    }
}

#[test]
fn a_backup_of_some_ranges_holds_these() {
    for seed in 0..6 {
        block_on(some(seed, Kind::Plain));
    }
}

#[test]
fn readers_of_the_target_see_the_disk_as_it_was() {
    for seed in 0..6 {
        block_on(seen_through(seed));
    }
}

#[test]
fn a_backup_whose_old_bytes_wait_holds_what_there_was() {
    for seed in 0..8 {
        block_on(whole(seed, Kind::Fleeced));
        block_on(some(seed, Kind::Fleeced));
    }
}

/// What is overwritten comes into the target by way of the fleece, and nothing else does.
async fn overwritten(seed: u64) {
    let begun = Begun::new(seed, Kind::Fleeced).await;
    let control = Rc::new(JobControl::new());
    let (waiting, running) = (control.clone(), begun.backup);
    let waiting = spawn(async move {
        let waited = running.wait(&waiting, &mut Silent).await;
        waited.expect("no failure");
        running
    });
    begun.world.pass(2000).await;
    let drained = begun.world.disk.drain().await;
    let now = content(&begun.top).await;
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let found = content(&begun.target).await;
        let all = now.iter().zip(begun.expected.iter().zip(&found));
        let mut all = all
            .map(|(now, (expected, found))| expected == found || (now == expected && *found == 0));
        if all.all(|is_right| is_right) {
            break;
        }
        assert!(Instant::now() < end, "seed {seed}: old bytes are missing");
        sleep(Duration::from_millis(1)).await;
    }
    control.set(JobCommand::Cancel);
    let backup = waiting.await;
    backup.filter.end();
    drop(drained);
    Begun { backup, ..begun }.end().await;
}

#[test]
fn what_is_overwritten_comes_into_the_target_by_the_fleece() {
    for seed in 0..6 {
        block_on(overwritten(seed));
    }
}

/// A device whose writes fail as long as it is told so.
#[derive(Debug)]
struct Failing {
    device: Arc<dyn BlockDevice>,
    fails: std::sync::atomic::AtomicBool,
}

impl Failing {
    fn new(device: Arc<dyn BlockDevice>) -> Arc<Failing> {
        Arc::new(Failing {
            device,
            fails: true.into(),
        })
    }

    fn begin<T>(&self, begin: impl FnOnce() -> Io<T>) -> Io<T> {
        match self.fails.load(std::sync::atomic::Ordering::Relaxed) {
            true => Io::ready(Err(vellum::Error::from_errno("write", 28))),
            false => begin(),
        }
    }

    fn mend(&self) {
        self.fails
            .store(false, std::sync::atomic::Ordering::Relaxed);
    }
}

impl BlockDevice for Failing {
    delegate!(
        device: info, size_bytes, read, flush, block_status, truncate, close, backing, discard,
    );
    fn write(&self, at: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        self.begin(|| self.device.write(at, buffer, flags))
    }
    fn write_zeroes(&self, at: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.begin(|| self.device.write_zeroes(at, len_bytes, request))
    }
}

async fn disk_of(byte: u8) -> Arc<dyn BlockDevice> {
    let memory = Arc::new(MemStorage::new());
    memory.truncate(SIZE_BYTES).await.expect("a disk");
    let disk = Raw::open(memory, RawOptions::default()).expect("a disk");
    fill(&*disk, byte).await;
    disk
}

async fn fill(disk: &dyn BlockDevice, byte: u8) {
    let bytes = Buffer::copy_of(&vec![byte; SIZE_BYTES as usize]);
    let written = disk.write(0, bytes, RequestFlags::default()).await;
    written.expect("a write");
}

#[test]
fn a_target_that_fails_for_a_while_costs_neither_guests_nor_the_backup() {
    block_on(async {
        let (source, held) = (disk_of(1).await, disk_of(0).await);
        let target = Failing::new(held.clone());
        let written = DirtyMap::new(SIZE_BYTES);
        let options = CopyBeforeWriteOptions {
            fleece: Some(fleece(2).await),
            ..CopyBeforeWriteOptions::new(GRAIN_BYTES, written)
        };
        let filter = CopyBeforeWrite::new(source.clone(), target.clone(), options);
        let backup = LiveBackup {
            source: source.clone(),
            filter: filter.clone(),
            parallel: 4,
        };
        let control = JobControl::new();
        // Some of it is in the fleece by then, some in memory only.
        let first = Buffer::copy_of(&[2; 512]);
        filter
            .write(0, first, RequestFlags::default())
            .await
            .expect("a write");
        let failed = backup.run(&control, &mut Silent, SIZE_BYTES).await;
        assert_eq!(
            failed.expect_err("a failure").cause.kind(),
            ErrorKind::NoSpace
        );
        fill(&*filter, 2).await;
        assert_eq!(backup.todo_bytes(), SIZE_BYTES);
        target.mend();
        let copied = backup.run(&control, &mut Silent, SIZE_BYTES).await;
        assert_eq!(copied.expect("a backup"), CopyOutcome::All);
        assert!(content(&held).await.iter().all(|byte| *byte == 1));
        assert!(content(&source).await.iter().all(|byte| *byte == 2));
    });
}

/// A fleece whose disk loses what was written last, without an error at the write.
#[derive(Debug)]
struct Losing {
    device: Arc<dyn BlockDevice>,
    zeroes: Arc<dyn BlockDevice>,
}

impl BlockDevice for Losing {
    delegate!(
        device: info, size_bytes, write, write_zeroes, flush, truncate, close, backing, discard,
    );
    fn read(&self, at: u64, buffer: Buffer) -> Io<Buffer> {
        self.zeroes.read(at, buffer)
    }
    fn block_status(&self, at: u64, len_bytes: u64, max_runs: u32) -> Io<Extent> {
        self.zeroes.block_status(at, len_bytes, max_runs)
    }
}

#[test]
fn bytes_that_the_fleece_has_lost_end_the_backup() {
    block_on(async {
        let (source, target) = (disk_of(1).await, disk_of(9).await);
        let honest = fleece(2).await;
        let losing = FleeceOptions {
            device: Arc::new(Losing {
                device: honest.device.clone(),
                zeroes: disk_of(0).await,
            }),
            ..honest
        };
        let options = CopyBeforeWriteOptions {
            fleece: Some(losing),
            ..CopyBeforeWriteOptions::new(GRAIN_BYTES, DirtyMap::new(SIZE_BYTES))
        };
        let filter = CopyBeforeWrite::new(source.clone(), target.clone(), options);
        fill(&*filter, 2).await;
        let backup = LiveBackup {
            source,
            filter,
            parallel: 4,
        };
        let control = JobControl::new();
        let copied = backup.run(&control, &mut Silent, SIZE_BYTES).await;
        let error = copied.expect_err("lost bytes").cause;
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        // Nothing wrong was written.
        assert!(content(&target).await.iter().all(|byte| *byte == 9));
    });
}

#[test]
fn a_fleece_without_room_ends_the_backup_where_guests_are_not_to_wait() {
    block_on(async {
        let (source, target) = (disk_of(1).await, disk_of(0).await);
        let full = FleeceOptions {
            max_bytes: 4 * GRAIN_BYTES,
            when_full: WhenFull::Fail,
            ..fleece(2).await
        };
        let options = CopyBeforeWriteOptions {
            fleece: Some(full),
            ..CopyBeforeWriteOptions::new(GRAIN_BYTES, DirtyMap::new(SIZE_BYTES))
        };
        let filter = CopyBeforeWrite::new(source.clone(), target.clone(), options);
        fill(&*filter, 2).await;
        let backup = LiveBackup {
            source,
            filter,
            parallel: 4,
        };
        let copied = backup
            .run(&JobControl::new(), &mut Silent, SIZE_BYTES)
            .await;
        assert_eq!(
            copied.expect_err("lost bytes").cause.kind(),
            ErrorKind::NoSpace
        );
        // Whoever goes on by a bitmap has to know it.
        assert_eq!(backup.filter.todo(), [0..SIZE_BYTES]);
    });
}

#[test]
fn a_snapshot_shows_what_there_was_until_that_is_lost() {
    block_on(async {
        let (source, target) = (disk_of(1).await, Failing::new(disk_of(0).await));
        target.mend();
        let options = CopyBeforeWriteOptions {
            on_error: OnCopyError::BreakSnapshot,
            ..CopyBeforeWriteOptions::new(GRAIN_BYTES, DirtyMap::new(SIZE_BYTES))
        };
        let filter = CopyBeforeWrite::new(source.clone(), target.clone(), options);
        filter.show_only([0..SIZE_BYTES / 2]);
        let snapshot = filter.snapshot();
        let part = |at| Buffer::copy_of(&[at; 8192]);
        filter
            .write(5000, part(2), RequestFlags::default())
            .await
            .expect("a write");
        let read = snapshot
            .read(100, Buffer::for_read(65536))
            .await
            .expect("old bytes");
        assert!(read.iter().all(|byte| *byte == 1));
        let hidden = snapshot.read(SIZE_BYTES / 2, Buffer::for_read(1)).await;
        assert_eq!(hidden.expect_err("not shown").errno(), 13);
        snapshot.discard(0, GRAIN_BYTES).await.expect("a discard");
        let gone = snapshot.read(0, Buffer::for_read(1)).await;
        assert_eq!(gone.expect_err("given up").errno(), 13);
        target
            .fails
            .store(true, std::sync::atomic::Ordering::Relaxed);
        filter
            .write(65536, part(3), RequestFlags::default())
            .await
            .expect("a write");
        let lost = snapshot.read(GRAIN_BYTES, Buffer::for_read(1)).await;
        assert_eq!(lost.expect_err("lost").errno(), 13);
    });
}
