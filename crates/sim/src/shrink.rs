//! Makes a failing story small enough to read.
//!
//! A smaller story has other moments and other records, so the old cut means
//! nothing there: each candidate is searched for a failure of the same kind anew.

use std::time::{Duration, Instant};

use crate::cut::Kept;
use crate::explore::{Explorer, Found};
use crate::rng::Rng;
use crate::scenario::{Backing, DataFile, Op, Step, Story};
use crate::storage::Traits;

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
    /// Tries every way to make the story smaller; says whether one was found.
    fn round(&mut self) -> bool {
        let legs = self.best.story.legs.len();
        let mut any = false;
        for leg in (0..legs).rev() {
            any |= legs > 1 && self.try_edit(|story| drop(story.legs.remove(leg)));
        }
        for leg in 0..self.best.story.legs.len() {
            any |= self.drop_runs(
                |story| story.legs[leg].steps.len(),
                |story, at, count| {
                    drop(story.legs[leg].steps.drain(at..at + count));
                },
            );
            any |= self.simplify_steps(leg);
        }
        any |= self.drop_runs(
            |story| story.setup.len(),
            |story, at, count| {
                drop(story.setup.drain(at..at + count));
            },
        );
        any |= self.drop_runs(
            |story| story.preparations.len(),
            |story, at, count| {
                drop(story.preparations.drain(at..at + count));
            },
        );
        any | self.simplify_image()
    }

    /// Drops runs of some list, long ones first.
    fn drop_runs(
        &mut self,
        len: impl Fn(&Story) -> usize,
        remove: impl Fn(&mut Story, usize, usize),
    ) -> bool {
        let mut any = false;
        let mut count = len(&self.best.story);
        while count > 0 {
            let mut at = 0;
            while at + count <= len(&self.best.story) {
                if self.try_edit(|story| remove(story, at, count)) {
                    any = true;
                } else {
                    at += count;
                }
            }
            count /= 2;
        }
        any
    }

    fn simplify_steps(&mut self, leg: usize) -> bool {
        let mut any = false;
        for at in 0..self.best.story.legs[leg].steps.len() {
            let Step::Start(op) = self.best.story.legs[leg].steps[at] else {
                continue;
            };
            for simpler in simpler_ops(op) {
                any |= self.try_edit(|story| story.legs[leg].steps[at] = Step::Start(simpler));
            }
        }
        any
    }

    fn simplify_image(&mut self) -> bool {
        let mut any = self.try_edit(|story| story.image.tiny_cache = false);
        any |= self.try_edit(|story| story.image.backing = Backing::None);
        any |= self.try_edit(|story| story.image.data_file = DataFile::Inside);
        any |= self.try_edit(|story| story.image.encrypted = false);
        any |= self.try_edit(|story| story.image.extended_l2 = false);
        any |= self.try_edit(|story| story.image.bitmap_bits = None);
        any |= self.try_edit(|story| story.image.refcount_order = 4);
        any |= self.try_edit(|story| story.image.version = 3);
        any | self.try_edit(|story| story.image.traits = Traits::default())
    }

    /// Keeps a change of the story if it still fails in the same way.
    fn try_edit(&mut self, edit: impl FnOnce(&mut Story)) -> bool {
        if Instant::now() >= self.end {
            return false;
        }
        let mut story = self.best.story.clone();
        edit(&mut story);
        if story == self.best.story {
            return false;
        }
        match self.explorer.search(&story, &mut self.rng, TRIES) {
            Some(found) if found.failure.kind == self.best.failure.kind => {
                let smaller = found.story.legs.len() <= story.legs.len();
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
        for leg in 0..self.best.story.legs.len() {
            let kept_len = |story: &Story| {
                story.legs[leg]
                    .crash
                    .as_ref()
                    .map_or(0, |c| c.cut.kept.len())
            };
            for at in (0..kept_len(&self.best.story)).rev() {
                self.try_replay(|kept| drop(kept.remove(at)), leg);
            }
            for at in 0..kept_len(&self.best.story) {
                self.try_replay(|kept| kept[at].grows = true, leg);
                let whole = |kept: &mut Vec<Kept>| {
                    let end = kept[at].sectors.last().map_or(0, |last| last.end);
                    kept[at].sectors = std::iter::once(0..end).collect();
                };
                self.try_replay(whole, leg);
            }
        }
    }

    fn try_replay(&mut self, edit: impl FnOnce(&mut Vec<Kept>), leg: usize) {
        let mut story = self.best.story.clone();
        let Some(crash) = &mut story.legs[leg].crash else {
            return;
        };
        edit(&mut crash.cut.kept);
        if let Err(failure) = self.explorer.replay(&story)
            && failure.kind == self.best.failure.kind
        {
            self.best = Found { failure, story };
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
