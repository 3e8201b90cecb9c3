//! [`Areas`]: where metadata lies that is no L2 table.

use std::ops::Range;

use super::counts::Counts;

/// Runs that are kept as such; bitmaps that claim the same clusters over and over can make
/// any number of them.
const MAX_RUNS: usize = 1 << 16;

/// A set of clusters: runs while these are few, and the dense form of [`Counts`].
#[derive(Debug, Default)]
pub(super) struct Areas {
    runs: Vec<Range<u64>>,
    dense: Counts,
}

impl Areas {
    /// Adds a run of clusters of the file.
    pub(super) fn add(&mut self, clusters: Range<u64>) {
        if let Some(last) = self.runs.last_mut()
            && last.end == clusters.start
        {
            last.end = clusters.end;
            return;
        }
        self.runs.push(clusters);
        if self.runs.len() >= MAX_RUNS {
            for run in std::mem::take(&mut self.runs) {
                self.dense.add_run(run, 1, 1, |_, _| {});
            }
        }
    }

    /// Must be called before [`Areas::contains`], once all are known.
    pub(super) fn sort(&mut self) {
        self.runs.sort_unstable_by_key(|run| run.start);
        self.runs.dedup_by(|next, run| {
            let joins = next.start <= run.end;
            if joins {
                run.end = run.end.max(next.end);
            }
            joins
        });
    }

    /// Whether a cluster is among them.
    pub(super) fn contains(&self, cluster: u64) -> bool {
        let next = self.runs.partition_point(|run| run.end <= cluster);
        let run = self.runs.get(next);
        run.is_some_and(|run| run.start <= cluster) || self.dense.get(cluster) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_many_there_are_each_cluster_is_found() {
        let mut areas = Areas::default();
        // Far more than are kept as runs, some of them more than once.
        for number in (0..3 * MAX_RUNS as u64).rev() {
            areas.add(number % 100_000 * 3..number % 100_000 * 3 + 2);
        }
        areas.add(1_000_000..1_000_010);
        areas.add(1_000_010..1_000_020);
        assert!(areas.runs.len() < MAX_RUNS);
        areas.sort();
        for cluster in [0, 1, 3, 299_997, 299_998, 1_000_000, 1_000_019] {
            assert!(areas.contains(cluster), "{cluster}");
        }
        for cluster in [2, 5, 299_999, 1_000_020, 1 << 40] {
            assert!(!areas.contains(cluster), "{cluster}");
        }
    }
}
