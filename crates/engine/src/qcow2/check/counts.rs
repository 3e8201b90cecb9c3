//! [`Counts`]: one count for each host cluster, in as little memory as they need.
//!
//! Nearly all counts of an image are 0 or 1, and large parts of a sparse file have
//! none. Counts are kept in chunks: absent while all are 0, 2 bits a count while
//! all are at most 3, then 4, 8, 16, and 64. A 10 TiB image of 64 KiB clusters takes
//! 40 MiB, or 80 MiB with up to 14 snapshots that share everything.

use std::ops::Range;

/// Clusters of a chunk.
pub(super) const CHUNK_CLUSTERS: u64 = 1 << 16;

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

/// A growing array of counts, 0 where none was set.
#[derive(Debug, Default)]
pub(super) struct Counts {
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
    pub(super) fn get(&self, cluster: u64) -> u64 {
        let (chunk, index) = place(cluster);
        self.chunks.get(chunk).map_or(0, |chunk| chunk.get(index))
    }

    /// Sets the count of `cluster`.
    #[inline]
    pub(super) fn set(&mut self, cluster: u64, value: u64) {
        let (chunk, index) = place(cluster);
        if chunk >= self.chunks.len() {
            if value == 0 {
                return;
            }
            self.chunks.resize(chunk + 1, Chunk::Zero);
        }
        self.chunks[chunk].set(index, value);
    }

    /// Whether the chunk that begins at `first_cluster` is the same in both, as a
    /// quick look tells. `false` does not mean that they differ.
    pub(super) fn chunk_is_same(&self, other: &Counts, first_cluster: u64) -> bool {
        let chunk = (first_cluster / CHUNK_CLUSTERS) as usize;
        let mine = self.chunks.get(chunk).unwrap_or(&Chunk::Zero);
        mine == other.chunks.get(chunk).unwrap_or(&Chunk::Zero)
    }

    /// Whether any of some clusters has a count.
    pub(super) fn any_in(&self, clusters: Range<u64>) -> bool {
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
