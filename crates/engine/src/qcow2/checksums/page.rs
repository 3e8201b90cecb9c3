//! [`Page`]: the sums of one region in memory.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use async_lock::OnceCell;
use vellum_format::checksums::{BLOCK_BYTES, REGION_BYTES, SUMS_PER_PAGE, UNKNOWN};

/// See the module's head. Sums change only for whoever holds the range of their blocks.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) region: u64,
    /// Set once it holds what the file has.
    pub(super) loaded: OnceCell<()>,
    is_settled: AtomicBool,
    /// Some sum is, or was, known.
    has_sums: AtomicBool,
    sums: Box<[AtomicU32]>,
    /// When something changed last, by the clock of whoever settles.
    pub(super) changed_at: AtomicU64,
}

/// The bytes of the whole blocks around a range.
pub(super) fn blocks_around(range: &Range<u64>) -> Range<u64> {
    let start = range.start / BLOCK_BYTES * BLOCK_BYTES;
    let end = range.end.div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES);
    start..end
}

/// The regions that a range has bytes of.
pub(super) fn regions_of(range: &Range<u64>) -> Range<u64> {
    range.start / REGION_BYTES..range.end.div_ceil(REGION_BYTES)
}

impl Page {
    pub(super) fn new(region: u64) -> Page {
        Page {
            region,
            loaded: OnceCell::new(),
            is_settled: AtomicBool::new(false),
            has_sums: AtomicBool::new(false),
            sums: (0..SUMS_PER_PAGE)
                .map(|_| AtomicU32::new(UNKNOWN))
                .collect(),
            changed_at: AtomicU64::new(0),
        }
    }

    /// The bytes of the image's file that the region has.
    pub(super) fn bytes(&self) -> Range<u64> {
        self.region * REGION_BYTES..(self.region + 1) * REGION_BYTES
    }

    /// Takes over what the file has.
    pub(super) fn fill(&self, sums: impl Iterator<Item = u32>) {
        for (place, sum) in self.sums.iter().zip(sums) {
            place.store(sum, Ordering::Relaxed);
        }
        self.has_sums.store(true, Ordering::Release);
    }

    pub(super) fn is_settled(&self) -> bool {
        self.is_settled.load(Ordering::Acquire)
    }

    pub(super) fn set_settled(&self, is_settled: bool) {
        self.is_settled.store(is_settled, Ordering::Release);
    }

    /// Whether no sum is known.
    pub(super) fn is_blank(&self) -> bool {
        !self.has_sums.load(Ordering::Acquire)
    }

    /// The sum of the block at an offset of the image's file, in bytes.
    pub(super) fn sum(&self, block_bytes: u64) -> u32 {
        self.sums[index(block_bytes)].load(Ordering::Acquire)
    }

    /// Changes the sum of a block. The region is open.
    pub(super) fn set_sum(&self, block_bytes: u64, sum: u32) {
        debug_assert!(
            !self.is_settled(),
            "the region is opened before a sum changes"
        );
        self.sums[index(block_bytes)].store(sum, Ordering::Release);
        if sum != UNKNOWN {
            self.has_sums.store(true, Ordering::Release);
        }
    }

    /// All sums.
    pub(super) fn sums(&self) -> impl Iterator<Item = u32> {
        self.sums.iter().map(|sum| sum.load(Ordering::Acquire))
    }
}

fn index(block_bytes: u64) -> usize {
    (block_bytes / BLOCK_BYTES % SUMS_PER_PAGE) as usize
}
