//! [`Reserve`]: clusters that are counted as used and that nobody uses yet.
//!
//! Their counts are durable before they are handed out, so that a flush need not make them so
//! first. A crash leaks them: so there are few ([`MOST_COUNTED_AHEAD`]), apart from what was
//! counted for a request that then took less.
//!
//! Clusters enter in runs, in the order in which they were counted, and leave from the front.
//! A cluster is in one run at most.

use std::collections::VecDeque;

/// Clusters that are counted ahead at most. A killed process leaks them, besides those whose
/// counts went down since they were last written.
pub(crate) const MOST_COUNTED_AHEAD: u64 = 8;

/// Clusters side by side that were counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReservedRun {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// The commit period in which they were counted.
    pub(crate) period: u64,
    /// Never written since the file grew: they read as zeroes.
    pub(crate) reads_as_zeroes: bool,
}

impl ReservedRun {
    pub(crate) fn clusters(&self) -> u64 {
        self.end - self.start
    }

    /// Takes up to `want` clusters from the front.
    pub(super) fn split(&mut self, want: u64) -> ReservedRun {
        let end = self.end.min(self.start.saturating_add(want));
        let front = ReservedRun { end, ..*self };
        self.start = end;
        front
    }

    fn continues_in(&self, next: &ReservedRun) -> bool {
        self.end == next.start && self.reads_as_zeroes == next.reads_as_zeroes
    }
}

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct Reserve {
    runs: VecDeque<ReservedRun>,
    clusters: u64,
}

impl Reserve {
    /// How many clusters are in the reserve.
    pub(crate) fn clusters(&self) -> u64 {
        self.clusters
    }

    /// The cluster that is handed out next.
    pub(crate) fn front(&self) -> Option<u64> {
        self.runs.front().map(|run| run.start)
    }

    /// Where the run ends that is handed out next, if there is no other one.
    pub(crate) fn end_of_only_run(&self) -> Option<u64> {
        match self.runs.len() {
            1 => self.runs.front().map(|run| run.end),
            _ => None,
        }
    }

    /// Adds clusters at the end.
    pub(crate) fn push(&mut self, run: ReservedRun) {
        self.clusters += run.clusters();
        match self.runs.back_mut() {
            Some(last) if last.continues_in(&run) && last.period == run.period => {
                last.end = run.end;
            }
            _ => self.runs.push_back(run),
        }
    }

    /// Puts clusters back to the front that were taken and not used.
    pub(crate) fn give_back(&mut self, run: ReservedRun) {
        self.clusters += run.clusters();
        self.runs.push_front(run);
    }

    /// Takes everything out.
    pub(crate) fn drain(&mut self) -> Vec<ReservedRun> {
        self.clusters = 0;
        self.runs.drain(..).collect()
    }

    /// Takes between one and `want` clusters that lie side by side, if there are any.
    pub(crate) fn take(&mut self, want: u64) -> Option<ReservedRun> {
        let mut taken = self.runs.front_mut()?.split(want);
        // Runs of different periods may lie side by side.
        loop {
            if self.runs.front().is_some_and(|run| run.clusters() == 0) {
                self.runs.pop_front();
            }
            let rest = want - taken.clusters();
            match self.runs.front_mut() {
                Some(next) if rest > 0 && taken.continues_in(next) => {
                    taken.end = next.split(rest).end;
                    taken.period = taken.period.max(next.period);
                }
                _ => break,
            }
        }
        self.clusters -= taken.clusters();
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn run(start: u64, end: u64) -> ReservedRun {
        ReservedRun {
            start,
            end,
            period: 1,
            reads_as_zeroes: true,
        }
    }

    proptest! {
        #[test]
        fn each_cluster_leaves_once(takes in prop::collection::vec(1u64..20, 0..200)) {
            let mut reserve = Reserve::default();
            let mut seen = BTreeSet::new();
            let mut pushed = 0;
            for want in takes {
                let Some(taken) = reserve.take(want) else {
                    // Runs of two periods, side by side, and one apart.
                    for (from, to, period) in [(0, 100, 1), (100, 150, 2), (160, 200, 2)] {
                        let base = pushed;
                        reserve.push(ReservedRun { period, ..run(base + from, base + to) });
                    }
                    pushed += 200;
                    continue;
                };
                prop_assert!((1..=want).contains(&taken.clusters()));
                for cluster in taken.start..taken.end {
                    prop_assert!(seen.insert(cluster), "{cluster} was given out twice");
                }
                let all = pushed / 200 * 190;
                prop_assert_eq!(reserve.clusters() + seen.len() as u64, all);
            }
            let rest: u64 = reserve.drain().iter().map(ReservedRun::clusters).sum();
            prop_assert_eq!(rest + seen.len() as u64, pushed / 200 * 190);
        }
    }
}
