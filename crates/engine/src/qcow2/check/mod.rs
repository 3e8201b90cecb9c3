//! Checks an image: counts what refers to each cluster and compares that with the
//! refcounts on disk.
//!
//! Every table is read once, in the order of the file and many at a time: the
//! refcounts first, which are kept in memory in a dense form, then the L1 tables
//! of the disk and of its snapshots, then each L2 table, however many L1 tables
//! share it. Nothing is looked up on disk for a single entry, so the work grows
//! with the metadata and not with what it says.
//!
//! Invariant: [`check`] writes nothing. Only the repair of a dirty image does.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use vellum_format::header::Purpose;
use vellum_format::{Geometry, Header};

use super::load;
use crate::{Error, ErrorKind, Result, Storage};

mod bitmaps;
mod compare;
mod copied;
mod counts;
mod repair;
mod stored;
mod tables;
mod walk;

use stored::Stored;
use walk::Walk;

pub(crate) use repair::repair_refcounts;

/// Most clusters of a file that can be checked, as in QEMU.
const MAX_CLUSTERS: u64 = i32::MAX as u64;
const EFBIG: i32 = 27;

/// How many bytes of tables are read for each byte of the file, and in any case.
/// The tables of a sound image share no bytes and are read twice at most; a hostile
/// one can lay millions of them over each other, and a check would take for ever.
const TABLE_BYTES_PER_FILE_BYTE: u64 = 4;
const MIN_TABLE_BYTES: u64 = 16 << 20;

/// What a check found, with the counts of `qemu-img check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CheckReport {
    /// Findings by which data may be damaged, now or by the next write.
    pub corruptions: u64,
    /// Clusters that are counted as used more often than they are: lost space.
    pub leaks: u64,
    /// Things that could not be checked.
    pub check_errors: u64,
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

/// How bad a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FindingKind {
    /// Counts in [`CheckReport::corruptions`].
    Corruption,
    /// Counts in [`CheckReport::leaks`].
    Leak,
    /// Counts in [`CheckReport::check_errors`].
    CheckError,
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

/// How to check.
#[derive(Clone, Default)]
pub struct CheckOptions {
    /// Called for each finding, in the order of QEMU's phases.
    pub on_finding: Option<FindingSink>,
}

impl fmt::Debug for CheckOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckOptions")
            .field("on_finding", &self.on_finding.is_some())
            .finish()
    }
}

/// Checks an image without changing it. The external data file of an image takes
/// no part: nothing in it is counted.
///
/// # Errors
/// If the header does not let the image be opened, a read fails, or a table is so
/// broken that QEMU gives up as well; what was found until then has been reported.
pub async fn check(storage: Arc<dyn Storage>, options: &CheckOptions) -> Result<CheckReport> {
    let image = Image::open(storage).await?;
    let mut findings = Findings {
        report: CheckReport::default(),
        sink: options.on_finding.clone(),
    };
    let mut outcome = Outcome::new(&image, &mut findings).await?;
    outcome.compare(&mut findings);
    if outcome.copied_flags_differ {
        outcome.stored.load_beyond(&image, &outcome.beyond).await?;
        copied::report(&image, &outcome.stored, &mut findings).await?;
    }
    findings.report.image_end_offset =
        (outcome.highest_cluster() + 1) << image.geometry.cluster_bits;
    Ok(findings.report)
}

/// The image as its header describes it.
struct Image {
    storage: Arc<dyn Storage>,
    header: Header,
    geometry: Geometry,
    len_bytes: u64,
    /// Bytes of tables that may still be read.
    table_bytes_left: Cell<u64>,
}

impl Image {
    async fn open(storage: Arc<dyn Storage>) -> Result<Image> {
        let header = load::header(&storage, Purpose::Check).await?;
        let len_bytes = storage.len_bytes()?;
        let geometry = header.geometry();
        if geometry.clusters_for(len_bytes) > MAX_CLUSTERS {
            let message = "the file has more clusters than can be checked";
            return Err(Error::new(ErrorKind::Unsupported, "check", message)
                .target(storage.name())
                .with_errno(EFBIG));
        }
        let table_bytes = len_bytes
            .saturating_mul(TABLE_BYTES_PER_FILE_BYTE)
            .max(MIN_TABLE_BYTES);
        Ok(Image {
            storage,
            header,
            geometry,
            len_bytes,
            table_bytes_left: Cell::new(table_bytes),
        })
    }

    /// Takes tables of `size_bytes` off what may still be read.
    fn spend(&self, size_bytes: u64) -> Result<()> {
        let left = self.table_bytes_left.get().checked_sub(size_bytes);
        self.table_bytes_left.set(left.ok_or_else(|| {
            let message = "the tables of the image overlap too much to be checked";
            Error::new(ErrorKind::Corrupt, "check", message).target(self.storage.name())
        })?);
        Ok(())
    }

    /// Clusters of the file, the last perhaps in part.
    fn file_clusters(&self) -> u64 {
        self.geometry.clusters_for(self.len_bytes)
    }

    fn cluster_of(&self, offset_bytes: u64) -> u64 {
        offset_bytes >> self.geometry.cluster_bits
    }
}

/// Counts and passes on what is found.
struct Findings {
    report: CheckReport,
    sink: Option<FindingSink>,
}

impl Findings {
    fn report(&mut self, kind: FindingKind, times: u64, message: impl FnOnce() -> String) {
        *match kind {
            FindingKind::Corruption => &mut self.report.corruptions,
            FindingKind::Leak => &mut self.report.leaks,
            FindingKind::CheckError => &mut self.report.check_errors,
        } += times;
        if let Some(sink) = &self.sink {
            let finding = Finding {
                kind,
                message: message(),
            };
            (0..times).for_each(|_| sink(&finding));
        }
    }

    fn corruption(&mut self, message: impl FnOnce() -> String) {
        self.report(FindingKind::Corruption, 1, message);
    }

    /// A corruption that is met `times` times because as many L1 tables lead to it.
    fn corruptions(&mut self, times: u64, message: impl FnOnce() -> String) {
        self.report(FindingKind::Corruption, times, message);
    }
}

/// Both sides of the comparison: the refcounts on disk and the references.
struct Outcome {
    stored: Stored,
    references: counts::Counts,
    /// Clusters to compare: those of the file, and one more if it is used in part.
    clusters: u64,
    /// Some copied flag of the active tables is not what the refcount on disk says.
    copied_flags_differ: bool,
    /// Clusters beyond the file that those flags speak of.
    beyond: BTreeSet<u64>,
}

impl Outcome {
    async fn new(image: &Image, findings: &mut Findings) -> Result<Outcome> {
        let size_bytes = image.header.guest_size_bytes();
        findings.report.total_clusters = image.geometry.clusters_for(size_bytes);
        let snapshots = walk::snapshots(image, findings).await?;
        let stored = Stored::load(image).await?;
        Walk::new(image, stored, findings).run(&snapshots).await
    }
}

#[cfg(test)]
mod tests;
