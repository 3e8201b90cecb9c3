//! [`Clusters`]: a set of the clusters of a file that a check has seen.

use std::collections::HashMap;

/// Clusters of one page of the set.
const PER_PAGE: u64 = 4096;

/// A set of numbers that takes as much memory as what is in it, not as what a damaged image says: pages of
/// half a KiB that are made when they are needed.
#[derive(Debug, Default)]
pub(crate) struct Clusters {
    pages: HashMap<u64, Box<[u64; (PER_PAGE / 64) as usize]>>,
    len: u64,
}

impl Clusters {
    /// Adds a cluster; `false` if it is there already.
    pub(crate) fn insert(&mut self, cluster: u64) -> bool {
        let page = self.pages.entry(cluster / PER_PAGE);
        let page = page.or_insert_with(|| Box::new([0; (PER_PAGE / 64) as usize]));
        let Some(word) = page.get_mut((cluster % PER_PAGE / 64) as usize) else {
            return false;
        };
        let bit = 1 << (cluster % 64);
        let is_new = *word & bit == 0;
        *word |= bit;
        self.len += u64::from(is_new);
        is_new
    }

    /// Whether a cluster is there.
    #[cfg(test)]
    pub(crate) fn contains(&self, cluster: u64) -> bool {
        let page = self.pages.get(&(cluster / PER_PAGE));
        let word = page.and_then(|page| page.get((cluster % PER_PAGE / 64) as usize));
        word.is_some_and(|word| word >> (cluster % 64) & 1 == 1)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_inserted_is_there_once() {
        let mut clusters = Clusters::default();
        for cluster in [0, 63, 64, 4095, 4096, u64::MAX] {
            assert!(!clusters.contains(cluster));
            assert!(clusters.insert(cluster));
            assert!(!clusters.insert(cluster));
            assert!(clusters.contains(cluster));
        }
        assert_eq!(clusters.len(), 6);
        assert!(!clusters.contains(1));
    }
}
