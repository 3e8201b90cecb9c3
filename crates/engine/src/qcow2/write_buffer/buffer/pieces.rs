//! [`Pieces`]: which bytes of a cluster the write buffer holds. Pure.

use std::ops::Range;

use vellum_io::Buffer;

/// What the memory of pieces is counted in.
pub(super) const UNIT_BYTES: usize = 4096;

/// The memory that a piece of `len_bytes` takes, with room to grow.
pub(super) fn memory_for(len_bytes: usize) -> usize {
    len_bytes.next_power_of_two().max(UNIT_BYTES)
}

/// Bytes side by side in a cluster.
pub(super) struct Piece {
    /// Offset of the first byte in the cluster.
    pub(super) start: u64,
    /// How much of `memory` is filled.
    len_bytes: u64,
    memory: Buffer,
}

impl Piece {
    fn new(start: u64, bytes: &[u8]) -> Self {
        let mut memory = Buffer::for_read(memory_for(bytes.len()));
        memory[..bytes.len()].copy_from_slice(bytes);
        Piece {
            start,
            len_bytes: bytes.len() as u64,
            memory,
        }
    }

    pub(super) fn end(&self) -> u64 {
        self.start + self.len_bytes
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[..self.len_bytes as usize]
    }

    /// The memory that it takes more once `len_bytes` are appended.
    fn growth(&self, len_bytes: u64) -> usize {
        let new_len = (self.len_bytes + len_bytes) as usize;
        match new_len > self.memory.len() {
            true => memory_for(new_len) - self.memory.len(),
            false => 0,
        }
    }

    fn append(&mut self, bytes: &[u8]) {
        let old_len = self.len_bytes as usize;
        let new_len = old_len + bytes.len();
        if new_len > self.memory.len() {
            let mut larger = Buffer::for_read(memory_for(new_len));
            larger[..old_len].copy_from_slice(self.bytes());
            self.memory = larger;
        }
        self.memory[old_len..new_len].copy_from_slice(bytes);
        self.len_bytes = new_len as u64;
    }

    /// What of the piece lies in a guest range, and its guest offset; the cluster begins
    /// at `cluster_start`.
    pub(super) fn part_in(&self, cluster_start: u64, range: &Range<u64>) -> Option<(u64, &[u8])> {
        let piece_start = cluster_start + self.start;
        let start = piece_start.max(range.start);
        let stop = (cluster_start + self.end()).min(range.end);
        let inside =
            start.checked_sub(piece_start)? as usize..stop.checked_sub(piece_start)? as usize;
        (start < stop).then(|| (start, &self.bytes()[inside]))
    }
}

/// The pieces of one cluster: in order, without overlaps.
#[derive(Default)]
pub(super) struct Pieces(Vec<Piece>);

impl Pieces {
    /// The memory that they take.
    pub(super) fn memory_bytes(&self) -> usize {
        self.0.iter().map(|piece| piece.memory.len()).sum()
    }

    /// The memory that [`Pieces::put`] takes for `len_bytes` at `start`.
    pub(super) fn growth(&self, start: u64, len_bytes: u64) -> usize {
        let end = start + len_bytes;
        let mut at = start;
        let mut index = self.0.partition_point(|piece| piece.end() <= start);
        let mut growth = 0;
        while at < end {
            let next = self.0.get(index);
            let gap_end = next.map_or(end, |piece| piece.start.clamp(at, end));
            if at < gap_end {
                let before = index.checked_sub(1).map(|before| &self.0[before]);
                growth += match before.filter(|before| before.end() == at) {
                    Some(before) => before.growth(gap_end - at),
                    None => memory_for((gap_end - at) as usize),
                };
            }
            at = next.map_or(end, Piece::end).max(gap_end);
            index += 1;
        }
        growth
    }

    /// Puts `bytes` at `start` over what is there.
    pub(super) fn put(&mut self, start: u64, bytes: &[u8]) {
        let end = start + bytes.len() as u64;
        let part = |range: Range<u64>| {
            &bytes[(range.start - start) as usize..(range.end - start) as usize]
        };
        let mut at = start;
        let mut index = self.0.partition_point(|piece| piece.end() <= start);
        // A piece that ends where the bytes begin grows.
        let grows = index > 0 && self.0[index - 1].end() == start;
        while at < end {
            let next = self
                .0
                .get(index)
                .map_or(end, |piece| piece.start.clamp(at, end));
            if at < next {
                if index > 0 && (grows || at > start) && self.0[index - 1].end() == at {
                    self.0[index - 1].append(part(at..next));
                } else {
                    self.0.insert(index, Piece::new(at, part(at..next)));
                    index += 1;
                }
                at = next;
            }
            let Some(piece) = self.0.get_mut(index).filter(|_| at < end) else {
                break;
            };
            let stop = piece.end().min(end);
            let inside = (at - piece.start) as usize..(stop - piece.start) as usize;
            piece.memory[inside].copy_from_slice(part(at..stop));
            at = stop;
            index += 1;
        }
    }

    /// Whether they cover a range of the cluster without a gap.
    pub(super) fn covers(&self, range: Range<u64>) -> bool {
        let mut at = range.start;
        for piece in &self.0 {
            if piece.start > at || at >= range.end {
                break;
            }
            at = at.max(piece.end());
        }
        at >= range.end
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, Piece> {
        self.0.iter()
    }

    /// Forgets those inside a range of the cluster; none may reach out of it.
    pub(super) fn remove(&mut self, range: &Range<u64>) {
        self.0
            .retain(|piece| piece.end() <= range.start || piece.start >= range.end);
    }
}
