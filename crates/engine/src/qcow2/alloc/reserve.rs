//! [`Reserve`]: clusters that are counted as used and that nobody uses yet.
//!
//! Clusters enter in runs, in the order in which they were counted, and leave from
//! the front. A writer that continues where it stopped gets the clusters after its
//! last ones: if another writer came between, it gets a *window*, a run set aside
//! for it. Windows grow with the stream, and give back what they hold when the
//! reserve runs dry or another stream needs their place.
//!
//! A cluster is in one run or one window at most.

use std::collections::VecDeque;

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
    fn split(&mut self, want: u64) -> ReservedRun {
        let end = self.end.min(self.start.saturating_add(want));
        let front = ReservedRun { end, ..*self };
        self.start = end;
        front
    }

    fn continues_in(&self, next: &ReservedRun) -> bool {
        self.end == next.start && self.reads_as_zeroes == next.reads_as_zeroes
    }
}

#[derive(Debug)]
struct Window {
    run: ReservedRun,
    /// How many clusters it was made with.
    made_with: u64,
    used_at: u64,
}

/// Where a writer stopped, and what its window had been.
#[derive(Debug, Clone, Copy, Default)]
struct Stop {
    end: u64,
    made_with: u64,
}

const MOST_WINDOWS: usize = 16;
const REMEMBERED_STOPS: usize = 32;
const FIRST_WINDOW_CLUSTERS: u64 = 4;
const MAX_WINDOW_CLUSTERS: u64 = 256;

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct Reserve {
    runs: VecDeque<ReservedRun>,
    windows: Vec<Window>,
    stops: [Stop; REMEMBERED_STOPS],
    next_stop: usize,
    taken: u64,
    clusters: u64,
}

impl Reserve {
    /// Clusters in the reserve, those in windows included.
    pub(crate) fn clusters(&self) -> u64 {
        self.clusters
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
        self.close_windows();
        self.clusters = 0;
        self.runs.drain(..).collect()
    }

    /// Takes between one and `want` clusters that lie side by side, if there are
    /// any; `after`: the cluster that would continue what the writer wrote before.
    pub(crate) fn take(&mut self, want: u64, after: Option<u64>) -> Option<ReservedRun> {
        if self.runs.is_empty() {
            self.close_windows();
        }
        self.taken += 1;
        let (run, made_with) = self
            .take_from_window(want, after)
            .or_else(|| self.open_window(want, after))
            .or_else(|| self.take_front(want).map(|run| (run, 0)))?;
        self.clusters -= run.clusters();
        self.stops[self.next_stop] = Stop {
            end: run.end,
            made_with,
        };
        self.next_stop = (self.next_stop + 1) % REMEMBERED_STOPS;
        Some(run)
    }

    fn take_front(&mut self, want: u64) -> Option<ReservedRun> {
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
                _ => return Some(taken),
            }
        }
    }

    fn take_from_window(&mut self, want: u64, after: Option<u64>) -> Option<(ReservedRun, u64)> {
        let after = after?;
        let mut windows = self.windows.iter();
        let index = windows.position(|window| window.run.start == after)?;
        let window = &mut self.windows[index];
        window.used_at = self.taken;
        let (run, made_with) = (window.run.split(want), window.made_with);
        if window.run.clusters() == 0 {
            self.windows.swap_remove(index);
        }
        Some((run, made_with))
    }

    /// Sets clusters aside for a writer that goes on where it stopped a moment ago,
    /// unless the next clusters continue what it wrote anyway.
    fn open_window(&mut self, want: u64, after: Option<u64>) -> Option<(ReservedRun, u64)> {
        let after = after?;
        let front = self.runs.front()?;
        if front.start == after {
            return None;
        }
        let stop = self.stops.iter().find(|stop| stop.end == after)?;
        let size = (2 * stop.made_with)
            .max(2 * want)
            .clamp(FIRST_WINDOW_CLUSTERS, MAX_WINDOW_CLUSTERS);
        if size <= want || front.clusters() < 2 * size {
            return None;
        }
        if self.windows.len() == MOST_WINDOWS {
            let windows = self.windows.iter().enumerate();
            let (oldest, _) = windows.min_by_key(|(_, window)| window.used_at)?;
            let window = self.windows.swap_remove(oldest);
            self.runs.push_front(window.run);
            // The front has changed; the stream gets its window next time.
            return None;
        }
        let mut run = self.take_front(size)?;
        let taken = run.split(want);
        self.windows.push(Window {
            run,
            made_with: size,
            used_at: self.taken,
        });
        Some((taken, size))
    }

    fn close_windows(&mut self) {
        let mut runs: Vec<ReservedRun> = self.windows.drain(..).map(|window| window.run).collect();
        runs.sort_by_key(|run| run.start);
        for run in runs.into_iter().rev() {
            self.runs.push_front(run);
        }
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

    fn reserve(clusters: u64) -> Reserve {
        let mut reserve = Reserve::default();
        reserve.push(run(0, clusters));
        reserve
    }

    #[test]
    fn one_stream_and_random_writers_are_dense() {
        let mut reserve = reserve(100);
        let mut end = None;
        for cluster in 0..50 {
            let taken = reserve.take(1, end).unwrap();
            assert_eq!(taken.start, cluster);
            end = Some(taken.end);
        }
        for cluster in 50..100 {
            assert_eq!(reserve.take(1, Some(1000)).unwrap().start, cluster);
        }
        assert_eq!(reserve.take(1, None), None);
    }

    #[test]
    fn streams_side_by_side_get_long_runs() {
        let mut reserve = reserve(4096);
        let mut ends = [None; 4];
        let mut breaks = 0;
        for _ in 0..512 {
            for end in &mut ends {
                let taken = reserve.take(1, *end).unwrap();
                breaks += u32::from(end.is_some_and(|end| end != taken.start));
                *end = Some(taken.end);
            }
        }
        assert!(breaks <= 4 * 10, "{breaks} breaks in 2048 clusters");
        let mut left = 0;
        while reserve.take(1, None).is_some() {
            left += 1;
        }
        assert_eq!(left, 4096 - 4 * 512, "windows give back what they hold");
    }

    proptest! {
        #[test]
        fn each_cluster_leaves_once(
            takes in prop::collection::vec((1u64..20, prop::option::of(0usize..40)), 0..200),
        ) {
            let mut reserve = Reserve::default();
            let mut seen = BTreeSet::new();
            let mut ends = vec![0];
            let mut pushed = 0;
            for (want, stop) in takes {
                let after = stop.map(|stop| ends[stop % ends.len()]);
                let Some(taken) = reserve.take(want, after) else {
                    // Runs of two periods, side by side, and one apart.
                    for (from, to, period) in [(0, 100, 1), (100, 150, 2), (160, 200, 2)] {
                        let base = pushed;
                        reserve.push(ReservedRun { period, ..run(base + from, base + to) });
                    }
                    pushed += 200;
                    continue;
                };
                prop_assert!((1..=want).contains(&taken.clusters()));
                ends.push(taken.end);
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
