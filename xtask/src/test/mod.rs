//! `cargo xtask test`: every test there is, and one line that counts them.

mod tally;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;
use crate::{fuzz, process, setup};
use tally::Tally;

/// A slice that takes about two minutes; docs/TESTING.md tells of the long runs.
const DIFFERENTIAL_SEEDS: &str = "0..60";

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    crate::no_arguments(&mut arguments)?;
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let mut tally = Tally::default();
    // Unit, integration and documentation tests, and the simulator's slice.
    tally += counted(
        workspace
            .cargo()
            .args(["test", "--workspace", "--no-fail-fast"]),
    )?;
    tally += corpora(&workspace)?;
    tally += counted(
        Command::new(std::env::current_exe()?)
            .current_dir(&workspace.root)
            .args(["differential", "--seeds", DIFFERENTIAL_SEEDS]),
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

/// The fuzz targets over their corpora, each target as one test.
fn corpora(workspace: &Workspace) -> Result<Tally> {
    println!("\nfuzz corpora:");
    let programs = fuzz::build_for_replay(workspace)?;
    let mut tally = Tally::default();
    for target in fuzz::targets(workspace)? {
        match fuzz::replay(workspace, &programs, &target) {
            Ok(()) => {
                println!("  {target} ok");
                tally.passed += 1;
            }
            Err(error) => {
                println!("  {target} FAILED: {error:#}");
                tally.failed += 1;
            }
        }
    }
    Ok(tally)
}
