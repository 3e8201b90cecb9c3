//! Judges ENOSPC: which program failed, and whether it had to succeed.

use anyhow::{Result, bail};

use super::super::runner::Answer;
use super::play::Game;

/// The outcome of a scenario.
#[derive(Debug, Clone, Copy, Default)]
pub struct Outcome {
    /// Both programs failed with ENOSPC.
    pub refused_by_both: bool,
    /// Only QEMU failed with ENOSPC.
    pub refused_by_qemu: bool,
    /// Clusters leaked by requests that failed.
    pub leaked_clusters: u64,
}

impl Outcome {
    /// Adds the leaked clusters that `check` reports after a failed request.
    pub fn note_leaks(&mut self, answer: &Answer) {
        let words = answer.output.lines();
        let leaks =
            words.filter_map(|line| line.split_once(" leaked clusters")?.0.parse::<u64>().ok());
        self.leaked_clusters += leaks.sum::<u64>();
    }
}

/// Describes the failure of a tool; `None` if it succeeded.
pub fn refusal(answer: &Answer) -> Option<String> {
    let said = || answer.output.lines().chain(answer.errors.lines());
    let failed: Vec<&str> = said().filter(|line| line.contains("failed: ")).collect();
    match (answer.code, failed.first()) {
        (0, None) => None,
        (code, Some(first)) => Some(format!(
            "exit code {code}, {} times '{first}'",
            failed.len()
        )),
        (code, None) => {
            let all: Vec<&str> = said().collect();
            Some(format!("exit code {code}, '{}'", all.join("; ")))
        }
    }
}

/// Whether the failure is one of space. For writes past the end of an NBD export the error is EINVAL or EIO.
fn is_full(refusal: &str) -> bool {
    const ERRORS: [&str; 4] = [
        "No space left",
        "Input/output error",
        "Invalid argument",
        "beyond the end",
    ];
    ERRORS.iter().any(|error| refusal.contains(error))
}

/// Returns whether the scenario continues. It ends, without a failure, if QEMU fails and nothing
/// guarantees space.
pub fn verdict(game: &mut Game<'_>, answers: &[Answer]) -> Result<bool> {
    let is_promised = game.setting.keeps_promises && game.scenario.is_promised();
    let [ours, theirs] = [0, 1].map(|index| refusal(&answers[index]));
    match (ours, theirs) {
        (None, None) => Ok(true),
        (Some(ours), None) => bail!("refused where QEMU is not: {ours}"),
        (None, Some(_)) => {
            game.outcome.refused_by_qemu = true;
            Ok(false)
        }
        (Some(ours), Some(theirs)) if is_promised && is_full(&ours) => {
            bail!("refused in a place of promised size: {ours}; QEMU: {theirs}")
        }
        (Some(_), Some(_)) => {
            game.outcome.refused_by_both = true;
            Ok(false)
        }
    }
}
