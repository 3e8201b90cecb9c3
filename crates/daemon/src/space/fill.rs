//! [`SpaceWatch`]: warnings before a file system with images on it is full.
//!
//! Invariants:
//! - Each threshold is told of once when it is reached, and again only after the file system was
//!   below it by [`HYSTERESIS`].

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// So many percent below a threshold it counts as not reached.
const HYSTERESIS: f64 = 2.0;

/// How full a file system is.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Fill {
    pub(super) folder: String,
    pub(super) used_percent: f64,
    pub(super) size_bytes: u64,
    pub(super) available_bytes: u64,
}

/// A file system that has reached a threshold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Warning {
    pub(crate) folder: String,
    /// The highest one that it has reached; 0: none.
    pub(crate) threshold_percent: u32,
}

/// What is watched, and what was told of it.
#[derive(Debug, Default)]
pub(crate) struct SpaceWatch {
    /// Ascending.
    pub(super) thresholds_percent: RefCell<Vec<u32>>,
    /// By folders.
    pub(super) reached: RefCell<BTreeMap<String, u32>>,
    pub(super) runs: Cell<bool>,
}

impl SpaceWatch {
    /// How it stands with the file systems that are watched.
    pub(crate) fn warnings(&self) -> Vec<Warning> {
        let reached = self.reached.borrow();
        let warning = |(folder, percent): (&String, &u32)| Warning {
            folder: folder.clone(),
            threshold_percent: *percent,
        };
        reached.iter().map(warning).collect()
    }

    /// Takes in how full file systems are; those for which another threshold counts now.
    pub(super) fn take_in(&self, fills: &[Fill]) -> Vec<(Fill, u32)> {
        let thresholds = self.thresholds_percent.borrow();
        let mut reached = self.reached.borrow_mut();
        reached.retain(|folder, _| fills.iter().any(|fill| fill.folder == *folder));
        let mut changed = Vec::new();
        for fill in fills {
            let was = reached.get(&fill.folder).copied().unwrap_or(0);
            let now = threshold(&thresholds, was, fill.used_percent);
            reached.insert(fill.folder.clone(), now);
            if now != was {
                changed.push((fill.clone(), now));
            }
        }
        changed
    }
}

/// The highest threshold that counts as reached, where `was` has counted before; 0: none.
pub(super) fn threshold(thresholds_percent: &[u32], was: u32, used_percent: f64) -> u32 {
    let counts = |percent: &&u32| {
        let bound = f64::from(**percent);
        used_percent >= bound || **percent <= was && used_percent > bound - HYSTERESIS
    };
    let counting = thresholds_percent.iter().filter(counts);
    counting.max().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_told_once_and_again_only_after_a_drop() {
        let watch = SpaceWatch::default();
        watch.thresholds_percent.replace(vec![85, 95]);
        let told = |used_percent: f64| {
            let fill = Fill {
                folder: "/a".to_owned(),
                used_percent,
                size_bytes: 100,
                available_bytes: 1,
            };
            let changed = watch.take_in(&[fill]);
            changed.first().map(|(_, percent)| *percent)
        };
        assert_eq!(told(84.9), None);
        assert_eq!(told(85.0), Some(85));
        assert_eq!(told(84.0), None);
        assert_eq!(told(86.0), None);
        assert_eq!(told(99.0), Some(95));
        assert_eq!(told(93.5), None);
        assert_eq!(told(92.9), Some(85));
        assert_eq!(told(82.9), Some(0));
        assert_eq!(told(84.9), None);
        assert_eq!(told(96.0), Some(95));
        assert_eq!(watch.warnings()[0].threshold_percent, 95);
        assert!(watch.take_in(&[]).is_empty() && watch.warnings().is_empty());
    }
}
