//! [`FreeIndex`]: the free host clusters that are known, as extents in order.
//!
//! The index is a hint: refcounts decide. Whoever takes clusters from it looks at
//! their counts again, so an extent that is out of date does no harm.
//!
//! Invariants: extents are not empty, do not touch each other, and are never more
//! than the limit; what does not fit is forgotten from the top, and reported.

use std::collections::BTreeMap;
use std::ops::Range;

/// Free extents, by cluster index.
#[derive(Debug)]
pub(crate) struct FreeIndex {
    /// Ends by starts.
    extents: BTreeMap<u64, u64>,
    most_extents: usize,
    /// Clusters in all extents.
    clusters: u64,
}

impl FreeIndex {
    /// An empty index of at most `most_extents` extents.
    pub(crate) fn new(most_extents: usize) -> Self {
        FreeIndex {
            extents: BTreeMap::new(),
            most_extents: most_extents.max(1),
            clusters: 0,
        }
    }

    /// How many clusters are in the index.
    pub(crate) fn clusters(&self) -> u64 {
        self.clusters
    }

    /// Takes all extents out.
    pub(crate) fn drain(&mut self) -> Vec<Range<u64>> {
        self.clusters = 0;
        let extents = std::mem::take(&mut self.extents);
        extents.into_iter().map(|(start, end)| start..end).collect()
    }

    /// Whether there is little room for more extents.
    pub(crate) fn is_crowded(&self) -> bool {
        2 * self.extents.len() > self.most_extents
    }

    /// The lowest extent that shares clusters with these.
    pub(crate) fn first_in(&self, clusters: &Range<u64>) -> Option<Range<u64>> {
        let before = self.extents.range(..clusters.start).next_back();
        let inside = self.extents.range(clusters.clone()).next();
        let extents = before.into_iter().chain(inside);
        extents
            .map(|(&start, &end)| start..end)
            .find(|extent| extent.end > clusters.start && !clusters.is_empty())
    }

    /// All extents, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<u64>> {
        self.extents.iter().map(|(&start, &end)| start..end)
    }

    /// The lowest extent.
    pub(crate) fn first(&self) -> Option<Range<u64>> {
        self.extents
            .first_key_value()
            .map(|(&start, &end)| start..end)
    }

    /// Where the highest extent ends.
    pub(crate) fn end(&self) -> Option<u64> {
        self.extents.last_key_value().map(|(_, &end)| end)
    }

    /// The lowest extent of at least `clusters`: what is wanted in one piece should lie in one.
    /// Shorter extents are passed over as long as they hold `most_passed` clusters at most, even
    /// if there is no longer one; with more of them the lowest extent is returned.
    pub(crate) fn first_for(&self, clusters: u64, most_passed: u64) -> Option<Range<u64>> {
        let most_passed = most_passed.min(MOST_PASSED_CLUSTERS);
        let mut passed = 0;
        for (&start, &end) in &self.extents {
            if end - start >= clusters {
                return Some(start..end);
            }
            passed += end - start;
            if passed > most_passed {
                return self.first();
            }
        }
        None
    }

    /// Enters free clusters; returns an extent that had to be forgotten for it.
    #[must_use]
    pub(crate) fn insert(&mut self, clusters: Range<u64>) -> Option<Range<u64>> {
        if clusters.is_empty() {
            return None;
        }
        let Range { mut start, mut end } = clusters;
        // Every extent that overlaps or touches becomes a part of the new one.
        while let Some((&at, &until)) = self.extents.range(..=end).next_back() {
            if until < start {
                break;
            }
            self.extents.remove(&at);
            self.clusters -= until - at;
            start = start.min(at);
            end = end.max(until);
        }
        self.extents.insert(start, end);
        self.clusters += end - start;
        if self.extents.len() <= self.most_extents {
            return None;
        }
        let (start, end) = self.extents.pop_last()?;
        self.clusters -= end - start;
        Some(start..end)
    }

    /// Takes clusters out, those of them that are there.
    pub(crate) fn remove(&mut self, clusters: Range<u64>) {
        if clusters.is_empty() {
            return;
        }
        while let Some((&at, &until)) = self.extents.range(..clusters.end).next_back() {
            if until <= clusters.start {
                return;
            }
            self.extents.remove(&at);
            self.clusters -= until - at;
            for rest in [clusters.end..until, at..clusters.start] {
                if !rest.is_empty() {
                    self.clusters += rest.end - rest.start;
                    self.extents.insert(rest.start, rest.end);
                }
            }
        }
    }
}

/// Free clusters in extents too short for a request that are passed over at most.
const MOST_PASSED_CLUSTERS: u64 = 64;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    impl FreeIndex {
        fn all(&self) -> BTreeSet<u64> {
            self.extents.iter().flat_map(|(&a, &b)| a..b).collect()
        }
    }

    #[test]
    fn neighbours_merge() {
        let mut index = FreeIndex::new(10);
        for clusters in [5..7, 9..10, 7..9, 0..1] {
            assert_eq!(index.insert(clusters), None);
        }
        assert_eq!(index.extents, BTreeMap::from([(0, 1), (5, 10)]));
        index.remove(6..8);
        assert_eq!(index.extents, BTreeMap::from([(0, 1), (5, 6), (8, 10)]));
    }

    #[test]
    fn a_few_short_extents_are_passed_over() {
        let mut index = FreeIndex::new(100);
        for clusters in [1..2, 4..6, 9..12] {
            assert_eq!(index.insert(clusters), None);
        }
        assert_eq!(index.first_for(1, 64), Some(1..2));
        assert_eq!(index.first_for(2, 64), Some(4..6));
        assert_eq!(index.first_for(4, 64), None);
        assert_eq!(index.first_for(4, 5), Some(1..2));
        assert_eq!(index.insert(20..20 + MOST_PASSED_CLUSTERS), None);
        assert_eq!(index.first_for(MOST_PASSED_CLUSTERS + 1, 64), Some(1..2));
    }

    #[test]
    fn the_highest_extent_is_forgotten() {
        let mut index = FreeIndex::new(2);
        assert_eq!(index.insert(8..9), None);
        assert_eq!(index.insert(4..5), None);
        assert_eq!(index.insert(0..1), Some(8..9));
        assert_eq!(index.first(), Some(0..1));
    }

    proptest! {
        #[test]
        fn behaves_like_a_set(
            changes in prop::collection::vec((any::<bool>(), 0u64..60, 0u64..12), 0..80),
            most in 1usize..12,
        ) {
            let mut index = FreeIndex::new(most);
            let mut model = BTreeSet::new();
            for (insert, start, len) in changes {
                let clusters = start..start + len;
                if insert {
                    model.extend(clusters.clone());
                    if let Some(forgotten) = index.insert(clusters.clone()) {
                        prop_assert!(!forgotten.is_empty());
                        for cluster in forgotten {
                            prop_assert!(model.remove(&cluster));
                        }
                    }
                } else {
                    for cluster in clusters.clone() {
                        model.remove(&cluster);
                    }
                    index.remove(clusters.clone());
                    // A removal from the middle makes two extents of one: the limit
                    // is kept by the next insertion.
                    prop_assert!(index.extents.len() <= most + 1 + model.len());
                }
                prop_assert_eq!(index.all(), model.clone());
                prop_assert_eq!(index.clusters(), model.len() as u64);
                let shared = index.first_in(&clusters);
                let first = model.range(clusters).next();
                prop_assert_eq!(shared.is_some(), first.is_some());
                prop_assert!(first.is_none_or(|first| shared.unwrap().contains(first)));
                prop_assert_eq!(index.first().map(|e| e.start), model.first().copied());
                let ends: Vec<_> = index.extents.iter().collect();
                prop_assert!(ends.windows(2).all(|pair| pair[0].1 < pair[1].0));
            }
        }
    }
}
