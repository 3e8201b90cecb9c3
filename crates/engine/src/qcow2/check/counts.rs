//! [`Counts`]: one count for each host cluster, in as little memory as they need.
//!
//! Nearly all counts of an image are 0 or 1, and large parts of a sparse file have
//! none, so they are kept in chunks of their own widths. A 10 TiB image of 64 KiB
//! clusters takes 40 MiB, or 80 MiB with up to 14 snapshots that share everything.

use std::ops::Range;

use parking_lot::{Mutex, MutexGuard};

use super::chunk::{Chunk, parts, place};

pub(in crate::qcow2) use super::chunk::CHUNK_CLUSTERS;

/// A growing array of counts, 0 where none was set.
#[derive(Debug, Clone, Default)]
pub(in crate::qcow2) struct Counts {
    chunks: Vec<Chunk>,
}

impl Counts {
    /// The count of `cluster`.
    #[inline]
    pub(in crate::qcow2) fn get(&self, cluster: u64) -> u64 {
        let (chunk, index) = place(cluster);
        self.chunk(chunk).get(index)
    }

    /// The chunk of a number.
    #[inline]
    pub(super) fn chunk(&self, number: usize) -> &Chunk {
        self.chunks.get(number).unwrap_or(&Chunk::Zero)
    }

    fn chunk_mut(&mut self, number: usize) -> &mut Chunk {
        if number >= self.chunks.len() {
            self.chunks.resize(number + 1, Chunk::Zero);
        }
        &mut self.chunks[number]
    }

    /// Sets the count of `cluster`.
    #[inline]
    pub(in crate::qcow2) fn set(&mut self, cluster: u64, value: u64) {
        let (chunk, index) = place(cluster);
        if chunk < self.chunks.len() || value > 0 {
            self.chunk_mut(chunk).set(index, value);
        }
    }

    /// Adds `times` to the counts of a run of clusters, up to `max` at most; tells
    /// `overflow` by how much each cluster goes beyond.
    pub(super) fn add_run(
        &mut self,
        clusters: Range<u64>,
        times: u64,
        max: u64,
        mut overflow: impl FnMut(u64, u64),
    ) {
        for (number, run) in parts(clusters) {
            let first = number as u64 * CHUNK_CLUSTERS;
            let overflow = |index, by| overflow(first + index as u64, by);
            self.chunk_mut(number).add(run, times, max, overflow);
        }
    }

    /// Whether the chunk that begins at `first_cluster` is the same in both, as a
    /// quick look tells. `false` does not mean that they differ.
    pub(super) fn chunk_is_same(&self, other: &Counts, first_cluster: u64) -> bool {
        let (number, _) = place(first_cluster);
        self.chunk(number) == other.chunk(number)
    }

    /// Whether any of some clusters has a count.
    pub(in crate::qcow2) fn any_in(&self, clusters: Range<u64>) -> bool {
        let end = clusters.end.min(self.chunks.len() as u64 * CHUNK_CLUSTERS);
        parts(clusters.start..end).any(|(number, mut run)| {
            let chunk = self.chunk(number);
            *chunk != Chunk::Zero && run.any(|index| chunk.get(index) != 0)
        })
    }

    /// The last cluster below `end_cluster` whose count is not 0.
    pub(super) fn last_used(&self, end_cluster: u64) -> Option<u64> {
        let mut end = end_cluster.min(self.chunks.len() as u64 * CHUNK_CLUSTERS);
        while end > 0 {
            let start = (end - 1) / CHUNK_CLUSTERS * CHUNK_CLUSTERS;
            let (chunk, _) = place(start);
            if self.chunks[chunk] != Chunk::Zero
                && let Some(found) = (start..end).rev().find(|&cluster| self.get(cluster) != 0)
            {
                return Some(found);
            }
            end = start;
        }
        None
    }
}

/// Counts that several threads change: each chunk has a lock of its own.
#[derive(Debug)]
pub(super) struct SharedCounts {
    chunks: Vec<Mutex<Chunk>>,
}

impl SharedCounts {
    /// Shares counts of up to `clusters` clusters.
    pub(super) fn new(counts: Counts, clusters: u64) -> Self {
        let mut chunks = counts.chunks;
        let len = clusters.div_ceil(CHUNK_CLUSTERS) as usize;
        chunks.resize(chunks.len().max(len), Chunk::Zero);
        SharedCounts {
            chunks: chunks.into_iter().map(Mutex::new).collect(),
        }
    }

    /// How many chunks there are.
    pub(super) fn len(&self) -> usize {
        self.chunks.len()
    }

    /// The chunk of a number, for the caller alone; `None` if there are not so many.
    pub(super) fn lock(&self, number: usize) -> Option<MutexGuard<'_, Chunk>> {
        let chunk = self.chunks.get(number)?;
        Some(chunk.lock())
    }

    /// As [`Counts::add_run`].
    pub(super) fn add_run(
        &self,
        clusters: Range<u64>,
        times: u64,
        max: u64,
        mut overflow: impl FnMut(u64, u64),
    ) {
        for (number, run) in parts(clusters) {
            let first = number as u64 * CHUNK_CLUSTERS;
            let overflow = |index, by| overflow(first + index as u64, by);
            let chunk = self.lock(number);
            debug_assert!(chunk.is_some(), "the file has no cluster of chunk {number}");
            if let Some(mut chunk) = chunk {
                chunk.add(run, times, max, overflow);
            }
        }
    }

    /// Takes the counts back from all who share them.
    pub(super) fn take(&self) -> Counts {
        let chunks = 0..self.len();
        let chunks = chunks.filter_map(|number| self.lock(number));
        Counts {
            chunks: chunks
                .map(|mut chunk| std::mem::take(&mut *chunk))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_every_width_live_side_by_side() {
        let mut counts = Counts::default();
        let values = [
            (0, 1),
            (1, 2),
            (5, 3),
            (6, 15),
            (CHUNK_CLUSTERS, 200),
            (CHUNK_CLUSTERS + 1, 1),
            (2 * CHUNK_CLUSTERS + 1, 65_535),
        ];
        let wide = [(3 * CHUNK_CLUSTERS, 1), (3 * CHUNK_CLUSTERS + 7, u64::MAX)];
        for (cluster, value) in values.into_iter().chain(wide) {
            counts.set(cluster, value);
        }
        for (cluster, value) in values.into_iter().chain(wide) {
            assert_eq!(counts.get(cluster), value, "cluster {cluster}");
        }
        assert_eq!(counts.get(2), 0);
        assert_eq!(counts.get(2 * CHUNK_CLUSTERS), 0);
        assert_eq!(counts.get(1 << 40), 0);
        counts.set(1, 300);
        assert_eq!((counts.get(0), counts.get(1), counts.get(5)), (1, 300, 3));
        assert_eq!((counts.get(6), counts.get(7)), (15, 0));
    }

    #[test]
    fn the_last_used_cluster_is_found_across_empty_chunks() {
        let mut counts = Counts::default();
        assert_eq!(counts.last_used(u64::MAX), None);
        counts.set(9, 1);
        counts.set(4 * CHUNK_CLUSTERS, 1);
        assert_eq!(counts.last_used(u64::MAX), Some(4 * CHUNK_CLUSTERS));
        assert_eq!(counts.last_used(4 * CHUNK_CLUSTERS), Some(9));
        assert_eq!(counts.last_used(9), None);
    }

    #[test]
    fn ranges_with_a_count_are_told_from_others() {
        let mut counts = Counts::default();
        counts.set(2 * CHUNK_CLUSTERS + 5, 1);
        assert!(!counts.any_in(0..2 * CHUNK_CLUSTERS + 5));
        assert!(counts.any_in(7..2 * CHUNK_CLUSTERS + 6));
        assert!(!counts.any_in(2 * CHUNK_CLUSTERS + 6..u64::MAX));
        assert!(!counts.any_in(3..3));
    }

    #[test]
    fn runs_are_added_as_single_clusters_are() {
        let mut random = fastrand::Rng::with_seed(1);
        for max in [1, 3, 15, u64::MAX] {
            let (mut runs, mut singles) = (Counts::default(), Counts::default());
            let (mut above, mut above_singles) = (0, 0);
            for _ in 0..60 {
                let start = CHUNK_CLUSTERS - 50 + random.u64(..60);
                let run = start..start + random.u64(..70);
                let times = 1 + random.u64(..3) / 2;
                runs.add_run(run.clone(), times, max, |_, by| above += by);
                for cluster in run.clone() {
                    let sum = singles.get(cluster) + times;
                    singles.set(cluster, sum.min(max));
                    above_singles += sum.saturating_sub(max);
                }
                let one = |cluster| singles.get(cluster) == 1;
                let (ones, no_one) = (run.clone().all(one), !run.clone().any(one));
                let found = parts(run.clone()).map(|(number, run)| {
                    let chunk = runs.chunk(number);
                    (chunk.are_ones(run.clone()), chunk.has_no_one(run))
                });
                let found: Vec<(bool, bool)> = found.collect();
                assert_eq!(found.iter().all(|(ones, _)| *ones), ones);
                assert_eq!(found.iter().all(|(_, no_one)| *no_one), no_one);
            }
            let all = CHUNK_CLUSTERS - 60..CHUNK_CLUSTERS + 100;
            assert!(all.clone().all(|at| runs.get(at) == singles.get(at)));
            assert_eq!(above, above_singles);
        }
    }

    #[test]
    fn four_ones_are_set_whatever_the_width() {
        let mut chunk = Chunk::Zero;
        chunk.set_four_ones(8);
        assert!(chunk.are_ones(8..12) && chunk.get(12) == 0);
        chunk.set(9, 200);
        chunk.set_four_ones(8);
        assert!(chunk.are_ones(8..12) && !chunk.are_ones(7..12));
    }

    #[test]
    fn counts_are_shared_and_taken_back() {
        let mut counts = Counts::default();
        counts.set(5, 2);
        let shared = SharedCounts::new(counts, 2 * CHUNK_CLUSTERS);
        assert_eq!(shared.len(), 2);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let add = || shared.add_run(4..2 * CHUNK_CLUSTERS, 1, 5, |_, _| {});
                scope.spawn(add);
            }
        });
        let counts = shared.take();
        let found = [3, 4, 5, 6, 2 * CHUNK_CLUSTERS - 1].map(|cluster| counts.get(cluster));
        assert_eq!(found, [0, 4, 5, 4, 4]);
    }

    #[test]
    fn equal_chunks_are_recognised() {
        let (mut a, mut b) = (Counts::default(), Counts::default());
        a.set(3, 1);
        b.set(3, 1);
        b.set(CHUNK_CLUSTERS, 1);
        assert!(a.chunk_is_same(&b, 0));
        assert!(!a.chunk_is_same(&b, CHUNK_CLUSTERS));
        assert!(a.chunk_is_same(&b, 2 * CHUNK_CLUSTERS));
    }
}
