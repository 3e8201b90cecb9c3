//! The requests: a check, a repair, and the repair of an image that was not closed cleanly.

use std::sync::Arc;

use vellum_format::features::Compatible;

use super::findings::Findings;
use super::repair::{clear_marks, clear_write_log_mark, free_log_clusters};
use super::report::{CheckOptions, CheckReport, Finding, Fix};
use super::source::Image;
use super::{bitmaps, copied, refcounts, snapshots, stored};
use crate::qcow2::Messages;
use crate::qcow2::checksums::forget::forget as forget_checksums;
use crate::qcow2::seal::area::refuse_sealed;
use crate::{Error, ErrorKind, Result, Storage};

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
    if free_log_clusters(&image).await? {
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
    clear_write_log_mark(&image).await
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
        clear_marks(image, missing == MissingData::Accepted).await?;
    }
    Ok(report)
}

/// Puts the refcounts and copied flags of an image right that was not closed cleanly,
/// and clears the dirty bit, as it is opened.
///
/// # Errors
/// As [`repair`]. What else is wrong with the image is told through `messages`, in a few
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
