//! Which leaves were found to agree with the seal since the image was opened.
//!
//! Readers of all lanes set bits without a lock, which `vellum_io::bits` does not allow.
//!
//! Invariant: a bit is set only after the leaf's content was compared.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_format::seal::LEAF_BYTES;

const WORDS: usize = 512;
/// Leaves of a page: 128 MiB of the disk.
const PAGE_LEAVES: u64 = WORDS as u64 * 64;
/// Most pages, which take 64 MiB and stand for 2 TiB; leaves beyond are compared each time.
const MOST_PAGES: u64 = 16384;

type Page = Box<[AtomicU64]>;

/// A bit for each leaf, in pages that are made when they are needed.
#[derive(Debug)]
pub(crate) struct SeenLeaves(Box<[OnceLock<Page>]>);

impl SeenLeaves {
    /// None of those of a disk of `size_bytes`.
    pub(super) fn new(size_bytes: u64) -> SeenLeaves {
        let pages = size_bytes.div_ceil(LEAF_BYTES).div_ceil(PAGE_LEAVES);
        let pages = pages.min(MOST_PAGES) as usize;
        SeenLeaves(std::iter::repeat_with(OnceLock::new).take(pages).collect())
    }

    /// Whether a leaf was seen.
    #[inline]
    pub(super) fn contains(&self, leaf: u64) -> bool {
        let page = self.0.get((leaf / PAGE_LEAVES) as usize);
        let Some(page) = page.and_then(OnceLock::get) else {
            return false;
        };
        let inside = leaf % PAGE_LEAVES;
        let word = page[(inside / 64) as usize].load(Ordering::Relaxed);
        word >> (inside % 64) & 1 != 0
    }

    /// Whether all leaves of a range were.
    #[inline]
    pub(super) fn contains_all(&self, leaves: std::ops::Range<u64>) -> bool {
        leaves.clone().all(|leaf| self.contains(leaf))
    }

    /// Notes that a leaf was.
    pub(super) fn insert(&self, leaf: u64) {
        let Some(page) = self.0.get((leaf / PAGE_LEAVES) as usize) else {
            return;
        };
        let page = page.get_or_init(|| {
            let words = std::iter::repeat_with(AtomicU64::default);
            words.take(WORDS).collect()
        });
        let inside = leaf % PAGE_LEAVES;
        page[(inside / 64) as usize].fetch_or(1 << (inside % 64), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_is_known_up_to_the_limit() {
        let seen = SeenLeaves::new(1 << 44);
        let last = MOST_PAGES * PAGE_LEAVES - 1;
        for leaf in [0, 63, 64, PAGE_LEAVES, last] {
            assert!(!seen.contains(leaf));
            seen.insert(leaf);
            assert!(seen.contains(leaf));
        }
        seen.insert(last + 1);
        assert!(!seen.contains(last + 1));
        assert!(seen.contains_all(63..65));
        assert!(!seen.contains_all(62..65));
    }
}
