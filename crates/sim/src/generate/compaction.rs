//! Compactions between the steps of a scenario.

use super::GuestRegions;
use crate::rng::Rng;
use crate::scenario::{Op, Scenario, Step};

/// Has the file made shorter in one scenario of four, after some of it was given up.
pub(super) fn sometimes(scenario: &mut Scenario, seed: u64) {
    // By chance of its own, so that all other scenarios are what they were.
    let mut other = Rng::new(seed ^ 0x0063_6f6d_7061_6374);
    if !other.chance(1, 4) {
        return;
    }
    let places = GuestRegions::new(&scenario.image, &mut other);
    for cycle in &mut scenario.cycles {
        for _ in 0..other.between(1, 2) {
            let mut at = other.below(cycle.steps.len() as u64 + 1) as usize;
            let resizes = |step: &Step| matches!(step, Step::Resize { .. });
            let may_discard = !cycle.steps[..at].iter().any(resizes);
            for _ in 0..other.below(5) {
                let (offset, len) = places.range(&mut other);
                if may_discard {
                    let discard = Step::Start(Op::Discard { offset, len });
                    cycle.steps.insert(at, discard);
                    at += 1;
                }
            }
            if other.chance(1, 2) {
                cycle.steps.insert(at, Step::Wait);
                at += 1;
            }
            cycle.steps.insert(at, Step::Compact);
        }
    }
}
