//! [`Counts`]: one count for each host cluster, in as little memory as they need.
//!
//! Nearly all counts of an image are 0 or 1, and large parts of a sparse file have
//! none. Counts are kept in chunks: absent while all are 0, 2 bits a count while
//! all are below 3, then 8, then 64. A 10 TiB image of 64 KiB clusters takes 40 MiB.

/// Clusters of a chunk.
pub(super) const CHUNK_CLUSTERS: u64 = 1 << 16;

const CHUNK_LEN: usize = CHUNK_CLUSTERS as usize;
/// The largest count that a chunk of 2-bit counts may hold.
const TINY_MAX: u64 = 3;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Chunk {
    Zero,
    /// Four counts a byte.
    Tiny(Box<[u8]>),
    Byte(Box<[u8]>),
    Wide(Box<[u64]>),
}

impl Chunk {
    fn get(&self, index: usize) -> u64 {
        match self {
            Chunk::Zero => 0,
            Chunk::Tiny(bytes) => u64::from(bytes[index / 4] >> (index % 4 * 2) & 3),
            Chunk::Byte(bytes) => bytes[index].into(),
            Chunk::Wide(counts) => counts[index],
        }
    }

    fn max(&self) -> u64 {
        match self {
            Chunk::Zero => 0,
            Chunk::Tiny(_) => TINY_MAX,
            Chunk::Byte(_) => u8::MAX.into(),
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
            Chunk::Byte(bytes) => bytes[index] = value as u8,
            Chunk::Wide(counts) => counts[index] = value,
        }
    }

    fn widen(&mut self) {
        *self = match self {
            Chunk::Zero => Chunk::Tiny(vec![0; CHUNK_LEN / 4].into()),
            Chunk::Tiny(_) => Chunk::Byte((0..CHUNK_LEN).map(|i| self.get(i) as u8).collect()),
            Chunk::Byte(_) | Chunk::Wide(_) => {
                Chunk::Wide((0..CHUNK_LEN).map(|i| self.get(i)).collect())
            }
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
            (CHUNK_CLUSTERS, 200),
            (CHUNK_CLUSTERS + 1, 1),
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
