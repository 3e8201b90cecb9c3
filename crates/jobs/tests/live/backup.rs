//! Backups of a disk in use: a target holds what the disk showed when its backup began,
//! whatever guests have written since.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use vellum::nodes::Link;
use vellum::qcow2::Backing;
use vellum::{BlockDevice, Buffer};
use vellum_io::lane::{block_on, yield_now};
use vellum_io::spawn;
use vellum_jobs::copy::Silent;
use vellum_jobs::job::{JobCommand, JobControl};
use vellum_jobs::live::{
    CopyBeforeWrite, CopyBeforeWriteOptions, CopyOutcome, DirtyMap, LiveBackup,
};

use crate::world::{SECTOR_BYTES, SIZE_BYTES, World, image, new_file};

const GRAIN_BYTES: u64 = 4096;

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
    /// Guests write for a while to an image on a backing file; then a backup begins, to a
    /// target that stands on the disk itself if `shows_source`.
    async fn new(seed: u64, shows_source: bool) -> Begun {
        let base = image(&new_file(65536).await, Backing::None).await;
        let world = World::new(seed, base.clone());
        world.pass(1000).await;
        let top = Backing::Given(Link::new(base));
        let cluster_size_bytes = if seed.is_multiple_of(2) { 65536 } else { 4096 };
        let top = image(&new_file(cluster_size_bytes).await, top).await;
        world.disk.drain().await.set(world.slow(top.clone()));
        world.pass(400).await;
        let below = match shows_source {
            true => {
                // So slow that a write could overtake a read.
                let slow = (0..8).fold(top.clone(), |device, _| world.slow(device));
                Backing::Given(slow)
            }
            false => Backing::None,
        };
        let target = image(&new_file(4096).await, below).await;
        let drained = world.disk.drain().await;
        let written = DirtyMap::in_grains_of(SECTOR_BYTES, SIZE_BYTES);
        let keeping = CopyBeforeWriteOptions {
            grain_bytes: GRAIN_BYTES,
            compress: seed.is_multiple_of(3),
            written: written.clone(),
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
                target: slow_target,
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
async fn whole(seed: u64) {
    let begun = Begun::new(seed, false).await;
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
    let copied = begun.backup.run(&control, &mut Silent).await;
    assert_eq!(copied.expect("a backup"), CopyOutcome::All);
    leader.await;
    assert!(
        content(&begun.target).await == begun.expected,
        "seed {seed}: the target holds something else"
    );
    begun.end().await;
}

/// A backup of some ranges: nothing else comes into the target, but for what was about to
/// be overwritten before it was known that nobody wants it.
async fn some(seed: u64) {
    let begun = Begun::new(seed, false).await;
    let dice = begun.world.dice.clone();
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < SIZE_BYTES {
        let start = at + dice.below(100_000);
        at = start + 1 + dice.below(20_000);
        ranges.push(start.min(SIZE_BYTES)..at.min(SIZE_BYTES));
    }
    begun.backup.keep_only(ranges.iter().cloned());
    let copied = begun.backup.run(&JobControl::new(), &mut Silent).await;
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
    let begun = Begun::new(seed, true).await;
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
        running.wait(&waiting, &mut Silent).await;
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
        block_on(whole(seed));
    }
}

#[test]
fn a_backup_of_some_ranges_holds_these() {
    for seed in 0..6 {
        block_on(some(seed));
    }
}

#[test]
fn readers_of_the_target_see_the_disk_as_it_was() {
    for seed in 0..6 {
        block_on(seen_through(seed));
    }
}
