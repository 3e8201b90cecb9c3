//! Runs a command, gives its output line by line, and ends it when it hangs: when nothing is printed
//! for long, or when something that it started outlives it and keeps its output open. What the
//! processes were doing then is printed before they are killed.
//!
//! `cargo xtask test` runs everything through this, so that one test that hangs fails alone.

use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::process;

/// How long a command may be silent, and how long its output may outlive it.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The longest time between two lines.
    pub silence: Duration,
    /// The longest time from the end of the command to the end of its output.
    pub aftermath: Duration,
}

/// Several times what the longest test takes on a busy machine.
pub const LIMITS: Limits = Limits {
    silence: Duration::from_secs(15 * 60),
    aftermath: Duration::from_secs(20),
};

/// How a command ended.
#[derive(Debug)]
pub struct End {
    /// Its exit status.
    pub status: ExitStatus,
    /// How often it, or what it left behind, had to be ended by force.
    pub forced: u64,
}

/// Runs a command, gives each line of its output to `each_line`, and ends what hangs.
///
/// Ended are the processes that hold the output, less this one and, where only what it runs is
/// silent, the command itself: `cargo test` then counts a failure and goes on.
pub fn run(command: &mut Command, limits: Limits, mut each_line: impl FnMut(&str)) -> Result<End> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let pipe = std::fs::read_link(format!("/proc/self/fd/{}", reader.as_raw_fd()))?;
    let mut child = process::spawn(command.stdout(writer))?;
    // The command holds the pipe's other end too, until another output replaces it.
    command.stdout(std::process::Stdio::null());
    let lines = lines_of(reader);
    let mut forced = 0;
    let mut last_line = Instant::now();
    let mut ended = None;
    loop {
        match lines.recv_timeout(Duration::from_millis(200)) {
            Ok(line) => {
                last_line = Instant::now();
                each_line(&line);
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if ended.is_none() {
            ended = child.try_wait()?.map(|_| Instant::now());
        }
        let limit = match ended {
            Some(end) if end.max(last_line).elapsed() > limits.aftermath => limits.aftermath,
            None if last_line.elapsed() > limits.silence => limits.silence,
            _ => continue,
        };
        each_line(&format!(
            "{} was silent for {} s and is ended. What holds its output:",
            process::shown(command),
            limit.as_secs()
        ));
        let command = ended.is_none().then(|| child.id());
        end_holders(&pipe, command, &mut each_line);
        forced += 1;
        last_line = Instant::now();
    }
    let status = child.wait().context("the command is ours")?;
    Ok(End { status, forced })
}

/// The lines that come out of a pipe, until nobody can write to it any more.
fn lines_of(reader: OwnedFd) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(std::fs::File::from(reader)).split(b'\n') {
            let Ok(line) = line else { break };
            if sender.send(String::from_utf8_lossy(&line).into()).is_err() {
                break;
            }
        }
    });
    lines
}

/// Reports and kills whoever has `pipe` open; the command, if it still runs, only where nobody
/// else has.
fn end_holders(pipe: &Path, command: Option<u32>, report: &mut impl FnMut(&str)) {
    let mut others = holders(pipe);
    others.retain(|&pid| Some(pid) != command && pid != std::process::id());
    if others.is_empty() {
        others.extend(command);
    }
    for &pid in &others {
        describe(pid, report);
    }
    for pid in others {
        // SAFETY: kill has no memory effects; the process holds a pipe that is ours.
        unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) };
    }
}

/// The processes that have `pipe` open.
fn holders(pipe: &Path) -> Vec<u32> {
    let has_it = |pid: &u32| {
        let Ok(files) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
            return false;
        };
        files
            .flatten()
            .any(|file| std::fs::read_link(file.path()).is_ok_and(|target| target == pipe))
    };
    numbers_in(Path::new("/proc")).filter(has_it).collect()
}

/// The entries of a folder of /proc that are numbers.
fn numbers_in(folder: &Path) -> impl Iterator<Item = u32> + use<> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Reports the command line of a process, and where each of its threads is.
fn describe(pid: u32, report: &mut impl FnMut(&str)) {
    let folder = format!("/proc/{pid}");
    let text = |name: String| {
        let bytes = std::fs::read(name).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\0', " ")
    };
    report(&format!("  {pid}: {}", text(format!("{folder}/cmdline"))));
    for thread in numbers_in(Path::new(&format!("{folder}/task"))) {
        let of = |name: &str| text(format!("{folder}/task/{thread}/{name}"));
        let state = of("stat");
        // The state follows the name, which ends with the last parenthesis.
        let state = state
            .rsplit(") ")
            .next()
            .and_then(|rest| rest.chars().next());
        report(&format!(
            "    {} {} in {} ({})",
            of("comm").trim(),
            state.unwrap_or('?'),
            of("wchan"),
            of("syscall").trim()
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn run_shell(script: &str, silence_ms: u64, aftermath_ms: u64) -> (End, Vec<String>) {
        let limits = Limits {
            silence: Duration::from_millis(silence_ms),
            aftermath: Duration::from_millis(aftermath_ms),
        };
        let mut lines = Vec::new();
        let end = run(&mut shell(script), limits, |line| {
            lines.push(line.to_owned());
        });
        (end.expect("sh runs"), lines)
    }

    #[test]
    fn a_command_that_goes_on_is_left_alone() {
        let script = "for i in 1 2 3 4; do echo $i; sleep 0.3; done; exit 3";
        let (end, lines) = run_shell(script, 60_000, 60_000);
        assert_eq!((end.status.code(), end.forced), (Some(3), 0));
        assert_eq!(lines, ["1", "2", "3", "4"]);
    }

    #[test]
    fn what_hangs_is_reported_and_ended_and_the_command_goes_on() {
        let script = "echo before; sleep 3600; echo after";
        let (end, lines) = run_shell(script, 500, 60_000);
        assert_eq!((end.status.code(), end.forced), (Some(0), 1));
        assert_eq!(lines.first().map(String::as_str), Some("before"));
        assert!(lines[1].contains("silent"), "{lines:?}");
        assert!(lines[2].contains("sleep 3600"), "{lines:?}");
        assert_eq!(lines.last().map(String::as_str), Some("after"));
    }

    #[test]
    fn what_outlives_the_command_is_ended() {
        let (end, lines) = run_shell("sleep 3600 & exit 0", 60_000, 500);
        assert_eq!((end.status.code(), end.forced), (Some(0), 1));
        assert!(lines[1].contains("sleep 3600"), "{lines:?}");
    }

    #[test]
    fn a_command_that_hangs_itself_is_ended() {
        let (end, _) = run_shell("exec sleep 3600", 500, 60_000);
        assert_eq!((end.status.code(), end.forced), (None, 1));
    }
}
