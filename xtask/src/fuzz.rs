//! `cargo xtask fuzz`: runs the fuzz targets under the limits that they promise, or,
//! on stable Rust, only replays their corpora under these.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lexopt::{Arg, ValueExt};

use crate::process;
use crate::workspace::{self, Workspace};

const SECONDS_DEFAULT: u32 = 60;
/// What every target promises for any input.
const LIMITS: [&str; 2] = ["-rss_limit_mb=256", "-timeout=1"];

/// The task.
pub fn run(arguments: lexopt::Parser) -> Result<()> {
    let options = Options::parse(arguments)?;
    let workspace = Workspace::locate()?;
    let all = targets(&workspace)?;
    for wanted in &options.targets {
        let list = all.join(", ");
        ensure!(all.contains(wanted), "no target is named {wanted}: {list}");
    }
    let chosen = if options.targets.is_empty() {
        &all
    } else {
        &options.targets
    };
    if options.replay {
        return replay_all(&workspace, chosen);
    }
    let fuzzer = Fuzzer::prepare(workspace)?;
    for target in chosen {
        println!("fuzz: {target}, {} s", options.seconds);
        fuzzer.explore(target, options.seconds)?;
        if options.keep {
            fuzzer.keep(target)?;
        }
    }
    println!("fuzz: {} targets ran without a finding", chosen.len());
    Ok(())
}

struct Options {
    seconds: u32,
    /// Inputs that reach new code go into the repository's corpus.
    keep: bool,
    /// The corpora only, on stable Rust.
    replay: bool,
    targets: Vec<String>,
}

impl Options {
    fn parse(mut arguments: lexopt::Parser) -> Result<Self> {
        let mut options = Self {
            seconds: SECONDS_DEFAULT,
            keep: false,
            replay: false,
            targets: Vec::new(),
        };
        while let Some(argument) = arguments.next()? {
            match argument {
                Arg::Long("seconds") => options.seconds = arguments.value()?.parse()?,
                Arg::Long("keep") => options.keep = true,
                Arg::Long("replay") => options.replay = true,
                Arg::Value(target) => options.targets.push(target.string()?),
                other => return Err(other.unexpected().into()),
            }
        }
        Ok(options)
    }
}

/// Every fuzz target's name.
fn targets(workspace: &Workspace) -> Result<Vec<String>> {
    let metadata = workspace::metadata(&manifest(workspace), &["--no-deps"])?;
    let targets = metadata["packages"][0]["targets"]
        .as_array()
        .context("cargo metadata lists no targets")?;
    Ok(targets
        .iter()
        .filter(|target| target["kind"][0] == "bin")
        .filter_map(|target| target["name"].as_str().map(str::to_owned))
        .collect())
}

fn manifest(workspace: &Workspace) -> PathBuf {
    workspace.root.join("fuzz/Cargo.toml")
}

fn corpus(workspace: &Workspace, target: &str) -> PathBuf {
    workspace.root.join("fuzz/corpus").join(target)
}

/// Replays the corpora of `chosen`; tells of every one that fails.
fn replay_all(workspace: &Workspace, chosen: &[String]) -> Result<()> {
    let programs = build_for_replay(workspace)?;
    let mut failed = 0;
    for target in chosen {
        match replay(workspace, &programs, target) {
            Ok(()) => println!("fuzz: {target} ok"),
            Err(error) => {
                println!("fuzz: {target} FAILED: {error:#}");
                failed += 1;
            }
        }
    }
    ensure!(failed == 0, "{failed} of {} corpora failed", chosen.len());
    Ok(())
}

/// Builds the targets without instrumentation, which stable Rust can do too,
/// and returns the folder that they are in.
fn build_for_replay(workspace: &Workspace) -> Result<PathBuf> {
    let folder = workspace.target.join("fuzz");
    process::run(
        workspace
            .cargo()
            .args(["build", "--release", "--manifest-path"])
            .arg(manifest(workspace))
            .arg("--target-dir")
            .arg(&folder),
    )?;
    Ok(folder.join("release"))
}

/// Runs a target once over each input of its corpus.
fn replay(workspace: &Workspace, programs: &Path, target: &str) -> Result<()> {
    let inputs = std::fs::read_dir(corpus(workspace, target))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    ensure!(!inputs.is_empty(), "the corpus of {target} is empty");
    process::output(
        Command::new(programs.join(target))
            .args(LIMITS)
            .args(inputs)
            // A finding's input is in the corpus already.
            .current_dir(programs),
    )?;
    Ok(())
}

/// cargo-fuzz, ready to run.
struct Fuzzer {
    workspace: Workspace,
}

impl Fuzzer {
    fn prepare(workspace: Workspace) -> Result<Self> {
        let fuzzer = Self { workspace };
        let nightly = process::capture(Command::new("cargo").args(["+nightly", "--version"]))?;
        ensure!(
            nightly.status.success(),
            "fuzzing needs a nightly toolchain: rustup toolchain install nightly"
        );
        if !process::capture(Command::new("cargo").args(["fuzz", "--version"]))?
            .status
            .success()
        {
            process::run(Command::new("cargo").args(["install", "--locked", "cargo-fuzz"]))?;
        }
        Ok(fuzzer)
    }

    /// Fuzzes one target; fails on a crash, a hang or too much memory.
    fn explore(&self, target: &str, seconds: u32) -> Result<()> {
        let found = self.found(target);
        std::fs::create_dir_all(&found)?;
        process::run(
            self.cargo_fuzz("run")
                .arg(target)
                .args([&found, &corpus(&self.workspace, target)])
                .arg("--")
                .args(LIMITS)
                .arg(format!("-max_total_time={seconds}"))
                .arg("-print_final_stats=1"),
        )
    }

    /// Takes the inputs that reach code which the corpus does not, and no others.
    fn keep(&self, target: &str) -> Result<()> {
        process::run(
            self.cargo_fuzz("run")
                .arg(target)
                .args([&corpus(&self.workspace, target), &self.found(target)])
                .args(["--", "-merge=1"]),
        )
    }

    /// Where a run puts what it finds, outside the repository's corpus.
    fn found(&self, target: &str) -> PathBuf {
        self.workspace.target.join("fuzz/found").join(target)
    }

    fn cargo_fuzz(&self, verb: &str) -> Command {
        let mut command = Command::new("cargo");
        // No sanitizer: its shadow would count as memory, and no target holds unsafe code.
        command
            .current_dir(&self.workspace.root)
            .args(["+nightly", "fuzz", verb, "--sanitizer", "none"])
            .arg("--target-dir")
            .arg(self.workspace.target.join("fuzz"));
        command
    }
}
