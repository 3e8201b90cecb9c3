//! `cargo xtask differential`: random scenarios done by `vellum` and by QEMU's
//! programs on twin images, which must end up alike.
//!
//! A seed names a scenario: how two images are made (by either side), what is
//! done to both, and by whom. Afterwards both must have the same content and the
//! same map, both sides must print the same about each, and find nothing wrong.
//! A difference is made small and printed as a shell script.

mod access;
mod bitmaps;
mod compare;
mod ending;
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

use crate::workspace::Workspace;
use foreign::Foreign;
use play::Difference;
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
    /// Other images than of qcow2.
    format: Option<&'static Foreign>,
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
        differing: Mutex::new(Vec::new()),
        format: arguments.format,
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
        format: None,
    };
    while let Some(argument) = parser.next()? {
        match argument {
            Arg::Long("seeds") => arguments.seeds = parse_seeds(&parser.value()?.string()?)?,
            Arg::Long("jobs") => arguments.jobs = parser.value()?.parse::<usize>()?.max(1),
            Arg::Long("vellum") => arguments.vellum = Some(parser.value()?.into()),
            Arg::Long("format") => arguments.format = parse_format(&parser.value()?.string()?)?,
            Arg::Long("keep-going") => arguments.most_differences = usize::MAX,
            other => return Err(other.unexpected().into()),
        }
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
    differing: Mutex<Vec<u64>>,
    format: Option<&'static Foreign>,
}

impl Campaign<'_> {
    fn work(&self) {
        loop {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            if seed >= self.end || self.is_hopeless() {
                return;
            }
            let folder = self.folder.join(format!("seed-{seed}"));
            let scenario = Scenario::random(seed, self.format);
            if let Err(difference) = play::play(self.programs, &folder, &scenario) {
                self.report(seed, &folder, scenario, difference);
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

    fn report(&self, seed: u64, folder: &Path, scenario: Scenario, difference: Difference) {
        let before = scenario.weight();
        let play = |smaller: &Scenario| play::play(self.programs, folder, smaller);
        let (small, difference) = shrink::shrink(scenario, difference, play);
        if let Ok(mut differing) = self.differing.lock() {
            differing.push(seed);
        }
        println!(
            "\nseed {seed} differs ({before} commands, made {}): {}\n\nset -x\n{}\n",
            small.weight(),
            difference.what,
            difference.script.join("\n")
        );
    }
}
