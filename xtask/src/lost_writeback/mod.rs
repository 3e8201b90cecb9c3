//! `cargo xtask lost-writeback`: everything that Vellum writes, on a file system that loses writes at writeback
//! (`file_system.rs`).
//!
//! A full thin volume or a failing disk does this: `write` succeeds, the page is read back, and only `fsync`
//! reports it, once. What must hold: a command that succeeds has made what it promises durable, and what is
//! read back from a spool, a cache, a journal, a repository or a state file is right or is not used.

mod commands;
mod file_system;
mod servers;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use lexopt::Arg;

use crate::process;
use crate::random::Random;
use crate::workspace::Workspace;
use file_system::Mounted;

const DISK_BYTES: usize = 8 << 20;
/// One of so many writes is lost, at most and at least.
const LOSSES: [u64; 5] = [2, 6, 20, 80, 1000];

/// What a scenario uses.
struct Place {
    vellum: PathBuf,
    /// On a file system that loses nothing: `raw` and `disk`, which hold the same, and `top`, an overlay of
    /// `disk` that holds what `changed` holds.
    sources: PathBuf,
    lossy: PathBuf,
    mounted: Mounted,
    random: Random,
}

/// What came of a scenario.
#[derive(Default)]
struct Tally {
    succeeded: u64,
    failed: u64,
    lost: u64,
}

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    let (mut rounds, mut seed, mut only, mut named) = (20, 0, Vec::new(), None);
    while let Some(argument) = arguments.next()? {
        match argument {
            Arg::Long("rounds") => rounds = arguments.value()?.to_string_lossy().parse()?,
            Arg::Long("seed") => seed = arguments.value()?.to_string_lossy().parse()?,
            Arg::Long("only") => only.push(arguments.value()?.to_string_lossy().into_owned()),
            Arg::Long("vellum") => named = Some(PathBuf::from(arguments.value()?)),
            other => return Err(other.unexpected().into()),
        }
    }
    let workspace = Workspace::locate()?;
    let vellum = workspace.vellum_or(named.as_deref())?;
    let folder = workspace.fresh_folder("lost-writeback")?;
    let sources = folder.join("sources");
    make_sources(&vellum, &sources)?;
    let scenarios: Vec<&str> = commands::names().chain(servers::NAMES).collect();
    let is_wanted = |name: &str| only.is_empty() || only.iter().any(|word| name.contains(word));
    for name in scenarios.into_iter().filter(|name| is_wanted(name)) {
        let mut tally = Tally::default();
        for round in 0..rounds {
            let seed = seed + round;
            let played = play(name, seed, (&vellum, &folder, &sources), &mut tally);
            played.with_context(|| format!("{name}, --seed {seed} --rounds 1"))?;
        }
        println!(
            "{name}: {} succeeded, {} failed, {} writes lost",
            tally.succeeded, tally.failed, tally.lost
        );
    }
    Ok(())
}

fn play(
    name: &str,
    seed: u64,
    (vellum, folder, sources): (&Path, &Path, &Path),
    tally: &mut Tally,
) -> Result<()> {
    let mut random = Random::new(seed);
    let lossy = folder.join("lossy");
    std::fs::create_dir_all(&lossy)?;
    let mut place = Place {
        vellum: vellum.to_owned(),
        sources: sources.to_owned(),
        mounted: Mounted::new(&lossy, random.fork())?,
        lossy,
        random,
    };
    let succeeded = match servers::find(name) {
        Some(scenario) => scenario(&mut place),
        None => commands::play(name, &mut place),
    };
    tally.lost += place.mounted.lost();
    match succeeded? {
        true => tally.succeeded += 1,
        false => tally.failed += 1,
    }
    Ok(())
}

impl Place {
    /// Begins to lose writes, at a rate that the seed gives.
    fn begin_losing(&mut self) {
        self.mounted.lose_one_in(self.random.pick(&LOSSES));
    }

    /// Runs a shell line, in which `$V` is the program, `$S` the folder of the sources and `$L` the one that
    /// loses writes. Returns whether it succeeded.
    fn shell(&self, line: &str) -> Result<std::process::Output> {
        let mut command = process::program("bash")?;
        command.args(["-ec", line]);
        command.env("V", &self.vellum).env("S", &self.sources);
        command.env("L", &self.lossy);
        process::capture(&mut command)
    }

    /// Makes all that was written so far durable.
    fn sync(&self) -> Result<()> {
        // FUSE may end a sync with EINTR.
        self.proves("for _ in 1 2 3 4 5; do sync -f $L && exit; done; exit 1")
    }

    /// Runs a shell line that must succeed.
    fn proves(&self, line: &str) -> Result<()> {
        let proof = self.shell(line)?;
        let said = String::from_utf8_lossy(&proof.stderr).into_owned();
        ensure!(proof.status.success(), "{line}: {said}");
        Ok(())
    }
}

fn make_sources(vellum: &Path, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let mut bytes = vec![0; DISK_BYTES];
    Random::new(1).fill(&mut bytes);
    // Holes, as disks have them.
    bytes[DISK_BYTES / 4..DISK_BYTES / 2].fill(0);
    std::fs::write(folder.join("raw"), bytes)?;
    let mut command = process::program("bash")?;
    command.current_dir(folder).env("V", vellum).args([
        "-ec",
        "$V convert -q -f raw -O qcow2 raw disk
         $V create -q -f qcow2 -b disk -F qcow2 top
         $V io -f qcow2 -c 'write -q -P 9 64k 1300k' -c 'write -q -P 7 5M 700k' top
         $V convert -q -O qcow2 top changed
         $V send -q -o stream disk
         $V push -q disk repository:disk",
    ]);
    process::output(&mut command).map(drop)
}
