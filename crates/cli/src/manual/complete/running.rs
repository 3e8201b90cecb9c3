//! What may stand behind `vellum ctl`: its commands, and what the daemon that it asks knows.

use super::{Candidates, Line};
use crate::ctl;

/// Behind `ctl`: its commands, and what the daemon knows.
pub(super) fn behind_ctl(line: &Line) -> Candidates {
    let words: Vec<&str> = line.operands.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] => {
            let commands = ctl::COMMANDS
                .iter()
                .filter(|(name, ..)| !name.contains(' '));
            Candidates {
                candidates: commands
                    .map(|(name, _, about)| ((*name).to_owned(), (*about).to_owned()))
                    .collect(),
                ..Candidates::default()
            }
        }
        ["job"] => Candidates::of(ctl::JOB_ACTIONS.into_iter().chain(["speed"])),
        ["snapshot" | "mirror" | "backup", _] => Candidates::files(),
        _ => known_to_daemon(&words, line),
    }
}

#[cfg(not(feature = "http"))]
fn known_to_daemon(_words: &[&str], _line: &Line) -> Candidates {
    Candidates::default()
}

/// Names that the daemon knows, where such a one comes next.
#[cfg(feature = "http")]
fn known_to_daemon(words: &[&str], line: &Line) -> Candidates {
    use ctl::Named;
    let kind = match words {
        ["show" | "snapshot" | "resize" | "flush" | "mirror" | "backup" | "commit" | "stream"] => {
            Named::Disks
        }
        ["job", _] => Named::Jobs,
        ["unexport"] => Named::Exports,
        ["qmp"] => Named::Commands,
        _ => return Candidates::default(),
    };
    Candidates {
        candidates: ctl::names(kind, |option| line.value(option)),
        ..Candidates::default()
    }
}
