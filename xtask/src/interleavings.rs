//! `cargo xtask interleavings`: what lanes share and wait for, under shuttle, which decides whose
//! turn it is before every step.

use std::process::Command;

use anyhow::{Result, ensure};
use lexopt::{Arg, ValueExt};

use crate::process;
use crate::workspace::Workspace;

/// What has such tests: a package and its target, and what their paths begin with or have.
const TESTS: [(&str, &[&str], &str); 4] = [
    ("vellum-io", &["--lib"], "interleavings::"),
    ("vellum-io", &["--test", "weak_memory"], ""),
    ("vellum-nbd", &["--lib"], "interleavings::"),
    ("vellum", &["--lib"], "interleavings::"),
];
/// Under each of three schedulers; a minute for all tests.
const TIMES_DEFAULT: u64 = 10_000;

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    let mut times = TIMES_DEFAULT;
    let mut seed = None;
    let mut filter = String::new();
    while let Some(argument) = arguments.next()? {
        match argument {
            Arg::Long("times") => times = arguments.value()?.parse()?,
            Arg::Long("seed") => seed = Some(arguments.value()?.parse::<u64>()?),
            Arg::Value(value) => filter = value.string()?,
            other => return Err(other.unexpected().into()),
        }
    }
    let workspace = Workspace::locate()?;
    let (mut ran, mut failed) = (0, Vec::new());
    for (package, target, within) in TESTS {
        let names = tests(&workspace, package, target, &[within, &filter])?;
        ran += names.len();
        if names.is_empty() {
            continue;
        }
        let mut command = tester(&workspace, package, target);
        command.arg("--exact").args(names);
        command.env("VELLUM_INTERLEAVINGS", times.to_string());
        if let Some(seed) = seed {
            command.env("VELLUM_SEED", seed.to_string());
        }
        if process::run(&mut command).is_err() {
            failed.push(package);
        }
    }
    ensure!(ran > 0, "no test has '{filter}' in its name");
    ensure!(
        failed.is_empty(),
        "tests of {} failed; what a test printed as its schedule is repeated with \
         VELLUM_SCHEDULE=SCHEDULE cargo xtask interleavings TEST",
        failed.join(" and ")
    );
    Ok(())
}

/// The tests of a target as a command; arguments for these can follow.
fn tester(workspace: &Workspace, package: &str, target: &[&str]) -> Command {
    let mut command = workspace.cargo();
    // The flag is for all crates: in the usual folder, all would be built anew.
    let folder = workspace.target.join("shuttle");
    command.arg("test").arg("--target-dir").arg(folder);
    // Most of the time goes into building them.
    command.args(["--config", "profile.test.package.vellum.opt-level=0"]);
    command.args(["--package", package]).args(target).arg("--");
    command.env("RUSTFLAGS", "--cfg shuttle");
    command
}

/// Those of a target that have all `parts` in their paths. Without the first they cannot run so.
fn tests(
    workspace: &Workspace,
    package: &str,
    target: &[&str],
    parts: &[&str],
) -> Result<Vec<String>> {
    let mut command = tester(workspace, package, target);
    let list = process::output(command.arg("--list"))?;
    let names = list.lines().filter_map(|line| line.strip_suffix(": test"));
    let wanted = |name: &&str| parts.iter().all(|part| name.contains(part));
    Ok(names.filter(wanted).map(str::to_owned).collect())
}
