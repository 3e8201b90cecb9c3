//! How to check, and what a check reports.

use std::fmt;
use std::sync::Arc;

/// What a check found, with the counts of `qemu-img check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CheckReport {
    /// Findings by which data may be damaged, now or by the next write.
    pub corruptions: u64,
    /// Clusters that are counted as used more often than they are: lost space.
    pub leaks: u64,
    /// Things that could not be checked.
    pub check_errors: u64,
    /// Corruptions that are repaired, and not among the others any more.
    pub corruptions_fixed: u64,
    /// Leaks that are repaired, and not among the others any more.
    pub leaks_fixed: u64,
    /// Where the last used cluster ends.
    pub image_end_offset: u64,
    /// Clusters of the virtual disk.
    pub total_clusters: u64,
    /// Guest clusters that have a place in the image.
    pub allocated_clusters: u64,
    /// Allocated clusters that do not follow the one before them.
    pub fragmented_clusters: u64,
    /// Allocated clusters that are compressed.
    pub compressed_clusters: u64,
}

/// What a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FindingKind {
    /// Counts in [`CheckReport::corruptions`].
    Corruption,
    /// Counts in [`CheckReport::leaks`].
    Leak,
    /// Counts in [`CheckReport::check_errors`].
    CheckError,
    /// A table cannot be read, which ends the check; counts in
    /// [`CheckReport::check_errors`]. Printed after the program's name.
    Unreadable,
    /// A corruption or leak that is repaired now.
    Repair,
    /// What a repair is about to do; counts nowhere.
    Note,
}

/// One thing that is wrong, in QEMU's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub kind: FindingKind,
    /// The line that `qemu-img check` prints (now and then two).
    pub message: String,
}

/// Receives findings as they are made.
pub type FindingSink = Arc<dyn Fn(&Finding) + Send + Sync>;

/// Is told how many bytes of tables have been read, and of how many.
pub type ProgressSink = Arc<dyn Fn(u64, u64) + Send + Sync>;

vellum_io::with_setters! {
    /// How to check.
    #[derive(Clone, Default)]
    pub struct CheckOptions {
        /// Called for each finding, in the order of QEMU's phases.
        pub on_finding: Option<FindingSink>,
        /// Called while tables are read. The second number may grow, as tables are found.
        pub on_progress: Option<ProgressSink>,
    }
}

impl fmt::Debug for CheckOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckOptions")
            .field("on_finding", &self.on_finding.is_some())
            .field("on_progress", &self.on_progress.is_some())
            .finish()
    }
}

/// What a repair may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fix {
    /// Only counts that are too high, and copied flags once nothing else is wrong:
    /// `-r leaks`.
    Leaks,
    /// Everything that can be put right: `-r all`.
    All,
}
