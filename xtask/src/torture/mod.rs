//! `cargo xtask torture`: servers that are killed in the middle of everything.
//!
//! A disk of random images is served by `vellum daemon` or `vellum nbd` to several clients
//! that write, zero, trim, read and flush at random, while a monitor snapshots, commits,
//! streams, backs up and resizes it and takes its export away. After 50 ms to 3 s the server
//! is killed with SIGKILL. Then every acknowledged and flushed byte must be there, read by
//! the real `qemu-img` and by ours; `qemu-img check` may find leaks at worst; a backup that
//! was completed must show its moment. The next round goes on with what is left; every few
//! rounds there is a new disk.
//!
//! `--power` lets the power of servers fail instead ([`power`]). One disk in a few is an image of fixed length
//! ([`fixed`]); with `--fixed-length` all are.
//!
//! The seed decides everything but the moments that threads, the kernel and kills make up;
//! a failure names the seed of its disk, and `--disk` plays that one again and again.

mod changes;
mod disk;
mod file;
mod fixed;
mod guest;
mod load;
mod model;
mod monitor;
mod place;
mod power;
mod round;
mod service;
mod space;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lexopt::{Arg, ValueExt as _};

use crate::fixed_length::Kind;
use crate::random::Random;
use crate::workspace::Workspace;
use disk::{Disk, OnFull, Programs};
use fixed::{FixedDisk, Leaks};
use model::{GRANULE_BYTES, Model};
use place::Place;
use round::Report;

/// How often progress is printed.
const PROGRESS: Duration = Duration::from_secs(60);
/// After so many failures the rest would tell nothing new.
const MOST_FAILURES: u64 = 10;
/// Power cuts of a round, if no other number is asked for.
const CUTS: u64 = 100;
/// Lines of the history of a failed round that are shown.
const STORY_LINES: usize = 25;

struct Arguments {
    seed: u64,
    /// Only this disk, again and again.
    disk: Option<u64>,
    limit: Option<Duration>,
    rounds: u64,
    jobs: u64,
    vellum: Option<PathBuf>,
    real: bool,
    /// The power fails, so often a round.
    power: bool,
    /// All images are of fixed length.
    is_fixed: bool,
    /// What fixes the length.
    kind: Kind,
    cuts: u64,
    /// The disk does nothing at three of four flushes, and who does not notice it fails: the
    /// torture itself is tried.
    lie: bool,
}

/// What all rounds have come to.
#[derive(Debug, Default)]
struct Tally {
    begun: AtomicU64,
    passed: AtomicU64,
    failed: AtomicU64,
    answered: AtomicU64,
    answered_by_file: AtomicU64,
    answered_by_guest: AtomicU64,
    returns: AtomicU64,
    flushes: AtomicU64,
    changes: AtomicU64,
    backups: AtomicU64,
    cuts: AtomicU64,
    compactions: AtomicU64,
    policy_jobs: AtomicU64,
    cut_jobs: AtomicU64,
    services: AtomicU64,
    fills: AtomicU64,
    full: AtomicU64,
    fixed: AtomicU64,
    leaks: Mutex<Leaks>,
    last_progress: Mutex<Option<Instant>>,
}

/// The task.
pub fn run(parser: lexopt::Parser) -> Result<()> {
    let arguments = parse(parser)?;
    let workspace = Workspace::locate()?;
    let vellum = match &arguments.vellum {
        Some(path) => std::path::absolute(path)?,
        None if arguments.real => PathBuf::new(),
        None => workspace.build_vellum()?,
    };
    let programs = Programs {
        vellum,
        real: arguments.real,
    };
    println!("torture: seed {}", arguments.seed);
    let (tally, started) = (Tally::default(), Instant::now());
    std::thread::scope(|scope| {
        for job in 0..arguments.jobs {
            let (tally, programs, workspace) = (&tally, &programs, &workspace);
            let worker = Worker {
                arguments: &arguments,
                started,
                tally,
                programs,
                target: &workspace.target,
                job,
            };
            scope.spawn(move || {
                if let Err(error) = worker.work() {
                    println!("the torture itself failed: {error:#}");
                    tally.failed.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    println!("torture: {}", tally.shown(started));
    let failed = tally.failed.into_inner();
    println!("{} passed, {failed} failed", tally.passed.into_inner());
    match failed {
        0 => Ok(()),
        _ => bail!("some rounds failed (seed {})", arguments.seed),
    }
}

fn parse(mut parser: lexopt::Parser) -> Result<Arguments> {
    let mut arguments = Arguments {
        seed: 1,
        disk: None,
        limit: None,
        rounds: u64::MAX,
        jobs: 1,
        vellum: None,
        real: false,
        power: false,
        is_fixed: false,
        kind: Kind::Nbd,
        cuts: CUTS,
        lie: false,
    };
    while let Some(argument) = parser.next()? {
        match argument {
            Arg::Long("minutes") => {
                let minutes: f64 = parser.value()?.parse()?;
                arguments.limit = Some(Duration::try_from_secs_f64(minutes * 60.0)?);
            }
            Arg::Long("rounds") => arguments.rounds = parser.value()?.parse()?,
            Arg::Long("seed") => arguments.seed = parser.value()?.parse()?,
            Arg::Long("disk") => {
                let number = parser.value()?.string()?;
                let digits = number.trim_start_matches("0x");
                arguments.disk = Some(u64::from_str_radix(digits, 16)?);
            }
            Arg::Long("jobs") => arguments.jobs = parser.value()?.parse()?,
            Arg::Long("vellum") => arguments.vellum = Some(parser.value()?.into()),
            Arg::Long("real") => arguments.real = true,
            Arg::Long("power") => arguments.power = true,
            Arg::Long("fixed-length") => arguments.is_fixed = true,
            Arg::Long("loop") => arguments.kind = Kind::Loop,
            Arg::Long("lie") => arguments.lie = true,
            Arg::Long("cuts") => arguments.cuts = parser.value()?.parse()?,
            other => return Err(other.unexpected().into()),
        }
    }
    if arguments.limit.is_none() && arguments.rounds == u64::MAX {
        bail!("say how long: --minutes N or --rounds N");
    }
    if arguments.power && arguments.real {
        // Its flushes stand in the log behind what ended while they were under way.
        bail!("QEMU's log does not say what a flush covers");
    }
    Ok(arguments)
}

impl Tally {
    fn shown(&self, started: Instant) -> String {
        let get = |number: &AtomicU64| number.load(Ordering::Relaxed);
        format!(
            "{} kills in {} s, {} failed; {} requests ({} through files, {} of guests), {} flushes, {} commands to \
             monitors, {} backups compared, {} compactions and {} jobs of policies, {} of \
             which a kill has cut, {} services, {} times without room, which \
             requests met {} times, {} guests that \
             came back, {} power cuts, {} kills on images of fixed length; {}",
            get(&self.passed) + get(&self.failed),
            started.elapsed().as_secs(),
            get(&self.failed),
            get(&self.answered),
            get(&self.answered_by_file),
            get(&self.answered_by_guest),
            get(&self.flushes),
            get(&self.changes),
            get(&self.backups),
            get(&self.compactions),
            get(&self.policy_jobs),
            get(&self.cut_jobs),
            get(&self.services),
            get(&self.fills),
            get(&self.full),
            get(&self.returns),
            get(&self.cuts),
            get(&self.fixed),
            self.leaks.lock().unwrap_or_else(PoisonError::into_inner),
        )
    }

    fn progress(&self, started: Instant) {
        let mut last = self
            .last_progress
            .lock()
            .unwrap_or_else(|last| last.into_inner());
        if last.unwrap_or(started).elapsed() >= PROGRESS {
            println!("torture: {}", self.shown(started));
            *last = Some(Instant::now());
        }
    }
}

/// One of those who torture.
struct Worker<'a> {
    arguments: &'a Arguments,
    started: Instant,
    tally: &'a Tally,
    programs: &'a Programs,
    target: &'a Path,
    job: u64,
}

impl Worker<'_> {
    /// Takes the number of another round, if there is to be one.
    fn next_round(&self) -> Option<u64> {
        let in_time = self
            .arguments
            .limit
            .is_none_or(|limit| self.started.elapsed() < limit);
        let enough = self.tally.failed.load(Ordering::Relaxed) >= MOST_FAILURES;
        let number = self.tally.begun.fetch_add(1, Ordering::Relaxed);
        (in_time && !enough && number < self.arguments.rounds).then_some(number)
    }

    /// What plays a disk again: often, for what happens is not the seed's alone.
    fn again(&self, disk: u64) -> String {
        let real = if self.arguments.real { " --real" } else { "" };
        let power = if self.arguments.power { " --power" } else { "" };
        let fixed = if self.arguments.is_fixed {
            " --fixed-length"
        } else {
            ""
        };
        format!("cargo xtask torture{real}{power}{fixed} --disk {disk:#x} --rounds 100")
    }

    fn work(&self) -> Result<()> {
        let mut generation = 0;
        loop {
            let seed = self.arguments.seed << 32 | self.job << 24 | generation;
            generation += 1;
            if !self.one_disk(self.arguments.disk.unwrap_or(seed))? {
                return Ok(());
            }
        }
    }

    /// A few rounds on one disk; `false` if there are to be no more.
    fn one_disk(&self, seed: u64) -> Result<bool> {
        let mut random = Random::new(seed);
        let mut folder = Place::new(self.target)?;
        if self.arguments.power {
            let Some(number) = self.next_round() else {
                return Ok(false);
            };
            let cuts = power::Cuts {
                number: self.arguments.cuts,
                lie: self.arguments.lie,
            };
            let report = power::play(folder.path(), seed, self.programs, cuts, &mut random)
                .with_context(|| format!("round {number} (disk {seed:#x})"))?;
            self.note(report, number, seed, folder);
            return Ok(true);
        }
        if self.arguments.is_fixed || fixed::is_fixed(seed) {
            return self.one_fixed_disk(seed, folder, &mut random);
        }
        let sectors = random.pick(&[8 << 11, 16 << 11, (24 << 11) + 77]);
        let model = Model::new(seed, sectors * 512 / GRANULE_BYTES);
        let is_small = !self.programs.real && random.chance(25) && folder.mount()?;
        let mut disk = Disk::make(folder.path(), &model, &mut random)?;
        disk.is_ours = !self.programs.real;
        if disk.is_ours && !is_small && random.chance(25) {
            disk.own = disk.top()?.node();
            service::configure(&disk, &mut random)?;
        }
        disk.on_full = is_small.then(|| random.pick(&[OnFull::Wait, OnFull::Wait, OnFull::Fail]));
        for _ in 0..random.between(2, 9) {
            let Some(number) = self.next_round() else {
                return Ok(false);
            };
            let report = round::play(&mut disk, &model, self.programs, &mut random)
                .with_context(|| format!("round {number} (disk {seed:#x})"))?;
            if report.failure.is_some() {
                self.note(report, number, seed, folder);
                return Ok(true);
            }
            self.count(&report);
        }
        Ok(true)
    }

    /// As [`Worker::one_disk`], with an image in a place of fixed length.
    fn one_fixed_disk(&self, seed: u64, folder: Place, random: &mut Random) -> Result<bool> {
        let sectors = random.pick(&[2 << 11, 4 << 11, (8 << 11) + 77, 16 << 11]);
        let model = Model::new(seed, sectors * 512 / GRANULE_BYTES);
        let way = (self.arguments.kind, self.programs.real);
        let mut disk = FixedDisk::make(folder.path(), way, &model, random)?;
        for _ in 0..random.between(2, 9) {
            let Some(number) = self.next_round() else {
                return Ok(false);
            };
            let report = disk
                .play(&model, self.programs, random)
                .with_context(|| format!("round {number} (disk {seed:#x})"))?;
            self.tally.fixed.fetch_add(1, Ordering::Relaxed);
            if report.failure.is_some() {
                self.note(report, number, seed, folder);
                return Ok(true);
            }
            self.count(&report);
        }
        Ok(true)
    }

    fn count(&self, report: &Report) {
        let count = |sum: &AtomicU64, more: u64| sum.fetch_add(more, Ordering::Relaxed);
        count(&self.tally.answered, report.answered);
        count(&self.tally.answered_by_file, report.answered_by_file);
        count(&self.tally.answered_by_guest, report.answered_by_guest);
        count(&self.tally.returns, report.returns);
        count(&self.tally.flushes, report.flushes);
        count(&self.tally.changes, report.history.len() as u64);
        count(&self.tally.backups, report.backups);
        count(&self.tally.cuts, report.cuts);
        count(&self.tally.compactions, report.counts.compactions);
        count(&self.tally.policy_jobs, report.counts.policy_jobs);
        count(&self.tally.cut_jobs, report.counts.cut);
        count(&self.tally.services, report.services);
        count(&self.tally.fills, report.counts.fills);
        count(&self.tally.full, report.counts.full);
        if let Some(leaked) = report.leaked {
            let leaks = self.tally.leaks.lock();
            leaks.unwrap_or_else(PoisonError::into_inner).add(leaked);
        }
        match report.failure {
            Some(_) => count(&self.tally.failed, 1),
            None => count(&self.tally.passed, 1),
        };
        self.tally.progress(self.started);
    }

    /// Counts a round, and tells all about it if it has failed.
    fn note(&self, report: Report, number: u64, seed: u64, folder: Place) {
        self.count(&report);
        let Some(failure) = report.failure else {
            return;
        };
        println!("round {number} failed (disk {seed:#x}): {failure}");
        // How it began and how it ended; what lies between is mostly more of the same.
        let lines = report.history.len();
        for (index, line) in report.history.iter().enumerate() {
            if index < STORY_LINES || lines - index <= STORY_LINES {
                println!("    {line}");
            }
        }
        println!("    the server said last: {}", report.last_words);
        println!("    its images: {}", folder.keep().display());
        println!(
            "    again, as threads and the kernel let it: {}",
            self.again(seed)
        );
    }
}
