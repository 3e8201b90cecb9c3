//! [`Chunk`]: the counts of some clusters that lie side by side, in as little memory
//! as they need.

use std::ops::Range;

/// Clusters of a chunk.
pub(in crate::qcow2) const CHUNK_CLUSTERS: u64 = 1 << 16;

const CHUNK_LEN: usize = CHUNK_CLUSTERS as usize;

/// Absent while all counts are 0, 2 bits a count while all are at most 3, then 4, 8,
/// 16, and 64.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Chunk {
    #[default]
    Zero,
    /// Four counts a byte.
    Tiny(Box<[u8]>),
    /// Two counts a byte.
    Small(Box<[u8]>),
    Byte(Box<[u8]>),
    Short(Box<[u16]>),
    Wide(Box<[u64]>),
}

/// A byte of [`Chunk::Tiny`] whose four counts are all 1, and one whose counts are 2
/// or 3.
const ONES: u8 = 0x55;
const ABOVE_ONE: u8 = 0xaa;

/// The chunk of a cluster, and its index there.
pub(super) fn place(cluster: u64) -> (usize, usize) {
    (
        (cluster / CHUNK_CLUSTERS) as usize,
        (cluster % CHUNK_CLUSTERS) as usize,
    )
}

/// The parts of a run of clusters that lie in one chunk each: its number, and the
/// indexes there.
pub(super) fn parts(clusters: Range<u64>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut next = clusters.start;
    std::iter::from_fn(move || {
        if next >= clusters.end {
            return None;
        }
        let (chunk, index) = place(next);
        let len = (CHUNK_CLUSTERS - index as u64).min(clusters.end - next);
        next += len;
        Some((chunk, index..index + len as usize))
    })
}

impl Chunk {
    #[inline]
    pub(super) fn get(&self, index: usize) -> u64 {
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

    #[inline]
    pub(super) fn set(&mut self, index: usize, value: u64) {
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

    /// Adds `times` to a run of counts, up to `max` at most; tells `overflow` by how much
    /// each goes beyond.
    #[inline]
    pub(super) fn add(
        &mut self,
        run: Range<usize>,
        times: u64,
        max: u64,
        mut overflow: impl FnMut(usize, u64),
    ) {
        let mut next = run.start;
        while next < run.end {
            if times == 1 && next.is_multiple_of(4) && run.end - next >= 4 {
                next += self.add_ones(next..run.end, max);
                if next == run.end {
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

    /// Adds one to the first counts of a run, four at a time; says to how many.
    fn add_ones(&mut self, run: Range<usize>, max: u64) -> usize {
        if *self == Chunk::Zero {
            self.widen();
        }
        let Chunk::Tiny(bytes) = self else {
            return 0;
        };
        let mut added = 0;
        for byte in &mut bytes[run.start / 4..run.end / 4] {
            if *byte != 0 && (max < 2 || *byte & ABOVE_ONE != 0) {
                break;
            }
            *byte += ONES;
            added += 4;
        }
        added
    }

    /// Sets four counts to 1, the first of which is a multiple of four.
    pub(super) fn set_four_ones(&mut self, first: usize) {
        if *self == Chunk::Zero {
            self.widen();
        }
        match self {
            Chunk::Tiny(bytes) => bytes[first / 4] = ONES,
            _ => (first..first + 4).for_each(|index| self.set(index, 1)),
        }
    }

    /// Whether all counts of a run are 1.
    pub(super) fn are_ones(&self, run: Range<usize>) -> bool {
        let Chunk::Tiny(bytes) = self else {
            return run.into_iter().all(|index| self.get(index) == 1);
        };
        let whole = run.start.next_multiple_of(4)..run.end / 4 * 4;
        if whole.start >= whole.end {
            return run.into_iter().all(|index| self.get(index) == 1);
        }
        let fours = &bytes[whole.start / 4..whole.end / 4];
        fours.iter().all(|&byte| byte == ONES)
            && (run.start..whole.start).all(|index| self.get(index) == 1)
            && (whole.end..run.end).all(|index| self.get(index) == 1)
    }

    /// Whether none of the counts of a run is 1.
    pub(super) fn has_no_one(&self, run: Range<usize>) -> bool {
        match self {
            Chunk::Zero => true,
            _ => run.into_iter().all(|index| self.get(index) != 1),
        }
    }
}
