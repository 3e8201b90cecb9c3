//! [`Parts`]: what is known of the tables in one part of a file, and then in another.
//!
//! L1 tables can lead to as many places as they have entries, and snapshots bring as many
//! more: in a hostile image hundreds of millions. Those in the lowest part of the file are
//! known first; once they have been dealt with, the L1 tables are read again for the next
//! part.
//!
//! Invariant: at most [`MAX_TABLES`] tables are known by name at a time, each with all that
//! the L1 tables say of it.

use std::collections::BTreeMap;
use std::ops::Range;

/// Tables that are known at a time: of any image that somebody uses, all.
const MAX_TABLES: usize = 1 << 19;

/// What is known of the tables in one part of the file, after another.
#[derive(Debug)]
pub(in crate::qcow2) struct Parts<T> {
    known: BTreeMap<u64, T>,
    /// Where the tables begin that are known.
    part: Range<u64>,
    /// Beyond this there are none.
    end: u64,
    most: usize,
}

impl<T: Default> Parts<T> {
    /// Tables below the end of a file, none of which is known.
    pub(in crate::qcow2) fn new(file_len_bytes: u64) -> Self {
        Parts {
            known: BTreeMap::new(),
            part: 0..file_len_bytes,
            end: file_len_bytes,
            most: MAX_TABLES,
        }
    }

    /// Changes what is known of the table at `offset`, if that lies in the part that is
    /// looked at. The part becomes smaller if there are too many.
    pub(in crate::qcow2) fn note(&mut self, offset: u64, change: impl FnOnce(&mut T)) {
        if !self.part.contains(&offset) {
            return;
        }
        change(self.known.entry(offset).or_default());
        if self.known.len() > self.most
            && let Some(&middle) = self.known.keys().nth(self.most / 2)
        {
            self.known.split_off(&middle);
            self.part.end = middle;
        }
    }

    /// Goes on to the next part, whose tables are to be noted, and gives up what was
    /// known; `None` if there is no other part.
    pub(in crate::qcow2) fn next_part(&mut self) -> Option<BTreeMap<u64, T>> {
        if self.part.end >= self.end {
            return None;
        }
        self.part = self.part.end..self.end;
        Some(std::mem::take(&mut self.known))
    }

    /// The tables that are known, in the order of the file.
    pub(in crate::qcow2) fn known(&self) -> impl Iterator<Item = (u64, &T)> {
        self.known.iter().map(|(&offset, table)| (offset, table))
    }

    /// What is known of the table at `offset`; `None` if it lies in another part, or
    /// nothing leads to it.
    pub(in crate::qcow2) fn get(&self, offset: u64) -> Option<&T> {
        self.known.get(&offset)
    }

    /// As [`Parts::get`], to change it.
    pub(in crate::qcow2) fn get_mut(&mut self, offset: u64) -> Option<&mut T> {
        self.known.get_mut(&offset)
    }

    /// Whether tables that begin at `offset` are known now.
    pub(in crate::qcow2) fn covers(&self, offset: u64) -> bool {
        self.part.contains(&offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_known_in_parts_from_the_lowest_on() {
        let mut tables = Parts::<u32>::new(1 << 20);
        tables.most = 4;
        // Every table twice.
        let offsets = || (0..10).map(|number| number * 7 % 10 * 512);
        let mut found = Vec::new();
        loop {
            for offset in offsets().chain(offsets()) {
                tables.note(offset, |times| *times += 1);
            }
            assert!(tables.known.len() <= 4);
            assert!(tables.known().all(|(_, times)| *times == 2));
            found.extend(tables.known().map(|(offset, _)| offset));
            if tables.next_part().is_none() {
                break;
            }
        }
        assert_eq!(found, (0..10).map(|n| n * 512).collect::<Vec<_>>());
    }

    #[test]
    fn what_lies_beyond_the_file_is_no_table() {
        let mut tables = Parts::<u32>::new(1 << 20);
        tables.note(1 << 20, |times| *times += 1);
        tables.note(0, |times| *times += 1);
        assert_eq!(tables.known().collect::<Vec<_>>(), [(0, &1)]);
    }
}
