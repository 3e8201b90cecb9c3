//! [`L2Tables`]: which L2 tables the L1 tables lead to, so many at a time.
//!
//! An L1 table can lead to as many places as it has entries, and snapshots bring as many
//! more: a hostile image to hundreds of millions. Those in the lowest part of the file are
//! known first; once they have been dealt with, the L1 tables are read again for the next
//! part.
//!
//! Invariant: at most [`MAX_TABLES`] tables are known by name at a time, each as often as
//! it is led to. What was known before is kept in the dense form of [`Counts`].

use std::collections::BTreeMap;
use std::ops::Range;

use super::counts::Counts;
use super::source::Image;

/// Tables that are known at a time: of any image that somebody uses, all.
const MAX_TABLES: usize = 1 << 19;

/// How often an L1 table leads to an L2 table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Uses {
    /// From all L1 tables together.
    pub(super) all: u64,
    /// From the L1 table of the disk itself.
    pub(super) active: u64,
}

/// The L2 tables in one part of the file, after another.
#[derive(Debug)]
pub(super) struct L2Tables {
    known: BTreeMap<u64, Uses>,
    /// Where the tables begin that are known.
    part: Range<u64>,
    /// Beyond this there are none.
    end: u64,
    most: usize,
    /// How often the tables of earlier parts are led to, by cluster.
    before: Counts,
}

impl L2Tables {
    /// Tables below the end of a file, none of which is known.
    pub(super) fn new(file_len_bytes: u64) -> Self {
        L2Tables {
            known: BTreeMap::new(),
            part: 0..file_len_bytes,
            end: file_len_bytes,
            most: MAX_TABLES,
            before: Counts::default(),
        }
    }

    /// Notes that an L1 table leads to `offset`, if that lies in the part that is looked
    /// at. The part becomes smaller if there are too many.
    pub(super) fn add(&mut self, offset: u64, active: bool) {
        if !self.part.contains(&offset) {
            return;
        }
        let uses = self.known.entry(offset).or_default();
        uses.all += 1;
        uses.active += u64::from(active);
        if self.known.len() > self.most
            && let Some(&middle) = self.known.keys().nth(self.most / 2)
        {
            self.known.split_off(&middle);
            self.part.end = middle;
        }
    }

    /// Goes on to the next part; `false` if there is none. Its tables are to be added.
    pub(super) fn next_part(&mut self, image: &Image) -> bool {
        if self.part.end >= self.end {
            return false;
        }
        for (offset, uses) in std::mem::take(&mut self.known) {
            if image.geometry.is_cluster_aligned(offset) {
                self.before.set(image.cluster_of(offset), uses.all);
            }
        }
        self.part = self.part.end..self.end;
        true
    }

    /// The tables that are known, in the order of the file.
    pub(super) fn known(&self) -> (Vec<u64>, Vec<Uses>) {
        self.known
            .iter()
            .map(|(&offset, &uses)| (offset, uses))
            .unzip()
    }

    /// How often L1 tables lead to a table that begins with a cluster of the file.
    pub(super) fn uses_of(&self, image: &Image, table: u64) -> u64 {
        match self.part.contains(&table) {
            true => self.known.get(&table).map_or(0, |uses| uses.all),
            false => self.before.get(image.cluster_of(table)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_known_in_parts_from_the_lowest_on() {
        let mut tables = L2Tables::new(1 << 20);
        tables.most = 4;
        // Every table twice, the second time from the disk itself.
        let offsets = || (0..10).map(|number| number * 7 % 10 * 512);
        let mut found = Vec::new();
        loop {
            offsets().for_each(|offset| tables.add(offset, false));
            offsets().for_each(|offset| tables.add(offset, true));
            assert!(tables.known.len() <= 4);
            found.extend(tables.known().0);
            assert!(
                tables
                    .known
                    .values()
                    .all(|uses| *uses == Uses { all: 2, active: 1 })
            );
            if tables.part.end >= tables.end {
                break;
            }
            tables.known.clear();
            tables.part = tables.part.end..tables.end;
        }
        assert_eq!(found, (0..10).map(|n| n * 512).collect::<Vec<_>>());
    }

    #[test]
    fn what_lies_beyond_the_file_is_no_table() {
        let mut tables = L2Tables::new(1 << 20);
        tables.add(1 << 20, true);
        tables.add(0, true);
        assert_eq!(tables.known().0, [0]);
    }
}
