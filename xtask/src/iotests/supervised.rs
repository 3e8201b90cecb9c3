//! One test of the suite, run by the suite's own `check`, in a folder of its own and for a limited time.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{Campaign, leftovers};
use crate::process;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How a test ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    Failed,
    Skipped,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::Skipped => "skipped",
        })
    }
}

/// What became of a test.
#[derive(Debug)]
pub struct Outcome {
    pub verdict: Verdict,
    /// Why it failed or was skipped, in a few words.
    pub why: String,
    pub took: Duration,
    /// What it printed, where that is not what the suite expects.
    pub printed: Option<String>,
}

/// Runs one test. What it leaves running is ended; the log of a failure is kept as `NAME.log`.
pub(super) fn run(campaign: &Campaign<'_>, name: &str) -> Result<Outcome> {
    let folder = campaign.work.join(name);
    let mut command = command(campaign, name, &folder)?;
    let log = campaign.results.join(format!("{name}.log"));
    let file = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
    command.stdout(file.try_clone()?).stderr(file);

    let started = Instant::now();
    let mut child = process::spawn(&mut command)?;
    let mut finished = false;
    while !finished && started.elapsed() < campaign.time_limit {
        std::thread::sleep(POLL_INTERVAL);
        campaign.leftovers.reap_orphans(child.id())?;
        finished = child.try_wait()?.is_some();
    }
    let took = started.elapsed();
    campaign.leftovers.end_all(&mut child)?;
    leftovers::unmount_below(&folder)?;
    let printed = printed(&folder.join("t"), name)?;
    std::fs::remove_dir_all(&folder)?;

    let text = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
    let (verdict, why) = match finished {
        true => verdict(name, &text),
        false => (
            Verdict::Failed,
            format!("still running after {} s", took.as_secs()),
        ),
    };
    if verdict == Verdict::Passed {
        std::fs::remove_file(&log)?;
    }
    Ok(Outcome {
        verdict,
        why,
        took,
        printed,
    })
}

/// What `check` has kept of a test's output, in one of the folders below that of the images.
fn printed(folder: &Path, name: &str) -> Result<Option<String>> {
    for entry in std::fs::read_dir(folder)?.flatten() {
        let file = entry.path().join(format!("{name}.out.bad"));
        if file.is_file() {
            let bytes = std::fs::read(&file)?;
            return Ok(Some(String::from_utf8_lossy(&bytes).into_owned()));
        }
    }
    Ok(None)
}

fn command(campaign: &Campaign<'_>, name: &str, folder: &Path) -> Result<Command> {
    let test = campaign.suite.path_of(name)?;
    let place = |inner: &str| -> Result<PathBuf> {
        let place = folder.join(inner);
        std::fs::create_dir_all(&place)?;
        Ok(place)
    };
    let build = place("b")?;
    let mut command = process::program("python3")?;
    for (variable, _) in std::env::vars_os() {
        let text = variable.to_string_lossy();
        if ["QEMU_", "IMG", "GDB"]
            .iter()
            .any(|start| text.starts_with(start))
        {
            command.env_remove(&variable);
        }
    }
    command
        .arg(campaign.suite.folder.join("check"))
        .arg("--source-dir")
        .arg(&campaign.suite.folder)
        .arg("--build-dir")
        .arg(&build)
        .args(["--color", "off", campaign.protocol.option()])
        .arg(format!("-{}", campaign.format))
        .current_dir(&build)
        .envs(
            campaign
                .tools
                .variables
                .iter()
                .map(|(name, path)| (name, path)),
        )
        .env("TEST_DIR", place("t")?)
        .env("SOCK_DIR", place("s")?)
        .env("TMPDIR", &build)
        .env("LC_ALL", "C")
        .env("PYTHONDONTWRITEBYTECODE", "1");
    if let Some(options) = campaign.image_options {
        command.args(["-o", options]);
    }
    command.arg(test.file_name().context("a test has a name")?);
    Ok(command)
}

/// Reads the line in which `check` tells of the test: name, verdict, times in brackets, reason.
fn verdict(name: &str, log: &str) -> (Verdict, String) {
    let found = log.split(['\n', '\r']).rev().find_map(|line| {
        let rest = line.strip_prefix(name)?.trim_start();
        [
            ("pass", Verdict::Passed),
            ("fail", Verdict::Failed),
            ("not run", Verdict::Skipped),
        ]
        .into_iter()
        .find_map(|(word, verdict)| Some((verdict, rest.strip_prefix(word)?)))
    });
    match found {
        Some((verdict, rest)) => (verdict, reason(rest)),
        None => {
            let last = log.lines().rev().find(|line| !line.trim().is_empty());
            (
                Verdict::Failed,
                last.unwrap_or("check said nothing").to_owned(),
            )
        }
    }
}

/// What stands behind the times: how long it took, and perhaps the last time.
fn reason(rest: &str) -> String {
    let words = rest.rsplit_once(']').map_or(rest, |(_, words)| words);
    let words = words.trim_start();
    let words = words.split_once(' ').map_or("", |(_, words)| words);
    let words = match words.trim_start().strip_prefix("(last:") {
        Some(last) => last.split_once(')').map_or("", |(_, words)| words),
        None => words,
    };
    let reason = words.split(" (see ").next().unwrap_or(words);
    reason.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_a_test_is_found_among_the_others() {
        let log = "QEMU -- x\n\n026   ...      [19:00:00]   ...\r\
                   026   fail       [19:00:00] [19:00:05]   5.1s   (last: 6.0s)  \
                   output mismatch (see /t/026.out.bad)\n--- a\n+++ b\nFailures: 026\n";
        let expected = (Verdict::Failed, "output mismatch".to_owned());
        assert_eq!(verdict("026", log), expected);
        let log = "001   pass       [19:00:00] [19:00:05]   5.1s\nPassed all 1 iotests\n";
        assert_eq!(verdict("001", log), (Verdict::Passed, String::new()));
        let log = "003   not run    [19:00:00] [19:00:05]   ...       not suitable for qcow2\n";
        let expected = (Verdict::Skipped, "not suitable for qcow2".to_owned());
        assert_eq!(verdict("003", log), expected);
    }

    #[test]
    fn a_check_that_stops_early_has_failed() {
        let found = verdict("026", "Traceback\nNot executable: /x\n");
        assert_eq!(found, (Verdict::Failed, "Not executable: /x".to_owned()));
    }
}
