//! `cargo xtask test`: runs every test there is (unit tests, the simulator, the suites against
//! QEMU), and prints one line that counts them.

mod tally;
mod watchdog;

use std::process::Command;

use anyhow::{Result, bail};

use crate::workspace::Workspace;
use crate::{process, setup};
use tally::Tally;

/// Slices that take about a minute each; docs/TESTING.md tells of the long runs.
const SIMULATOR_SEEDS: u64 = 700;
const DAEMON_SEEDS: u64 = 100;
const SIMULATOR_CUTS_PER_SEED: u64 = 100;
/// With mutants, so that their test builds next to nothing anew; nobody else makes any appear.
const SIMULATOR: [&str; 6] = [
    "--profile",
    "tasks",
    "--package",
    "vellum-sim",
    "--features",
    "mutants",
];
const DIFFERENTIAL_SEEDS: &str = "0..40";
const FIXED_LENGTH_SEEDS: &str = "0..20";
const TORTURE_ROUNDS: &str = "20";
const POWER_ROUNDS: &str = "4";
const POWER_CUTS: &str = "50";
const TORTURE_SEED: &str = "7";

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    crate::no_arguments(&mut arguments)?;
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let mut tally = Tally::default();
    // Unit, integration and documentation tests. To build them is silent for long.
    let tests = ["test", "--workspace", "--no-fail-fast"];
    process::run(workspace.cargo().args(tests).arg("--no-run"))?;
    tally += counted(workspace.cargo().args(tests))?;
    tally += simulator(&workspace, &[], SIMULATOR_SEEDS)?;
    tally += simulator(&workspace, &["--daemon"], DAEMON_SEEDS)?;
    let mutants = ["daemon_mutants", "image_mutants", "session_mutants"];
    let mutants = mutants.into_iter().flat_map(|test| ["--test", test]);
    tally += counted(workspace.cargo().arg("test").args(SIMULATOR).args(mutants))?;
    // The tests have just built it.
    let vellum = workspace.target.join("debug/vellum");
    tally += counted(
        Command::new(std::env::current_exe()?)
            .current_dir(&workspace.root)
            .args(["differential", "--seeds", DIFFERENTIAL_SEEDS, "--vellum"])
            .arg(&vellum),
    )?;
    tally += counted(
        Command::new(std::env::current_exe()?)
            .current_dir(&workspace.root)
            .args(["differential", "--fixed-length", "--seeds"])
            .args([FIXED_LENGTH_SEEDS, "--vellum"])
            .arg(&vellum),
    )?;
    tally += counted(
        Command::new(std::env::current_exe()?)
            .current_dir(&workspace.root)
            .args(["torture", "--seed", TORTURE_SEED])
            .args(["--rounds", TORTURE_ROUNDS, "--vellum"])
            .arg(&vellum),
    )?;
    tally += counted(
        Command::new(std::env::current_exe()?)
            .current_dir(&workspace.root)
            .args(["torture", "--power", "--seed", TORTURE_SEED])
            .args(["--rounds", POWER_ROUNDS, "--cuts", POWER_CUTS, "--vellum"])
            .arg(vellum),
    )?;
    println!("\nall tests together:\n{tally}");
    if tally.failed > 0 {
        bail!("some tests failed");
    }
    Ok(())
}

/// Runs a command, shows what it prints, and counts what its closing lines tell. What hangs is
/// ended and counts as a failure.
fn counted(command: &mut Command) -> Result<Tally> {
    println!("\n$ {}", process::shown(command));
    let mut tally = Tally::default();
    let end = watchdog::run(command, watchdog::LIMITS, |line| {
        println!("{line}");
        tally += Tally::from_closing_line(line).unwrap_or_default();
    })?;
    tally.failed += end.forced;
    if !end.status.success() && tally.failed == 0 {
        // It broke before it could count: that is a failure too.
        println!("{} ended with {}", process::shown(command), end.status);
        tally.failed = 1;
    }
    Ok(tally)
}

/// Power cuts, optimised: each seed is one test.
fn simulator(workspace: &Workspace, what: &[&str], count: u64) -> Result<Tally> {
    let seeds = format!("0..{count}");
    let cuts = SIMULATOR_CUTS_PER_SEED.to_string();
    process::run(workspace.cargo().arg("build").args(SIMULATOR))?;
    let mut tally = counted(
        workspace
            .cargo()
            .arg("run")
            .args(SIMULATOR)
            .arg("--")
            .args(what)
            .args(["--seeds", &seeds, "--cuts", &cuts]),
    )?;
    // It stops at the first seed that fails, so all or nothing passed.
    if tally.failed == 0 {
        tally.passed += count;
    }
    Ok(tally)
}
