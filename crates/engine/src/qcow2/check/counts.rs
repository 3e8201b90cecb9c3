//! [`Counts`]: one count for each host cluster, in as little memory as they need.
//!
//! Nearly all counts of an image are 0 or 1, and large parts of a sparse file have
//! none. Counts are kept in chunks: absent while all are 0, 2 bits a count while
//! all are at most 3, then 4, 8, 16, and 64. A 10 TiB image of 64 KiB clusters takes
//! 40 MiB, or 80 MiB with up to 14 snapshots that share everything.

use std::ops::Range;

/// Clusters of a chunk.
pub(in crate::qcow2) const CHUNK_CLUSTERS: u64 = 1 << 16;

const CHUNK_LEN: usize = CHUNK_CLUSTERS as usize;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Chunk {
    Zero,
    /// Four counts a byte.
    Tiny(Box<[u8]>),
    /// Two counts a byte.
    Small(Box<[u8]>),
    Byte(Box<[u8]>),
    Short(Box<[u16]>),
    Wide(Box<[u64]>),
}

impl Chunk {
    fn get(&self, index: usize) -> u64 {
        match self {
            Chunk::Zero => 0,
            Chunk::Tiny(bytes) => u64::from(bytes[index / 4] >> (index % 4 * 2) & 3),
            Chunk::Small(bytes) => u64::from(bytes[index / 2] >> (index % 2 * 4) & 15),
            Chunk::Byte(bytes) => bytes[index].into(),
            Chunk::Short(counts) => counts[index].into(),
            Chunk::Wide(counts) => counts[index],
        }
    }

    fn max(&self) -> u64 {
        match self {
            Chunk::Zero => 0,
            Chunk::Tiny(_) => 3,
            Chunk::Small(_) => 15,
            Chunk::Byte(_) => u8::MAX.into(),
            Chunk::Short(_) => u16::MAX.into(),
            Chunk::Wide(_) => u64::MAX,
        }
    }

    fn set(&mut self, index: usize, value: u64) {
        while value > self.max() {
            self.widen();
        }
        match self {
            // Only 0 fits here, and it is here already.
            Chunk::Zero => {}
            Chunk::Tiny(bytes) => {
                let shift = index % 4 * 2;
                let byte = &mut bytes[index / 4];
                *byte = *byte & !(3 << shift) | (value as u8) << shift;
            }
            Chunk::Small(bytes) => {
                let shift = index % 2 * 4;
                let byte = &mut bytes[index / 2];
                *byte = *byte & !(15 << shift) | (value as u8) << shift;
            }
            Chunk::Byte(bytes) => bytes[index] = value as u8,
            Chunk::Short(counts) => counts[index] = value as u16,
            Chunk::Wide(counts) => counts[index] = value,
        }
    }

    fn widen(&mut self) {
        let counts = (0..CHUNK_LEN).map(|index| self.get(index));
        *self = match self {
            Chunk::Zero => Chunk::Tiny(vec![0; CHUNK_LEN / 4].into()),
            Chunk::Tiny(_) => {
                let pair = |index| (self.get(2 * index) | self.get(2 * index + 1) << 4) as u8;
                Chunk::Small((0..CHUNK_LEN / 2).map(pair).collect())
            }
            Chunk::Small(_) => Chunk::Byte(counts.map(|count| count as u8).collect()),
            Chunk::Byte(_) => Chunk::Short(counts.map(|count| count as u16).collect()),
            Chunk::Short(_) | Chunk::Wide(_) => Chunk::Wide(counts.collect()),
        };
    }
}

/// A byte of [`Chunk::Tiny`] whose four counts are all 1, and one whose counts are 2
/// or 3.
const ONES: u8 = 0x55;
const ABOVE_ONE: u8 = 0xaa;

/// A growing array of counts, 0 where none was set.
#[derive(Debug, Default)]
pub(in crate::qcow2) struct Counts {
    chunks: Vec<Chunk>,
}

fn place(cluster: u64) -> (usize, usize) {
    (
        (cluster / CHUNK_CLUSTERS) as usize,
        (cluster % CHUNK_CLUSTERS) as usize,
    )
}

impl Counts {
    /// The count of `cluster`.
    #[inline]
    pub(in crate::qcow2) fn get(&self, cluster: u64) -> u64 {
        let (chunk, index) = place(cluster);
        self.chunks.get(chunk).map_or(0, |chunk| chunk.get(index))
    }

    /// Sets the count of `cluster`.
    #[inline]
    pub(in crate::qcow2) fn set(&mut self, cluster: u64, value: u64) {
        let (chunk, index) = place(cluster);
        if chunk >= self.chunks.len() {
            if value == 0 {
                return;
            }
            self.chunks.resize(chunk + 1, Chunk::Zero);
        }
        self.chunks[chunk].set(index, value);
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
        let mut next = clusters.start;
        while next < clusters.end {
            if times == 1 && next.is_multiple_of(4) {
                next += self.add_ones(next..clusters.end, max);
                if next == clusters.end {
                    return;
                }
            }
            let sum = self.get(next).saturating_add(times);
            self.set(next, sum.min(max));
            if sum > max {
                overflow(next, sum - max);
            }
            next += 1;
        }
    }

    /// Adds one to the counts of the first clusters, four at a time; says to how many.
    fn add_ones(&mut self, clusters: Range<u64>, max: u64) -> u64 {
        let (chunk, first) = place(clusters.start);
        if chunk >= self.chunks.len() {
            self.chunks.resize(chunk + 1, Chunk::Zero);
        }
        let chunk = &mut self.chunks[chunk];
        if *chunk == Chunk::Zero {
            chunk.widen();
        }
        let Chunk::Tiny(bytes) = chunk else {
            return 0;
        };
        let fours =
            ((clusters.end - clusters.start) / 4).min(bytes.len() as u64 - first as u64 / 4);
        let mut added = 0;
        for byte in &mut bytes[first / 4..][..fours as usize] {
            if *byte != 0 && (max < 2 || *byte & ABOVE_ONE != 0) {
                break;
            }
            *byte += ONES;
            added += 4;
        }
        added
    }

    /// Sets the counts of four clusters to 1, the first of which is a multiple of four.
    pub(super) fn set_four_ones(&mut self, first_cluster: u64) {
        let (_, index) = place(first_cluster);
        self.set(first_cluster, 1);
        match &mut self.chunks[place(first_cluster).0] {
            Chunk::Tiny(bytes) => bytes[index / 4] = ONES,
            _ => (1..4).for_each(|next| self.set(first_cluster + next, 1)),
        }
    }

    /// Whether all counts of a run are 1.
    pub(super) fn are_ones(&self, clusters: Range<u64>) -> bool {
        let mut next = clusters.start;
        while next < clusters.end {
            let (chunk, index) = place(next);
            let left = (CHUNK_CLUSTERS - index as u64).min(clusters.end - next);
            if index % 4 == 0
                && left >= 4
                && let Some(Chunk::Tiny(bytes)) = self.chunks.get(chunk)
            {
                let fours = left as usize / 4;
                if bytes[index / 4..][..fours].iter().any(|&byte| byte != ONES) {
                    return false;
                }
                next += fours as u64 * 4;
                continue;
            }
            if self.get(next) != 1 {
                return false;
            }
            next += 1;
        }
        true
    }

    /// Whether the chunk that begins at `first_cluster` is the same in both, as a
    /// quick look tells. `false` does not mean that they differ.
    pub(super) fn chunk_is_same(&self, other: &Counts, first_cluster: u64) -> bool {
        let chunk = (first_cluster / CHUNK_CLUSTERS) as usize;
        let mine = self.chunks.get(chunk).unwrap_or(&Chunk::Zero);
        mine == other.chunks.get(chunk).unwrap_or(&Chunk::Zero)
    }

    /// Whether any of some clusters has a count.
    pub(in crate::qcow2) fn any_in(&self, clusters: Range<u64>) -> bool {
        let mut first = clusters.start;
        while first < clusters.end {
            let (chunk, _) = place(first);
            let end = ((chunk as u64 + 1) * CHUNK_CLUSTERS).min(clusters.end);
            match self.chunks.get(chunk) {
                None => return false,
                Some(Chunk::Zero) => {}
                Some(_) if (first..end).any(|cluster| self.get(cluster) != 0) => return true,
                Some(_) => {}
            }
            first = end;
        }
        false
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
        let mut seed = 1u64;
        let mut below = |end: u64| {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (seed >> 33) % end
        };
        for max in [1, 3, 15, u64::MAX] {
            let (mut runs, mut singles) = (Counts::default(), Counts::default());
            let (mut above, mut above_singles) = (0, 0);
            for _ in 0..60 {
                let start = CHUNK_CLUSTERS - 50 + below(60);
                let run = start..start + below(70);
                let times = 1 + below(3) / 2;
                runs.add_run(run.clone(), times, max, |_, by| above += by);
                for cluster in run.clone() {
                    let sum = singles.get(cluster) + times;
                    singles.set(cluster, sum.min(max));
                    above_singles += sum.saturating_sub(max);
                }
                let ones = run.clone().all(|cluster| singles.get(cluster) == 1);
                assert_eq!(runs.are_ones(run), ones);
            }
            let all = CHUNK_CLUSTERS - 60..CHUNK_CLUSTERS + 100;
            assert!(all.clone().all(|at| runs.get(at) == singles.get(at)));
            assert_eq!(above, above_singles);
        }
    }

    #[test]
    fn four_ones_are_set_whatever_the_width() {
        let mut counts = Counts::default();
        counts.set_four_ones(8);
        assert!(counts.are_ones(8..12) && counts.get(12) == 0);
        counts.set(9, 200);
        counts.set_four_ones(8);
        assert!(counts.are_ones(8..12) && !counts.are_ones(7..12));
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
