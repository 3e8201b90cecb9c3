//! Which process does something, so that another one of the same machine can tell whether it is gone.

use std::fs;

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

/// When a process began: behind its name, which may hold anything, the 20th word.
fn started(pid: u32) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, words) = status.rsplit_once(')')?;
    words.split_whitespace().nth(19).map(str::to_owned)
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
            started: started(pid).unwrap_or_default(),
        }
    }

    /// Whether the process is known to have ended. Of other machines nothing is known.
    pub fn is_gone(&self) -> bool {
        let same_boot =
            !self.boot.is_empty() && self.boot == line("/proc/sys/kernel/random/boot_id");
        let seen_from_here = same_boot && self.pid_namespace == pid_namespace();
        seen_from_here && started(self.pid).is_none_or(|started| started != self.started)
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
