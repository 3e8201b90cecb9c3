//! `cargo xtask differential`: random scenarios done by `vellum` and by QEMU's
//! programs on twin images, which must end up alike.
//!
//! A seed names a scenario: how two images are made (by either side), what is
//! done to both, and by whom. Afterwards both must have the same content and the
//! same map, both sides must print the same about each, and find nothing wrong.
//! A difference is made small and printed as a shell script.
//!
//! With `--fixed-length` the images lie in places of fixed length ([`fixed`]).

mod access;
mod bitmaps;
mod compare;
mod ending;
mod fixed;
mod foreign;
mod operation;
mod play;
mod runner;
mod scenario;
mod shape;
mod shrink;
mod snapshots;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use lexopt::{Arg, ValueExt as _};

use crate::fixed_length::Kind;
use crate::workspace::Workspace;
use fixed::FixedLength;
use foreign::Foreign;
use runner::Programs;
use scenario::Scenario;

/// How often progress is told.
const PROGRESS_SCENARIOS: u64 = 100;
/// After so many differences the rest would tell nothing new, unless all are asked for.
const MOST_DIFFERENCES: usize = 10;
/// A folder in memory, where the machine has one.
const MEMORY_FOLDER: &str = "/dev/shm";
/// How the names of this task's folders begin; the process's number follows.
const FOLDER_PREFIX: &str = "vellum-differential-";

struct Arguments {
    seeds: Range<u64>,
    jobs: usize,
    vellum: Option<PathBuf>,
    most_differences: usize,
    /// Failures are made small.
    shrinks: bool,
    game: Game,
}

/// What is played.
enum Game {
    /// Twin images, of qcow2 or another format.
    Twins(Option<&'static Foreign>),
    /// Images in places of fixed length.
    FixedLength(FixedLength),
}

/// A failure, made small.
struct Found {
    /// Commands at first.
    before: usize,
    /// Commands that are left.
    after: usize,
    /// What differs.
    what: String,
    /// Lines of a shell script.
    script: Vec<String>,
}

/// The task.
pub fn run(parser: lexopt::Parser) -> Result<()> {
    let arguments = parse(parser)?;
    let workspace = Workspace::locate()?;
    let vellum = match arguments.vellum.clone() {
        Some(path) => path,
        None => workspace.build_vellum()?,
    };
    play_seeds(&workspace, vellum, &arguments)
}

/// Plays a range of seeds; fails if anything differs.
fn play_seeds(workspace: &Workspace, vellum: PathBuf, arguments: &Arguments) -> Result<()> {
    let seeds = &arguments.seeds;
    let programs = Programs::find(vellum)?;
    let folder = temporary_folder(&workspace.target)?;
    let started = Instant::now();
    let campaign = Campaign {
        programs: &programs,
        folder: folder.path(),
        next: AtomicU64::new(seeds.start),
        end: seeds.end,
        most_differences: arguments.most_differences,
        tries: if arguments.shrinks {
            shrink::MOST_TRIES
        } else {
            0
        },
        differing: Mutex::new(Vec::new()),
        game: &arguments.game,
    };
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs {
            scope.spawn(|| campaign.work());
        }
    });
    let played = campaign.next.into_inner().min(seeds.end) - seeds.start;
    let differing = campaign.differing.into_inner().unwrap_or_default();
    let differences = differing.len() as u64;
    let seconds = started.elapsed().as_secs_f64();
    println!("differential: {played} scenarios in {seconds:.0} s");
    if let Game::FixedLength(game) = &arguments.game {
        println!("differential: {}", game.summary());
    }
    println!("{} passed, {differences} failed", played - differences);
    match differing.is_empty() {
        true => Ok(()),
        false => bail!("seeds with differences: {differing:?}"),
    }
}

/// A folder in memory, or in the target folder. Its name tells whose it is, so
/// that what an interrupted run left goes when the next one starts.
fn temporary_folder(target: &Path) -> Result<tempfile::TempDir> {
    let memory = Path::new(MEMORY_FOLDER);
    remove_left_folders(memory);
    let prefix = format!("{FOLDER_PREFIX}{}-", std::process::id());
    let builder = || {
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix);
        builder
    };
    builder()
        .tempdir_in(memory)
        .or_else(|_| builder().tempdir_in(target))
        .context("cannot make a temporary folder")
}

fn remove_left_folders(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix(FOLDER_PREFIX);
        let owner = owner
            .and_then(|rest| rest.split_once('-'))
            .map(|(owner, _)| owner);
        if owner.is_some_and(|owner| !Path::new("/proc").join(owner).exists()) {
            // Another run may be removing it as well.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

fn parse(mut parser: lexopt::Parser) -> Result<Arguments> {
    let jobs = std::thread::available_parallelism().map_or(2, |count| count.get() + 1);
    let mut arguments = Arguments {
        seeds: 0..2000,
        jobs,
        vellum: None,
        most_differences: MOST_DIFFERENCES,
        shrinks: true,
        game: Game::Twins(None),
    };
    let (mut is_fixed, mut kind, mut is_qemu_twice) = (false, Kind::Nbd, false);
    while let Some(argument) = parser.next()? {
        match argument {
            Arg::Long("seeds") => arguments.seeds = parse_seeds(&parser.value()?.string()?)?,
            Arg::Long("jobs") => arguments.jobs = parser.value()?.parse::<usize>()?.max(1),
            Arg::Long("vellum") => arguments.vellum = Some(parser.value()?.into()),
            Arg::Long("format") => {
                arguments.game = Game::Twins(parse_format(&parser.value()?.string()?)?);
            }
            Arg::Long("fixed-length") => is_fixed = true,
            Arg::Long("loop") => kind = Kind::Loop,
            Arg::Long("both-qemu") => is_qemu_twice = true,
            Arg::Long("keep-going") => arguments.most_differences = usize::MAX,
            Arg::Long("no-shrink") => arguments.shrinks = false,
            other => return Err(other.unexpected().into()),
        }
    }
    if is_fixed {
        arguments.game = Game::FixedLength(FixedLength::new(kind, is_qemu_twice));
    } else if is_qemu_twice || kind == Kind::Loop {
        bail!("--loop and --both-qemu are of --fixed-length");
    }
    Ok(arguments)
}

/// The format of a scenario's images; `None` for qcow2.
fn parse_format(name: &str) -> Result<Option<&'static Foreign>> {
    if name == "qcow2" {
        return Ok(None);
    }
    let found = Foreign::named(name);
    found
        .map(Some)
        .with_context(|| format!("'{name}' is none of qcow2, {}", Foreign::names()))
}

/// `A..B`, or one seed.
fn parse_seeds(text: &str) -> Result<Range<u64>> {
    let wrong = || format!("'{text}' is not a range of seeds such as 0..2000");
    let number = |text: &str| text.parse::<u64>().with_context(wrong);
    match text.split_once("..") {
        Some((start, end)) => Ok(number(start)?..number(end)?),
        None => {
            let seed = number(text)?;
            Ok(seed..seed + 1)
        }
    }
}

/// Seeds being played by several threads.
struct Campaign<'a> {
    programs: &'a Programs,
    folder: &'a Path,
    next: AtomicU64,
    end: u64,
    most_differences: usize,
    /// Smaller scenarios that are tried for each failure, at most.
    tries: usize,
    differing: Mutex<Vec<u64>>,
    game: &'a Game,
}

impl Campaign<'_> {
    fn work(&self) {
        loop {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            if seed >= self.end || self.is_hopeless() {
                return;
            }
            let folder = self.folder.join(format!("seed-{seed}"));
            let found = match self.game {
                Game::Twins(format) => self.play_twins(seed, &folder, *format),
                Game::FixedLength(game) => game.play(self.programs, seed, &folder, self.tries),
            };
            if let Some(found) = found {
                self.report(seed, &found);
            }
            if (seed + 1).is_multiple_of(PROGRESS_SCENARIOS) {
                println!("differential: up to seed {}", seed + 1);
            }
        }
    }

    fn is_hopeless(&self) -> bool {
        let differing = self.differing.lock();
        differing.is_ok_and(|differing| differing.len() >= self.most_differences)
    }

    fn play_twins(
        &self,
        seed: u64,
        folder: &Path,
        format: Option<&'static Foreign>,
    ) -> Option<Found> {
        let scenario = Scenario::random(seed, format);
        let play = |scenario: &Scenario| play::play(self.programs, folder, scenario);
        let difference = play(&scenario).err()?;
        let before = scenario.weight();
        let (small, difference) = shrink::shrink(scenario, difference, self.tries, play);
        Some(Found {
            before,
            after: small.weight(),
            what: difference.what,
            script: difference.script,
        })
    }

    fn report(&self, seed: u64, found: &Found) {
        if let Ok(mut differing) = self.differing.lock() {
            differing.push(seed);
        }
        println!(
            "\nseed {seed} differs ({} commands, made {}): {}\n\nset -x\n{}\n",
            found.before,
            found.after,
            found.what,
            found.script.join("\n")
        );
    }
}
