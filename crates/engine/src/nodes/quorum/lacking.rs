//! Which children lack changes that were made without them, and are not durable yet.

/// Sets of children, each with the last change that exactly these lack.
#[derive(Debug, Default)]
pub(super) struct Lacking {
    /// How many such changes there have been.
    changes: u64,
    sets: Vec<(Vec<usize>, u64)>,
}

impl Lacking {
    /// A change was made without some children.
    pub(super) fn note(&mut self, children: Vec<usize>) {
        self.changes += 1;
        match self.sets.iter_mut().find(|(set, _)| *set == children) {
            Some((_, last)) => *last = self.changes,
            None => self.sets.push((children, self.changes)),
        }
    }

    /// The changes that there have been by now.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Whether each change is with so many of the children that were flushed.
    pub(super) fn reached(&self, flushed: &[usize], threshold: usize) -> bool {
        let has = |set: &Vec<usize>| flushed.iter().filter(|child| !set.contains(child)).count();
        flushed.len() >= threshold && self.sets.iter().all(|(set, _)| has(set) >= threshold)
    }

    /// Changes up to one are durable.
    pub(super) fn flushed(&mut self, changes: u64) {
        self.sets.retain(|(_, last)| *last > changes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_counts_for_a_change_only_the_children_that_have_it() {
        let mut lacking = Lacking::default();
        assert!(lacking.reached(&[1, 2], 2));
        assert!(!lacking.reached(&[2], 2));
        lacking.note(vec![0]);
        lacking.note(vec![1]);
        assert!(lacking.reached(&[0, 1, 2], 2), "each is on two of them");
        assert!(!lacking.reached(&[0, 2], 2), "the first is on one");
        let before = lacking.changes();
        lacking.note(vec![1]);
        lacking.flushed(before);
        assert!(lacking.reached(&[1, 2], 1) && !lacking.reached(&[1, 2], 2));
        lacking.flushed(lacking.changes());
        assert!(lacking.reached(&[1, 2], 2));
    }
}
