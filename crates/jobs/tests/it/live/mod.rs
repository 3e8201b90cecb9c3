//! Jobs on images that are in use: whatever guests write meanwhile, and whatever becomes of
//! the job, every byte is what was written last.

mod backup;
mod pace;
mod world;

use std::rc::Rc;
use std::sync::Arc;

use vellum::nodes::{CopyOnRead, Link, nothing};
use vellum::qcow2::Backing;
use vellum::{BlockDevice, Buffer, RequestFlags};
use vellum_io::lane::{block_on, yield_now};
use vellum_io::spawn;
use vellum_jobs::copy::Silent;
use vellum_jobs::job::{JobCommand, JobControl};
use vellum_jobs::live::{
    CopyOutcome, DirtyMap, InitialSync, LiveMirror, LiveMirrorOptions, LiveStream, MirrorPart,
    Tracker,
};

use world::{SIZE_BYTES, World, image, new_file};

fn options(part: MirrorPart) -> LiveMirrorOptions {
    LiveMirrorOptions {
        part,
        parallel: 4,
        unmap: true,
        write_blocking: false,
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
    let how = options(MirrorPart::Layers(1));
    let job = LiveMirror::new(source.clone(), target, dirty, how).await;
    let job = job.expect("a job");
    let control = Rc::new(JobControl::new());
    let leader = {
        let (control, dice) = (control.clone(), world.dice.clone());
        let between = [JobCommand::Run, JobCommand::Pause][dice.below(2) as usize];
        let last = [JobCommand::Run, JobCommand::Cancel][dice.below(2) as usize];
        spawn(async move {
            for command in [JobCommand::Pause, between, last] {
                for _ in 0..dice.below(300) {
                    yield_now().await;
                }
                control.set(command);
            }
        })
    };
    let begun = job.begin(InitialSync::Layers(1), &control).await;
    let mut copied = begun.expect("a beginning");
    if copied == CopyOutcome::All {
        copied = job.catch_up(&control).await.expect("a copy");
    }
    leader.await;
    let drained = world.disk.drain().await;
    if copied == CopyOutcome::GivenUp || world.dice.below(4) == 0 {
        drained.set(source);
        drop(drained);
        if !job.end().await {
            job.left_target().await;
        }
        return false;
    }
    job.finish().await.expect("the last round");
    drained.set(base.clone());
    true
}

/// Mirrors of a disk in use, one after the other: some are given up, the others take its place.
async fn mirrors(seed: u64) {
    let file = new_file(65536).await;
    let mut current = image(&file, Backing::None).await;
    let mut world = World::new(seed, current.clone());
    world.pass(400).await;
    for number in 0..4 {
        let target = new_file(if number % 2 == 0 { 4096 } else { 65536 }).await;
        let target = image(&target, Backing::None).await;
        if mirror_once(&world, &current, &target).await {
            current = target;
        }
        world.pass(100).await;
    }
    world.end().await;
    world.check(&current, "what is in use last").await;
}

/// One mirror; whether users go on with its target.
async fn mirror_once(
    world: &World,
    source: &Arc<dyn BlockDevice>,
    target: &Arc<dyn BlockDevice>,
) -> bool {
    let dirty = DirtyMap::in_grains_of(4096 << world.dice.below(5), SIZE_BYTES);
    let slow = world.slow(source.clone());
    world
        .disk
        .drain()
        .await
        .set(Tracker::new(slow.clone(), dirty.clone()));
    let how = LiveMirrorOptions {
        write_blocking: world.dice.below(2) == 0,
        ..options(MirrorPart::All)
    };
    let job = LiveMirror::new(slow.clone(), world.slow(target.clone()), dirty, how).await;
    let job = job.expect("a job");
    let control = Rc::new(JobControl::new());
    let given_up = world.dice.below(3) == 0;
    let leader = {
        let (control, dice) = (control.clone(), world.dice.clone());
        spawn(async move {
            for _ in 0..dice.below(600) {
                yield_now().await;
            }
            if given_up {
                control.set(JobCommand::Cancel);
            }
        })
    };
    let mut copied = job.zero_target(&control).await.expect("zeroes");
    if copied == CopyOutcome::All {
        let begun = job.begin(InitialSync::Present, &control).await;
        copied = begun.expect("a beginning");
    }
    if copied == CopyOutcome::All {
        copied = job.catch_up(&control).await.expect("a copy");
    }
    if copied == CopyOutcome::All && world.dice.below(2) == 0 {
        job.handle().block_writes();
        copied = job.keep_up(&control).await.expect("a copy");
    }
    leader.await;
    if copied == CopyOutcome::GivenUp {
        job.handle().release();
        world.disk.drain().await.set(source.clone());
        if !job.end().await {
            job.left_target().await;
        }
        return false;
    }
    job.draw_near().await.expect("a copy");
    let drained = world.disk.drain().await;
    job.finish().await.expect("the last round");
    drained.set(target.clone());
    drop(drained);
    assert!(job.end().await);
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
    let copied = stream.run(0, &JobControl::new(), &mut Silent).await;
    assert_eq!(copied.expect("a stream"), CopyOutcome::All);
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
fn no_byte_is_lost_by_mirrors() {
    for seed in 0..24 {
        block_on(mirrors(seed));
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
        let control = Rc::new(JobControl::new());
        control.speed().set(1);
        let running = control.clone();
        let streaming = spawn(async move { stream.run(0, &running, &mut Silent).await });
        for _ in 0..50 {
            yield_now().await;
        }
        control.set(JobCommand::Cancel);
        assert_eq!(streaming.await.expect("no error"), CopyOutcome::GivenUp);
    });
}
