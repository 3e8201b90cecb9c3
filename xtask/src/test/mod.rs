//! `cargo xtask test`: every test there is, and one line that counts them.

mod tally;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;
use crate::{process, setup};
use tally::Tally;

/// Slices that take about a minute each; docs/TESTING.md tells of the long runs.
const SIMULATOR_SEEDS: u64 = 1000;
const SIMULATOR_CUTS_PER_SEED: u64 = 100;
const DIFFERENTIAL_SEEDS: &str = "0..60";

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    crate::no_arguments(&mut arguments)?;
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let mut tally = Tally::default();
    // Unit, integration and documentation tests.
    tally += counted(
        workspace
            .cargo()
            .args(["test", "--workspace", "--no-fail-fast"]),
    )?;
    tally += simulator(&workspace)?;
    // The tests have just built it.
    let vellum = workspace.target.join("debug/vellum");
    tally += counted(
        Command::new(std::env::current_exe()?)
            .current_dir(&workspace.root)
            .args(["differential", "--seeds", DIFFERENTIAL_SEEDS, "--vellum"])
            .arg(vellum),
    )?;
    println!("\nall tests together:\n{tally}");
    if tally.failed > 0 {
        bail!("some tests failed");
    }
    Ok(())
}

/// Runs a command, shows what it prints, and counts what its closing lines tell.
fn counted(command: &mut Command) -> Result<Tally> {
    println!("\n$ {}", process::shown(command));
    let mut child = process::spawn(command.stdout(Stdio::piped()))?;
    let output = child.stdout.take().context("the output is piped")?;
    let mut tally = Tally::default();
    for line in BufReader::new(output).split(b'\n') {
        let line = line?;
        let text = String::from_utf8_lossy(&line);
        println!("{text}");
        tally += Tally::from_closing_line(&text).unwrap_or_default();
    }
    let status = child.wait()?;
    if !status.success() && tally.failed == 0 {
        // It broke before it could count: that is a failure too.
        println!("{} ended with {status}", process::shown(command));
        tally.failed = 1;
    }
    Ok(tally)
}

/// Power cuts, optimised: each seed is one test.
fn simulator(workspace: &Workspace) -> Result<Tally> {
    let seeds = format!("0..{SIMULATOR_SEEDS}");
    let cuts = SIMULATOR_CUTS_PER_SEED.to_string();
    let mut tally = counted(
        workspace
            .cargo()
            .args(["run", "--profile", "tasks", "--package", "vellum-sim", "--"])
            .args(["--seeds", &seeds, "--cuts", &cuts]),
    )?;
    // It stops at the first seed that fails, so all or nothing passed.
    if tally.failed == 0 {
        tally.passed += SIMULATOR_SEEDS;
    }
    Ok(tally)
}
