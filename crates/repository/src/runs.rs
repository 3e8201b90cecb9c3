//! [`Runs`]: a set of numbers that takes memory for its runs only, however many numbers these have.

use std::collections::BTreeMap;

/// Numbers, by the first and last of each run; no two runs touch.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Runs(BTreeMap<u32, u32>);

impl Runs {
    /// Adds all numbers from `first` to `last`.
    pub(crate) fn add(&mut self, first: u32, last: u32) {
        let (mut first, mut last) = (first, last);
        // Those that overlap or touch become one with it.
        while let Some((&start, &end)) = self.0.range(..=last.saturating_add(1)).next_back() {
            if end.saturating_add(1) < first {
                break;
            }
            self.0.remove(&start);
            first = first.min(start);
            last = last.max(end);
        }
        self.0.insert(first, last);
    }

    pub(crate) fn contains(&self, number: u32) -> bool {
        let run = self.0.range(..=number).next_back();
        run.is_some_and(|(_, &last)| number <= last)
    }

    /// First and last of each run, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.0.iter().map(|(&first, &last)| (first, last))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_are_a_set(added in prop::collection::vec((0..60_u32, 0..8_u32), 0..20)) {
            let (mut runs, mut model) = (Runs::default(), BTreeSet::new());
            for (first, more) in added {
                runs.add(first, first + more);
                model.extend(first..=first + more);
            }
            for number in 0..80 {
                prop_assert_eq!(runs.contains(number), model.contains(&number));
            }
            let runs = runs.iter().collect::<Vec<_>>();
            prop_assert!(runs.windows(2).all(|pair| pair[0].1 + 1 < pair[1].0));
        }
    }

    #[test]
    fn the_last_number_is_one_too() {
        let mut runs = Runs::default();
        runs.add(u32::MAX, u32::MAX);
        runs.add(0, u32::MAX - 1);
        assert_eq!(runs.iter().collect::<Vec<_>>(), [(0, u32::MAX)]);
    }
}
