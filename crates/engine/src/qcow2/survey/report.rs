//! How to survey, and what a survey finds.

use std::fmt;

use super::cells::HostCell;
use crate::qcow2::check::ProgressSink;

vellum_io::with_setters! {
    /// How to survey.
    #[derive(Clone, Default)]
    pub struct SurveyOptions {
        /// Parts into which the file is divided for [`Survey::host`], at most.
        pub cells: usize,
        /// Called while tables are read.
        pub on_progress: Option<ProgressSink>,
    }
}

impl fmt::Debug for SurveyOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SurveyOptions")
            .field("cells", &self.cells)
            .field("on_progress", &self.on_progress.is_some())
            .finish()
    }
}

/// What the image's active mapping consists of, in guest clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mapped {
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// With a host cluster of their own that holds data, at least in part.
    pub data_clusters: u64,
    /// Of these, with subclusters that hold no data.
    pub partial_clusters: u64,
    /// Subclusters that hold data.
    pub allocated_subclusters: u64,
    /// Subclusters that read as zeroes without holding any.
    pub zero_subclusters: u64,
    /// That are compressed.
    pub compressed_clusters: u64,
    /// Bytes of these in the file, in sectors of 512 bytes.
    pub compressed_bytes: u64,
    /// That read as zeroes by their entry.
    pub zero_clusters: u64,
    /// Of these, with a host cluster that is kept for later.
    pub zero_with_place_clusters: u64,
    /// Data clusters whose host cluster a snapshot uses too.
    pub shared_clusters: u64,
    /// Runs in which each data cluster follows the one before it in the file.
    pub extents: u64,
    /// Entries that mean nothing.
    pub invalid_clusters: u64,
}

/// Bytes of metadata, in whole clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MetadataBytes {
    /// The first cluster.
    pub header: u64,
    /// The active L1 table.
    pub l1: u64,
    /// The L2 tables that the disk uses.
    pub l2: u64,
    /// The refcount table.
    pub refcount_table: u64,
    /// The refcount blocks.
    pub refcount_blocks: u64,
    /// The snapshot table.
    pub snapshot_table: u64,
    /// The L1 tables of snapshots.
    pub snapshot_l1: u64,
    /// The L2 tables that only snapshots use.
    pub snapshot_l2: u64,
    /// Directory, tables and bits of persistent bitmaps.
    pub bitmaps: u64,
    /// The LUKS header with its key material.
    pub encryption: u64,
    /// A write log in the image.
    pub write_log: u64,
}

impl MetadataBytes {
    /// Everything together.
    pub fn total(&self) -> u64 {
        self.header
            + self.l1
            + self.l2
            + self.refcount_table
            + self.refcount_blocks
            + self.snapshot_table
            + self.snapshot_l1
            + self.snapshot_l2
            + self.bitmaps
            + self.encryption
            + self.write_log
    }
}

/// What an internal snapshot takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotSpace {
    /// Bytes that it refers to, shared or not; its tables are not counted.
    pub total_bytes: u64,
    /// Bytes that nothing else refers to, with its tables: deleting it gives them back.
    /// With compressed clusters it may be a little more.
    pub own_bytes: u64,
}

/// Memory in which an L2 cache holds everything that maps data.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CacheNeed {
    /// Bytes for every entry of the disk, whether or not it maps anything: what
    /// `l2-cache-size` has to be for the image to be covered whatever is written.
    pub whole_disk_bytes: u64,
    /// For each entry size (`l2-cache-entry-size`), in ascending order, the bytes that
    /// entries of that size take which map anything now.
    pub by_entry_size: Vec<(u64, u64)>,
    /// What Vellum takes for the same, packed, with all bookkeeping.
    pub packed_bytes: u64,
}

/// What an image consists of.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Survey {
    /// Length of the file.
    pub file_length_bytes: u64,
    /// The active mapping.
    pub disk: Mapped,
    /// Metadata by kind.
    pub metadata: MetadataBytes,
    /// The snapshots, in the order of their table.
    pub snapshots: Vec<SnapshotSpace>,
    /// Bytes of guest data that only snapshots refer to.
    pub only_in_snapshots_bytes: u64,
    /// Bytes of the file's clusters that have a refcount.
    pub counted_bytes: u64,
    /// What an L2 cache needs.
    pub cache: CacheNeed,
    /// What lies where in the file: equal parts of [`Survey::host_cell_bytes`].
    pub host: Vec<HostCell>,
    /// Bytes of a part; the last may be shorter.
    pub host_cell_bytes: u64,
}

impl Survey {
    /// Bytes that are there for snapshots only, with all their tables: deleting every
    /// snapshot gives them back.
    pub fn held_by_snapshots_bytes(&self) -> u64 {
        let metadata = &self.metadata;
        self.only_in_snapshots_bytes
            + metadata.snapshot_table
            + metadata.snapshot_l1
            + metadata.snapshot_l2
    }
}
