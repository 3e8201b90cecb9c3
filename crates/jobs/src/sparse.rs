//! Finding the zeroes worth leaving out of a copy.

use vellum_io::buffer::is_zero;

/// A piece of a buffer that is all zeroes, or is to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseRun {
    /// Length in bytes.
    pub len_bytes: usize,
    /// All bytes are zero, and there are enough of them.
    pub zero: bool,
}

/// The grain and the threshold of zero detection.
#[derive(Debug, Clone, Copy)]
pub struct Sparse {
    /// Zeroes count only in aligned units of this size (a power of two).
    pub unit_bytes: u64,
    /// Fewer zeroes than this between data are written as data.
    pub min_bytes: u64,
}

impl Sparse {
    /// The grain that `-S min_bytes` asks for, on a target that takes requests
    /// aligned to `alignment_bytes` best.
    pub fn new(min_bytes: u64, alignment_bytes: u64) -> Self {
        let min_unit = 1 << min_bytes.max(1).ilog2();
        Sparse {
            unit_bytes: alignment_bytes.next_power_of_two().max(min_unit),
            min_bytes,
        }
    }
}

/// Splits `bytes`, which lie at `offset_bytes` of a device, into runs.
pub fn zero_runs(bytes: &[u8], offset_bytes: u64, sparse: Sparse) -> Vec<SparseRun> {
    let mut runs: Vec<SparseRun> = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let into = (offset_bytes + at as u64) & (sparse.unit_bytes - 1);
        let unit = (sparse.unit_bytes - into).min((bytes.len() - at) as u64) as usize;
        // A unit cut short by the ends of the buffer counts for what it is: the
        // device ends there, or the next chunk decides for itself.
        let zero = is_zero(&bytes[at..at + unit]);
        match runs.last_mut() {
            Some(run) if run.zero == zero => run.len_bytes += unit,
            _ => runs.push(SparseRun {
                len_bytes: unit,
                zero,
            }),
        }
        at += unit;
    }
    drop_short_gaps(runs, sparse.min_bytes)
}

/// Turns zero runs between data that are shorter than `min_bytes` into data.
fn drop_short_gaps(runs: Vec<SparseRun>, min_bytes: u64) -> Vec<SparseRun> {
    let last = runs.len().saturating_sub(1);
    let mut merged: Vec<SparseRun> = Vec::with_capacity(runs.len());
    for (index, mut run) in runs.into_iter().enumerate() {
        let between = index != 0 && index != last;
        if run.zero && between && (run.len_bytes as u64) < min_bytes {
            run.zero = false;
        }
        match merged.last_mut() {
            Some(before) if before.zero == run.zero => before.len_bytes += run.len_bytes,
            _ => merged.push(run),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(len_bytes: usize, zero: bool) -> SparseRun {
        SparseRun { len_bytes, zero }
    }

    #[test]
    fn a_uniform_buffer_is_one_run() {
        let sparse = Sparse::new(4096, 512);
        assert_eq!(zero_runs(&[0; 8192], 0, sparse), [run(8192, true)]);
        assert_eq!(zero_runs(&[1; 8192], 512, sparse), [run(8192, false)]);
    }

    #[test]
    fn zeroes_count_in_aligned_units_only() {
        let mut bytes = [0_u8; 16384];
        bytes[5000] = 1;
        let sparse = Sparse::new(4096, 512);
        let expected = [run(4096, true), run(4096, false), run(8192, true)];
        assert_eq!(zero_runs(&bytes, 0, sparse), expected);
        let shifted = [run(3584, true), run(4096, false), run(8704, true)];
        assert_eq!(zero_runs(&bytes, 512, sparse), shifted);
    }

    #[test]
    fn short_gaps_are_written() {
        let mut bytes = [0_u8; 8192];
        bytes[0] = 1;
        bytes[2048] = 1;
        let sparse = Sparse {
            unit_bytes: 512,
            min_bytes: 4096,
        };
        assert_eq!(
            zero_runs(&bytes, 0, sparse),
            [run(2560, false), run(5632, true)]
        );
    }
}
