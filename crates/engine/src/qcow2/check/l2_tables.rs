//! [`L2Tables`]: how often the L1 tables lead to each L2 table, for a part of the file at a
//! time ([`Parts`]). What was known before is kept in the dense form of [`Counts`].

use super::counts::Counts;
use super::parts::Parts;
use super::source::Image;

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
    tables: Parts<Uses>,
    /// How often the tables of earlier parts are led to, by cluster.
    before: Counts,
}

impl L2Tables {
    /// Tables below the end of a file, none of which is known.
    pub(super) fn new(file_len_bytes: u64) -> Self {
        L2Tables {
            tables: Parts::new(file_len_bytes),
            before: Counts::default(),
        }
    }

    /// Notes that an L1 table leads to `offset`.
    pub(super) fn add(&mut self, offset: u64, active: bool) {
        self.tables.note(offset, |uses| {
            uses.all += 1;
            uses.active += u64::from(active);
        });
    }

    /// Goes on to the next part; `false` if there is none. Its tables are to be added.
    pub(super) fn next_part(&mut self, image: &Image) -> bool {
        let Some(known) = self.tables.next_part() else {
            return false;
        };
        for (offset, uses) in known {
            if image.geometry.is_cluster_aligned(offset) {
                self.before.set(image.cluster_of(offset), uses.all);
            }
        }
        true
    }

    /// The tables that are known, in the order of the file.
    pub(super) fn known(&self) -> (Vec<u64>, Vec<Uses>) {
        let known = self.tables.known();
        known.map(|(offset, uses)| (offset, *uses)).unzip()
    }

    /// How often L1 tables lead to a table that begins with a cluster of the file.
    pub(super) fn uses_of(&self, image: &Image, table: u64) -> u64 {
        match self.tables.covers(table) {
            true => self.tables.get(table).map_or(0, |uses| uses.all),
            false => self.before.get(image.cluster_of(table)),
        }
    }
}
