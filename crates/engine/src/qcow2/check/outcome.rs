//! What a walk through an image has found: the refcounts on disk, and the references.

use std::collections::BTreeSet;

use vellum_format::l2::L2Entry;

use super::l2_tables::L2Tables;
use super::source::Image;
use super::stored::Stored;
use super::tally::Tally;
use crate::Result;

/// An L2 entry that is to be made one without a place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Zeroed {
    /// Where its table begins.
    pub(super) table: u64,
    /// Where it lies itself.
    pub(super) at: u64,
    pub(super) entry: L2Entry,
}

/// Both sides of the comparison: the refcounts on disk and the references.
pub(super) struct Outcome {
    pub(super) stored: Stored,
    pub(super) tally: Tally,
    /// How often L1 tables lead to each L2 table.
    pub(super) l2_tables: L2Tables,
    /// Entries to be given up.
    pub(super) zeroed: Vec<Zeroed>,
    /// Some copied flag of the active tables is not what the refcount on disk says.
    pub(super) copied_flags_differ: bool,
    /// Clusters beyond the file that those flags speak of.
    pub(super) beyond: BTreeSet<u64>,
    /// The refcount blocks themselves are broken.
    pub(super) must_rebuild: bool,
}

impl Outcome {
    /// Whether an L2 table may be changed: its clusters are nothing else as well, so
    /// that no other data, right or wrong, is overwritten.
    pub(super) fn may_change_table(&self, image: &Image, table: u64) -> bool {
        let cluster = image.cluster_of(table);
        let uses = self.l2_tables.uses_of(image, table);
        image.geometry.is_cluster_aligned(table)
            && uses > 0
            && self.tally.references.get(cluster) == uses
            && !self.tally.areas.contains(cluster)
    }

    pub(super) async fn load_beyond(&mut self, image: &Image) -> Result<()> {
        self.stored.load_beyond(image, &self.beyond).await
    }
}
