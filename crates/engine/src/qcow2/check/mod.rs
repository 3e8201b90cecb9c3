//! Checks an image, and repairs it: counts what refers to each cluster and compares
//! that with the refcounts on disk.
//!
//! Every table is read once, in the order of the file and many at a time: the
//! refcounts first, which are kept in memory in a dense form, then the L1 tables
//! of the disk and of its snapshots, then each L2 table, however many L1 tables
//! share it. Nothing is looked up on disk for a single entry, so the work grows
//! with the metadata and not with what it says.
//!
//! Messages, counts and the order of both are QEMU's.
//!
//! | file | what it does |
//! | --- | --- |
//! | `walk` | follows everything that the header leads to, but for the refcount blocks, and counts references |
//! | `team` | counts the references of L2 tables on all cores; what is wrong is left to `walk` |
//! | `tally`, `counts`, `chunk` | the references to clusters; counts in as little memory as they need |
//! | `l2_tables`, `parts` | which L2 tables there are, for a part of the file at a time, so that memory is bounded |
//! | `areas` | where metadata lies that is no L2 table |
//! | `source`, `tables`, `stored` | the image as its header describes it; many tables read at once; the refcounts on disk |
//! | `compare`, `findings`, `outcome` | compares counts and references; counts and reports what is found |
//! | `refcounts` | the order of a check and of a repair |
//! | `fix_refcounts`, `rebuild` | repair of single refcounts in their blocks, or of all of them in new places |
//! | `place`, `beyond` | where new metadata may be put; what points behind the end of the file |
//! | `repair` | the small writes of a repair: entries that are given up, the header's marks |
//! | `cut_short` | what of the disk lies beyond the end of a file that was cut off |
//! | `copied`, `snapshots`, `bitmaps` | repair of the copied flags, of the snapshot table, of bitmaps |
//!
//! Invariants:
//! - [`check`] writes nothing.
//! - Memory is bounded by the clusters of the file, a few bits each (with wide refcounts up to
//!   8 bytes), whatever its tables say.
//! - A repair writes new metadata only where nothing lies by the references and by the refcounts,
//!   or behind the end where nothing points; it raises counts before it lowers any, and changes a
//!   table only if nothing else lies in its clusters. What read as zeroes goes on doing so. Cut off
//!   anywhere, it leaves an image that the next repair puts right.

use std::fmt;
use std::sync::Arc;

use vellum_format::features::{Compatible, Incompatible};

use crate::qcow2::Messages;
use crate::qcow2::checksums::forget::forget as forget_checksums;
use crate::qcow2::seal::area::refuse_sealed;
use crate::{Error, ErrorKind, Result, Storage};

mod areas;
mod beyond;
mod bitmaps;
mod chunk;
mod compare;
mod copied;
pub(super) mod counts;
pub(super) mod cut_short;
mod findings;
mod fix_refcounts;
mod l2_tables;
mod outcome;
pub(in crate::qcow2) mod parts;
mod place;
mod rebuild;
mod refcounts;
mod repair;
mod snapshots;
pub(super) mod source;
pub(super) mod stored;
pub(super) mod tables;
mod tally;
mod team;
mod walk;

pub use cut_short::{CutShort, cut_short};
use findings::Findings;
use source::Image;

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

/// Checks an image without changing it. The external data file of an image takes
/// no part: nothing in it is counted.
///
/// # Errors
/// If the header does not let the image be opened, a read fails, or a table is so
/// broken that QEMU gives up as well; what was found until then has been reported.
pub async fn check(storage: Arc<dyn Storage>, options: &CheckOptions) -> Result<CheckReport> {
    let mut image = Image::open(storage, options.on_progress.clone()).await?;
    let findings = Findings::new(options.on_finding.clone());
    run(&mut image, None, MissingData::Reported, findings).await
}

/// Checks an image and repairs what `fix` allows. The image must not be open
/// elsewhere, and may be marked dirty or corrupt; both marks are removed when nothing
/// is wrong any more. [`Fix::All`] gives up persistent bitmaps if anything that leads to
/// one of them is broken.
///
/// The report is about the state before; [`check`] again to see what is left. If
/// the power fails meanwhile, the image has leaked clusters in addition at worst, and
/// can be repaired again.
///
/// # Errors
/// As [`check`]; if a write fails; [`ErrorKind::ReadOnly`] if the image is sealed;
/// [`ErrorKind::Corrupt`] if the refcounts must be
/// made anew and `fix` does not allow it; [`ErrorKind::NoSpace`] if there is no room
/// for that. The image is no worse then.
pub async fn repair(
    storage: Arc<dyn Storage>,
    fix: Fix,
    options: &CheckOptions,
) -> Result<CheckReport> {
    // Rule 13: a cluster that looks free may be in use by a mapping that a killed process left on disk.
    storage.flush().await?;
    let mut image = Image::open(storage, options.on_progress.clone()).await?;
    refuse_sealed(&image.storage, &image.header)?;
    // Rule C3: a repair goes past them.
    if forget_checksums(&image.storage).await? {
        image = Image::open(image.storage, options.on_progress.clone()).await?;
    }
    if repair::free_log_clusters(&image).await? {
        image.reload().await?;
    }
    let mut findings = Findings::new(options.on_finding.clone());
    if fix == Fix::All {
        bitmaps::give_up_broken(&mut image, &mut findings).await?;
    }
    let missing = match fix {
        Fix::All => MissingData::Accepted,
        Fix::Leaks => MissingData::Reported,
    };
    run(&mut image, Some(fix), missing, findings).await
}

/// Gives up the writes that a write log holds and the image lacks, because the log is lost or
/// damaged: the image is what it would be had they not been made, and the log does not count any
/// more. Says whether there was such a log. The image must not be open elsewhere.
///
/// # Errors
/// If the header does not let the image be opened, or a write fails.
pub async fn drop_write_log(storage: Arc<dyn Storage>) -> Result<bool> {
    forget_checksums(&storage).await?;
    let image = Image::open(storage, None).await?;
    repair::clear_write_log_mark(&image).await
}

/// What a check does about the mark of a file that was cut short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MissingData {
    /// Counts it as a corruption.
    Reported,
    /// Accepts the zeroes and clears the mark.
    Accepted,
    /// Leaves the mark alone: nobody asked for the zeroes to be accepted.
    Kept,
}

async fn run(
    image: &mut Image,
    fix: Option<Fix>,
    missing: MissingData,
    mut findings: Findings,
) -> Result<CheckReport> {
    let snapshots = snapshots::read(image, fix, &mut findings).await?;
    // Counted apart: they are repaired after everything else.
    let in_table = findings.take_corruptions();
    let was_cut = image.header.compatible.contains(Compatible::WAS_CUT_SHORT);
    if was_cut && missing != MissingData::Kept {
        let accepts = missing == MissingData::Accepted;
        let message = "the file was cut short: data of the disk is lost and reads as zeroes";
        findings.corruption_or_repair(accepts, || message.to_owned());
    }
    let mut outcome = refcounts::check(image, &snapshots, fix, &mut findings).await?;
    if fix == Some(Fix::All) && in_table > 0 {
        snapshots::rewrite(image, &snapshots, &mut outcome).await?;
        if outcome.tally.has_grown() {
            // What comes into the file with the new table is counted since then.
            outcome.stored = stored::Stored::load(image).await?;
            copied::check(image, &outcome, true, &mut Findings::new(None)).await?;
        }
        findings.report.corruptions_fixed += in_table;
    } else {
        findings.report.corruptions += in_table;
    }
    let report = findings.report;
    if fix.is_some() && report.check_errors == 0 && report.corruptions == 0 {
        repair::clear_marks(image, missing == MissingData::Accepted).await?;
    }
    Ok(report)
}

/// Puts the refcounts and copied flags of an image right that was not closed cleanly,
/// and clears the dirty bit, as it is opened.
///
/// # Errors
/// As [`repair()`]. What else is wrong with the image is told through `messages`, in a few
/// lines and a sum unless these want all, and left to its use to meet, as in QEMU.
pub(crate) async fn repair_dirty(storage: Arc<dyn Storage>, messages: &Messages) -> Result<()> {
    let told = Arc::new(messages.of_repair());
    let sink = told.clone();
    let on_finding = move |finding: &Finding| sink.say(&finding.message);
    let findings = Findings::new(Some(Arc::new(on_finding)));
    let could_not = |error: Error| error.context("open", "Could not repair dirty image");
    let repaired = async {
        // Rule 13, as in [`repair`].
        storage.flush().await?;
        let mut image = Image::open(storage.clone(), None).await?;
        run(&mut image, Some(Fix::All), MissingData::Kept, findings).await
    };
    let repaired = repaired.await;
    told.say_sum(repaired.as_ref().ok());
    let report = repaired.map_err(could_not)?;
    if report.check_errors > 0 {
        let error = Error::new(ErrorKind::Corrupt, "open", "Could not repair dirty image");
        return Err(error.target(storage.name()).with_errno(EIO));
    }
    Ok(())
}

const EIO: i32 = 5;

/// The header's marks that a repair removes.
const MARKS: [Incompatible; 2] = [Incompatible::DIRTY, Incompatible::CORRUPT];

#[cfg(test)]
mod tests;
