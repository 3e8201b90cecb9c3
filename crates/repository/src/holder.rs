//! Which process does something, so that another one of the same machine can tell whether it is gone.

use std::{fs, io};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// A process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Holder {
    /// The machine's name, for people.
    pub host: String,
    /// What tells one start of one machine from all others.
    pub boot: String,
    /// In which the process has its number: containers of one machine have several.
    pub pid_namespace: String,
    /// Its number.
    pub pid: u32,
    /// When it began, by the machine's clock, since numbers are given again.
    pub started: String,
}

fn line(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim().to_owned()
}

fn pid_namespace() -> String {
    let link = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    link.to_string_lossy().into_owned()
}

/// What is seen of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    /// It began then.
    Started(String),
    /// No process has this number, or one that has ended.
    Gone,
    /// It may be there: `/proc` may hide it (`hidepid`).
    Unknown,
}

/// Looks at the process that has a number now.
fn look_at(pid: u32) -> Seen {
    let status = fs::read_to_string(format!("/proc/{pid}/stat"));
    seen_of(status, || {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        pid.is_none_or(|pid| test_kill_process(pid) == Err(Errno::SRCH))
    })
}

/// Understands what `/proc` says; `is_unused`: the kernel knows no process with the number.
fn seen_of(status: io::Result<String>, is_unused: impl Fn() -> bool) -> Seen {
    match status.as_deref().map(started_of) {
        Ok(Some(Some(started))) => Seen::Started(started),
        Ok(Some(None)) => Seen::Gone,
        // It may end while its file is read.
        Ok(None) | Err(_) if is_unused() => Seen::Gone,
        Ok(None) | Err(_) => Seen::Unknown,
    }
}

/// When a process began, or that it has ended, by the text of `/proc`: behind the process's name, which may hold anything,
/// its state is the first word, the number of its threads the 18th, and its start the 20th. `None`: the text is none.
fn started_of(status: &str) -> Option<Option<String>> {
    let (_, words) = status.rsplit_once(')')?;
    let words = words.split_whitespace().collect::<Vec<_>>();
    let is_dead = matches!(*words.first()?, "Z" | "X");
    // The first thread of one that was killed may be dead while another is still about to write.
    let has_others = words
        .get(17)?
        .parse::<u64>()
        .is_ok_and(|threads| threads > 1);
    match is_dead && !has_others {
        true => Some(None),
        false => words.get(19).map(|&started| Some(started.to_owned())),
    }
}

impl Holder {
    /// This process.
    pub fn this_process() -> Self {
        let pid = std::process::id();
        Holder {
            host: line("/proc/sys/kernel/hostname"),
            boot: line("/proc/sys/kernel/random/boot_id"),
            pid_namespace: pid_namespace(),
            pid,
            started: match look_at(pid) {
                Seen::Started(started) => started,
                Seen::Gone | Seen::Unknown => String::new(),
            },
        }
    }

    /// Whether the process is known to have ended. Of other machines nothing is known, and nothing of a process that
    /// `/proc` hides, as long as its number is in use.
    pub fn is_gone(&self) -> bool {
        let same_boot =
            !self.boot.is_empty() && self.boot == line("/proc/sys/kernel/random/boot_id");
        let seen_from_here = same_boot && self.pid_namespace == pid_namespace();
        seen_from_here && self.is_another(&look_at(self.pid))
    }

    /// Whether what is seen under the number is not this process any more.
    fn is_another(&self, seen: &Seen) -> bool {
        match seen {
            // One that did not see its own start cannot be told from others of the number.
            Seen::Started(started) => !self.started.is_empty() && *started != self.started,
            Seen::Gone => true,
            Seen::Unknown => false,
        }
    }

    /// For messages.
    pub(crate) fn told(&self) -> String {
        format!("process {} on {}", self.pid, self.host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_nobody_has_waited_for_is_gone() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let this = Holder::this_process();
        let status = || fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        // It has ended by itself; its parent does not know yet.
        while !status().contains(") Z ") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let words = status();
        let started = words.split(' ').nth(21).unwrap().to_owned();
        let holder = Holder {
            pid: child.id(),
            started,
            ..this
        };
        assert!(holder.is_gone(), "{words}");
        let alive = words.replacen(") Z ", ") S ", 1);
        assert_eq!(started_of(&alive), Some(Some(holder.started.clone())));
        child.wait().unwrap();
        assert!(holder.is_gone());
    }

    #[test]
    fn a_process_is_there_as_long_as_one_of_its_threads() {
        let status = |state, threads| {
            format!("7 (a) b) {state} 1 7 7 0 -1 4 0 0 0 0 0 0 0 0 20 0 {threads} 0 99 0")
        };
        for (state, threads, expected) in [
            ("S", 1, Some("99")),
            ("D", 4, Some("99")),
            ("Z", 2, Some("99")),
            ("Z", 1, None),
            ("Z", 0, None),
            ("X", 1, None),
        ] {
            let started = started_of(&status(state, threads));
            assert_eq!(
                started.expect("a text").as_deref(),
                expected,
                "{state} {threads}"
            );
        }
    }

    #[test]
    fn a_hidden_process_is_not_known_to_be_gone() {
        let this = Holder::this_process();
        for (kind, is_unused, is_gone) in [
            // As with hidepid=2 and hidepid=1.
            (io::ErrorKind::NotFound, false, false),
            (io::ErrorKind::PermissionDenied, false, false),
            (io::ErrorKind::NotFound, true, true),
        ] {
            let seen = seen_of(Err(kind.into()), || is_unused);
            assert_eq!(this.is_another(&seen), is_gone, "{kind} {is_unused}");
        }
        assert_eq!(seen_of(Ok("damaged".to_owned()), || false), Seen::Unknown);
        let blind = Holder {
            started: String::new(),
            ..this
        };
        assert!(!blind.is_another(&Seen::Started("5".to_owned())));
    }

    #[test]
    fn only_what_can_be_seen_is_known_to_be_gone() {
        let this = Holder::this_process();
        assert!(!this.is_gone() && !this.started.is_empty());
        let before = Holder {
            started: "1".to_owned(),
            ..this.clone()
        };
        assert!(before.is_gone());
        for other in [
            Holder {
                boot: "another".to_owned(),
                ..before.clone()
            },
            Holder {
                pid_namespace: "another".to_owned(),
                ..before
            },
        ] {
            assert!(!other.is_gone());
        }
    }
}
