//! Makes a failing scenario small enough to read.
//!
//! A smaller scenario has other moments and other records, so the old cut means
//! nothing there: each candidate is searched for a failure of the same kind anew.

use std::time::{Duration, Instant};

use crate::cut::SurvivingPart;
use crate::explore::{Explorer, Found};
use crate::rng::Rng;
use crate::scenario::{Backing, DataFile, Op, Place, Scenario, Step};
use crate::storage::SimFileOptions;

/// Cuts tried on each candidate.
const TRIES: u64 = 200;

/// Shrinks a failure for at most `budget`.
pub fn shrink(explorer: &Explorer, found: Found, budget: Duration) -> Found {
    let mut shrinker = Shrinker {
        explorer,
        best: found,
        rng: Rng::new(1),
        end: Instant::now() + budget,
    };
    while shrinker.round() && Instant::now() < shrinker.end {}
    shrinker.shrink_cut();
    shrinker.best
}

struct Shrinker<'a> {
    explorer: &'a Explorer,
    best: Found,
    rng: Rng,
    end: Instant,
}

impl Shrinker<'_> {
    /// Tries every way to make the scenario smaller; says whether one was found.
    fn round(&mut self) -> bool {
        let cycles = self.best.scenario.cycles.len();
        let mut any = false;
        for cycle in (0..cycles).rev() {
            any |= cycles > 1 && self.try_edit(|scenario| drop(scenario.cycles.remove(cycle)));
        }
        for cycle in 0..self.best.scenario.cycles.len() {
            any |= self.drop_runs(
                |scenario| scenario.cycles[cycle].steps.len(),
                |scenario, at, count| {
                    drop(scenario.cycles[cycle].steps.drain(at..at + count));
                },
            );
            any |= self.simplify_steps(cycle);
        }
        any |= self.drop_runs(
            |scenario| scenario.setup.len(),
            |scenario, at, count| {
                drop(scenario.setup.drain(at..at + count));
            },
        );
        any |= self.drop_runs(
            |scenario| scenario.preparations.len(),
            |scenario, at, count| {
                drop(scenario.preparations.drain(at..at + count));
            },
        );
        any | self.simplify_image()
    }

    /// Drops runs of some list, long ones first.
    fn drop_runs(
        &mut self,
        len: impl Fn(&Scenario) -> usize,
        remove: impl Fn(&mut Scenario, usize, usize),
    ) -> bool {
        let mut any = false;
        let mut count = len(&self.best.scenario);
        while count > 0 {
            let mut at = 0;
            while at + count <= len(&self.best.scenario) {
                if self.try_edit(|scenario| remove(scenario, at, count)) {
                    any = true;
                } else {
                    at += count;
                }
            }
            count /= 2;
        }
        any
    }

    fn simplify_steps(&mut self, cycle: usize) -> bool {
        let mut any = false;
        for at in 0..self.best.scenario.cycles[cycle].steps.len() {
            let Step::Start(op) = self.best.scenario.cycles[cycle].steps[at] else {
                continue;
            };
            for simpler in simpler_ops(op) {
                any |= self
                    .try_edit(|scenario| scenario.cycles[cycle].steps[at] = Step::Start(simpler));
            }
        }
        any
    }

    fn simplify_image(&mut self) -> bool {
        let mut any = self.try_edit(|scenario| scenario.image.tiny_cache = false);
        any |= self.try_edit(|scenario| scenario.image.backing = Backing::None);
        any |= self.try_edit(|scenario| scenario.image.data_file = DataFile::Inside);
        any |= self.try_edit(|scenario| scenario.image.encrypted = false);
        any |= self.try_edit(|scenario| scenario.image.extended_l2 = false);
        any |= self.try_edit(|scenario| scenario.image.bitmap_bits = None);
        any |= self.try_edit(|scenario| scenario.image.refcount_order = 4);
        any |= self.try_edit(|scenario| scenario.image.version = 3);
        if self.best.scenario.image.place != Place::Unchecked {
            // The place belongs to the traits.
            return any;
        }
        any | self.try_edit(|scenario| scenario.image.traits = SimFileOptions::default())
    }

    /// Keeps a change of the scenario if it still fails in the same way.
    fn try_edit(&mut self, edit: impl FnOnce(&mut Scenario)) -> bool {
        if Instant::now() >= self.end {
            return false;
        }
        let mut scenario = self.best.scenario.clone();
        edit(&mut scenario);
        if scenario == self.best.scenario {
            return false;
        }
        match self.explorer.search(&scenario, &mut self.rng, TRIES) {
            Some(found) if found.failure.kind == self.best.failure.kind => {
                let smaller = found.scenario.cycles.len() <= scenario.cycles.len();
                if smaller {
                    self.best = found;
                }
                smaller
            }
            _ => false,
        }
    }

    /// Loses as few records and sectors as will do.
    fn shrink_cut(&mut self) {
        for cycle in 0..self.best.scenario.cycles.len() {
            let kept_len = |scenario: &Scenario| {
                scenario.cycles[cycle]
                    .crash
                    .as_ref()
                    .map_or(0, |c| c.cut.kept.len())
            };
            for at in (0..kept_len(&self.best.scenario)).rev() {
                self.try_replay(|kept| drop(kept.remove(at)), cycle);
            }
            for at in 0..kept_len(&self.best.scenario) {
                self.try_replay(|kept| kept[at].grows = true, cycle);
                let whole = |kept: &mut Vec<SurvivingPart>| {
                    let end = kept[at].sectors.last().map_or(0, |last| last.end);
                    kept[at].sectors = std::iter::once(0..end).collect();
                };
                self.try_replay(whole, cycle);
            }
        }
    }

    fn try_replay(&mut self, edit: impl FnOnce(&mut Vec<SurvivingPart>), cycle: usize) {
        let mut scenario = self.best.scenario.clone();
        let Some(crash) = &mut scenario.cycles[cycle].crash else {
            return;
        };
        edit(&mut crash.cut.kept);
        if let Err(failure) = self.explorer.replay(&scenario)
            && failure.kind == self.best.failure.kind
        {
            self.best = Found { failure, scenario };
        }
    }
}

/// The same request, smaller or plainer.
fn simpler_ops(op: Op) -> Vec<Op> {
    match op {
        Op::Write { offset, len, fua } => {
            let mut simpler = vec![Op::Write {
                offset,
                len,
                fua: false,
            }];
            if len > 512 {
                simpler.push(Op::Write {
                    offset,
                    len: 512,
                    fua,
                });
                simpler.push(Op::Write {
                    offset,
                    len: len / 2,
                    fua,
                });
            }
            simpler
        }
        Op::WriteCompressed { offset, len, .. } => {
            vec![Op::Write {
                offset,
                len,
                fua: false,
            }]
        }
        Op::WriteZeroes { offset, len, .. } => {
            vec![Op::WriteZeroes {
                offset,
                len,
                unmap: false,
                fua: false,
            }]
        }
        Op::Discard { .. } | Op::Read { .. } | Op::Flush => Vec::new(),
    }
}
