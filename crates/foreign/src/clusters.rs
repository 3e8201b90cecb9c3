//! [`Clusters`]: a set of the clusters of a file that are in use.

use std::collections::HashMap;

/// A set of numbers that takes as much memory as what is in it, not as what a damaged image says: some tens
/// of bytes for each 64 numbers of which one is there.
#[derive(Debug, Default)]
pub(crate) struct Clusters {
    words: HashMap<u64, u64>,
    len: u64,
}

impl Clusters {
    /// Adds a cluster; `false` if it is there already.
    pub(crate) fn insert(&mut self, cluster: u64) -> bool {
        let word = self.words.entry(cluster / 64).or_default();
        let bit = 1 << (cluster % 64);
        let is_new = *word & bit == 0;
        *word |= bit;
        self.len += u64::from(is_new);
        is_new
    }

    /// Whether a cluster is there.
    pub(crate) fn contains(&self, cluster: u64) -> bool {
        let word = self.words.get(&(cluster / 64));
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
