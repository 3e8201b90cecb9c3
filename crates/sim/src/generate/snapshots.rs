//! Changes of internal snapshots in the middle of a scenario.

use crate::rng::Rng;
use crate::scenario::{Change, Step};

/// Puts changes of the snapshots between the steps of a cycle.
pub(super) fn change_snapshots(steps: &mut Vec<Step>, rng: &mut Rng) {
    for _ in 0..rng.between(1, 8) {
        let change = match rng.below(6) {
            0..=2 if rng.chance(1, 4) => Change::TakeWithState(rng.between(1, 5000)),
            0..=2 => Change::Take,
            3..=4 => Change::Delete(rng.below(4)),
            _ => Change::Apply(rng.below(4)),
        };
        let at = rng.below(steps.len() as u64 + 1) as usize;
        steps.insert(at, Step::Snapshot(change));
    }
}
