//! Write logs of images whose program was killed at random moments: a reader that was made
//! from the text of FORMAT.md, Vellum's replay, what Vellum shows over an image that is only
//! read, and a model of what was flushed must all agree.

mod abandoned;
mod around;
mod damage;
mod failures;
#[path = "../../common/log_gate.rs"]
mod log_gate;
mod reader;
mod world;

use std::sync::Arc;

use crate::common::Random;
use log_gate::LogGate;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::{OpenOptions, Qcow2, WriteLogOptions, read_header};
use vellum::{BlockDevice, Buffer, RequestFlags, Result, Storage, ZeroRequest};
use vellum_io::lane::block_on;
use vellum_storage::MemStorage;
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};
use world::{Kill, SIZE, World};

const SEEDS: u64 = 300;
const NAME: &str = "disk.log";
const EIO: i32 = 5;

fn memory(bytes: &[u8]) -> Arc<MemStorage> {
    Arc::new(MemStorage::with_bytes(bytes.to_vec()))
}

async fn open(
    file: Arc<dyn Storage>,
    log: Arc<dyn Storage>,
    read_only: bool,
) -> Result<Arc<Qcow2>> {
    let options = OpenOptions::default().read_only(read_only);
    Qcow2::open(file, Arc::new(LogGate { name: NAME, log }), options).await
}

/// Opens an image with a log of the least length.
async fn open_with_log(file: Arc<dyn Storage>, log: Arc<dyn Storage>) -> Result<Arc<Qcow2>> {
    open_with(file, WriteLogOptions::new(log, NAME)).await
}

async fn open_with(file: Arc<dyn Storage>, log: WriteLogOptions) -> Result<Arc<Qcow2>> {
    let log = log.len_bytes(WriteLogOptions::MIN_LEN_BYTES);
    let options = OpenOptions::default().discard(true).write_log(Some(log));
    Qcow2::open(file, Arc::new(DenyAll), options).await
}

async fn content(image: &Qcow2) -> Vec<u8> {
    let buffer = Buffer::for_read(SIZE as usize);
    image.read(0, buffer).await.expect("readable").to_vec()
}

/// Opens a copy for reading; that changes neither file.
async fn content_read_only(image: &[u8], log: &[u8]) -> Result<Vec<u8>> {
    let (file, log_file) = (memory(image), memory(log));
    let opened = open(file.clone(), log_file.clone(), true).await?;
    let found = content(&opened).await;
    opened.close().await?;
    assert!(file.snapshot() == image && log_file.snapshot() == log);
    Ok(found)
}

/// Replays a copy; what it shows, and the image's bytes afterwards.
async fn content_replayed(image: &[u8], log: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
    let (file, log_file) = (memory(image), memory(log));
    let opened = open(file.clone(), log_file.clone(), false).await?;
    let replayed = file.snapshot();
    assert!(!reader::is_marked(&replayed));
    // It is nobody's from now on; its records stay.
    let records = |log: &[u8]| log.get(2 * 4096..).map(<[u8]>::to_vec);
    assert!(
        records(&log_file.snapshot()) == records(log),
        "a replay changes the log"
    );
    let found = content(&opened).await;
    opened.close().await?;
    let report = check(file, &CheckOptions::default()).await?;
    assert_eq!((report.corruptions, report.check_errors), (0, 0));
    Ok((found, replayed))
}

/// A replay during which the image's file fails, and what is left of the image.
async fn cut_replay(image: &[u8], log: &[u8], random: &mut Random) -> Vec<u8> {
    let file = memory(image);
    let failing = FaultStorage::new(file.clone());
    let operation = random.pick(&[Operation::Write, Operation::WriteZeroes, Operation::Flush]);
    let pass = random.below(12) as usize;
    failing.fail(Matching::operation(operation), pass, Times::Always, EIO);
    drop(open(failing, memory(log), false).await);
    file.snapshot()
}

/// Everything that is said of what a kill left.
async fn examine(kill: &Kill, log: &[u8], random: &mut Random) {
    let written = reader::replay(&kill.image, log).expect("a log that nobody damaged");
    let shown = content_read_only(&kill.image, log)
        .await
        .expect("opened for reading");
    for (at, bytes) in &written {
        assert!(at + bytes.len() <= shown.len());
    }
    let mut replayed_by_reader = shown.clone();
    for (at, bytes) in &written {
        replayed_by_reader[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    assert!(
        replayed_by_reader == shown,
        "the reader says something else"
    );
    kill.model.check(&shown);
    let (found, replayed) = content_replayed(&kill.image, log).await.expect("replayed");
    assert!(
        found == shown,
        "a replay gives something else than reading shows"
    );
    let (again, _) = content_replayed(&replayed, log)
        .await
        .expect("opened again");
    assert!(again == shown, "it is not the same when opened again");
    let cut = cut_replay(&kill.image, log, random).await;
    let (after_cut, _) = content_replayed(&cut, log)
        .await
        .expect("replayed after a cut");
    assert!(
        after_cut == shown,
        "a replay after a cut one gives something else"
    );
}

async fn request(image: &Qcow2, world: &World, random: &mut Random) {
    let durable = random.below(8) == 0;
    let at = random.below(SIZE);
    let longest = random.pick(&[512, 4096, 9000, 9000, 70_000]);
    let len = (1 + random.below(longest)).min(SIZE - at);
    match random.below(10) {
        0..=2 => {
            image.flush().await.expect("flushed");
            world.model().flushed();
        }
        3 => {
            world.model().begin(at, vec![0; len as usize]);
            let request = ZeroRequest::default()
                .may_unmap(random.below(2) == 0)
                .fua(durable);
            image.write_zeroes(at, len, request).await.expect("zeroed");
            world.model().end(durable);
        }
        _ => {
            let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
            world.model().begin(at, bytes.clone());
            let flags = RequestFlags::default().fua(durable);
            let buffer = Buffer::copy_of(&bytes);
            image.write(at, buffer, flags).await.expect("written");
            world.model().end(durable);
        }
    }
}

/// A few uses of one image and its log, which may lie inside it; returns how often a log in a file
/// went on at its start.
async fn run(seed: u64, is_inside: bool) -> u64 {
    let mut random = Random::new(seed);
    let (mut image_bytes, mut log_bytes) = (world::image(&mut random).await, Vec::new());
    let mut wraps = 0;
    for _ in 0..1 + random.below(3) {
        let shown = content_read_only(&image_bytes, &log_bytes)
            .await
            .expect("opened");
        let world = World::new(&image_bytes, &log_bytes, shown, random.next());
        let log = match is_inside {
            true => WriteLogOptions::inside(),
            false => WriteLogOptions::new(world.log_file(), NAME),
        };
        let opened = open_with(world.file(), log).await.expect("opened");
        for _ in 0..random.below(150) {
            request(&opened, &world, &mut random).await;
        }
        if random.below(3) == 0 {
            opened.close().await.expect("closed");
            world.model().flushed();
        }
        (image_bytes, log_bytes) = world.bytes();
        for kill in world.kills() {
            let log = match is_inside {
                true => reader::inside(&kill.image).unwrap_or(&[]),
                false => &kill.log,
            };
            examine(&kill, log, &mut random).await;
            if let Some(torn) = kill.torn(&mut random) {
                examine(&kill, &torn, &mut random).await;
            }
        }
        wraps += world.wraps();
    }
    wraps
}

#[test]
fn whatever_was_flushed_before_a_kill_is_there() {
    let wraps: u64 = (0..SEEDS).map(|seed| block_on(run(seed, false))).sum();
    assert!(wraps > SEEDS, "the ring is too long for this test: {wraps}");
}

#[test]
fn whatever_was_flushed_before_a_kill_is_there_with_a_log_inside() {
    for seed in 0..SEEDS {
        block_on(run(seed, true));
    }
}

/// A program that is killed leaves the clusters of a log inside the image taken; whoever opens the
/// image next gives them back.
#[test]
fn clusters_of_a_log_inside_are_given_back() {
    let use_and_kill = async |is_flushed: bool| {
        let file = memory(&world::image_with(&mut Random::new(1), false).await);
        let image = open_with(file.clone(), WriteLogOptions::inside()).await?;
        let write = image.write(0, Buffer::copy_of(&[7; 4096]), RequestFlags::default());
        write.await?;
        if is_flushed {
            image.flush().await?;
        }
        let killed = memory(&file.snapshot());
        image.close().await?;
        Ok::<_, vellum::Error>((killed, file))
    };
    let leaks = async |file: &Arc<MemStorage>| {
        let report = check(file.clone(), &CheckOptions::default()).await;
        report.map(|report| (report.leaks, report.corruptions))
    };
    block_on(async {
        for is_flushed in [false, true] {
            let (killed, closed) = use_and_kill(is_flushed).await?;
            assert!(reader::inside(&closed.snapshot()).is_none());
            assert_eq!(leaks(&closed).await?, (0, 0));
            let file = memory(&killed.snapshot());
            assert_eq!(reader::is_marked(&killed.snapshot()), is_flushed);
            assert!(reader::inside(&killed.snapshot()).is_some());
            open(file.clone(), memory(&[]), false)
                .await?
                .close()
                .await?;
            assert!(reader::inside(&file.snapshot()).is_none());
            assert_eq!(leaks(&file).await?, (0, 0));
            // And whoever wants such a log takes the same clusters.
            let place = async |file: &Arc<MemStorage>| {
                let header = read_header(&(file.clone() as Arc<dyn Storage>)).await;
                header.map(|header| header.write_log_inside())
            };
            let before = place(&killed).await?;
            let again = open_with(killed.clone(), WriteLogOptions::inside()).await?;
            assert_eq!(place(&killed).await?, before);
            again.close().await?;
            assert_eq!(leaks(&killed).await?, (0, 0));
        }
        Ok::<_, vellum::Error>(())
    })
    .expect("no failure");
}

/// Whoever takes such clusters into use again cannot write the header, again and again. They stay the
/// log's own.
#[test]
fn clusters_of_a_log_inside_that_was_never_named_are_given_back() {
    block_on(async {
        let file = memory(&world::image_with(&mut Random::new(1), false).await);
        let image = open_with(file.clone(), WriteLogOptions::inside()).await?;
        let killed = memory(&file.snapshot());
        image.close().await?;
        let header = read_header(&(killed.clone() as Arc<dyn Storage>)).await?;
        let cluster_bytes = header.geometry().cluster_size_bytes();
        for attempts in 1..5 {
            let file = memory(&killed.snapshot());
            for _ in 0..attempts {
                let failing = FaultStorage::new(file.clone());
                let header = Matching::operation(Operation::Write).touching(0..cluster_bytes);
                failing.fail(header, 0, Times::Always, EIO);
                assert!(open_with(failing, WriteLogOptions::inside()).await.is_err());
            }
            for log in [Some(WriteLogOptions::inside()), None] {
                let file = memory(&file.snapshot());
                let image = match log {
                    Some(log) => open_with(file.clone(), log).await?,
                    None => open(file.clone(), memory(&[]), false).await?,
                };
                image.close().await?;
                let report = check(file, &CheckOptions::default()).await?;
                assert_eq!((report.leaks, report.corruptions), (0, 0), "{attempts}");
            }
        }
        Ok::<_, vellum::Error>(())
    })
    .expect("no failure");
}

/// Clusters that others may take at any time hold no log.
#[test]
fn a_log_inside_needs_clusters_of_its_own() {
    block_on(async {
        let file = memory(&world::image_with(&mut Random::new(1), false).await);
        let image = open_with(file.clone(), WriteLogOptions::inside()).await?;
        let write = image.write(0, Buffer::copy_of(&[7; 4096]), RequestFlags::default());
        write.await?;
        image.flush().await?;
        let killed = memory(&file.snapshot());
        image.close().await?;
        // What a repair does that does not know the log.
        let mut bytes = killed.snapshot();
        bytes[88..96].fill(0);
        let header = read_header(&(memory(&bytes) as Arc<dyn Storage>)).await?;
        assert!(header.write_log_inside().is_none());
        let opened = open(memory(&bytes), memory(&[]), false).await;
        assert!(opened.unwrap_err().message().contains("does not say where"));
        let free = memory(&killed.snapshot());
        let place = read_header(&(free.clone() as Arc<dyn Storage>)).await?;
        let cluster = place.geometry().cluster_size_bytes();
        let first = place.write_log_inside().expect("inside").start / cluster;
        let block = place.refcount_table_offset.bytes() as usize;
        let mut bytes = free.snapshot();
        let block = u64::from_be_bytes(bytes[block..block + 8].try_into().unwrap()) as usize;
        bytes[block + 2 * first as usize..][..2].fill(0);
        let opened = open(memory(&bytes), memory(&[]), false).await;
        assert!(opened.unwrap_err().message().contains("not counted"));
        Ok::<_, vellum::Error>(())
    })
    .expect("no failure");
}
