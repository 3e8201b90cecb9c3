//! Counting, comparing and repairing refcounts: the order of things.
//!
//! Order of a repair: entries that are given up; barrier; refcounts, up before down
//! (see `fix_refcounts`), or all anew (see `rebuild`); copied flags; barrier.

use super::copied;
use super::findings::Findings;
use super::fix_refcounts;
use super::outcome::Outcome;
use super::rebuild;
use super::repair;
use super::report::{FindingKind, Fix};
use super::snapshots;
use super::source::Image;
use super::stored::Stored;
use super::walk::Walk;
use crate::{Error, ErrorKind, Result};

/// A rebuilt structure can be hit by what led beyond the old end of the file: then it
/// is built once more, elsewhere.
const MAX_REBUILDS: u32 = 3;

const EINVAL: i32 = 22;
const EFBIG: i32 = 27;
const EIO: i32 = 5;

/// Counts all references, and reads all refcounts.
async fn count(
    image: &mut Image,
    snapshots: &snapshots::Table,
    fix: Option<Fix>,
    findings: &mut Findings,
) -> Result<Outcome> {
    let size_bytes = image.header.guest_size_bytes();
    findings.report.total_clusters = image.geometry.clusters_for(size_bytes);
    let stored = Stored::load(image).await?;
    let walk = Walk::new(image, stored, fix, findings);
    let mut outcome = walk.run(snapshots).await?;
    count_blocks(image, &mut outcome, fix, findings).await?;
    outcome.tally.areas.sort();
    Ok(outcome)
}

/// Counts the refcount blocks, each of which must have one reference: its own.
async fn count_blocks(
    image: &mut Image,
    outcome: &mut Outcome,
    fix: Option<Fix>,
    findings: &mut Findings,
) -> Result<()> {
    let cluster_size = image.geometry.cluster_size_bytes();
    let entries: Vec<_> = outcome.stored.entries().collect();
    for (number, entry) in entries {
        let offset = entry.raw_offset();
        let cluster = image.cluster_of(offset);
        if entry.reserved_bits() != 0 {
            findings.corruption(|| {
                format!("ERROR refcount table entry {number} has reserved bits set")
            });
            outcome.must_rebuild = true;
        } else if !image.geometry.is_cluster_aligned(offset) {
            findings.corruption(|| {
                format!(
                    "ERROR refcount block {number} is not cluster aligned; refcount table \
                     entry corrupted"
                )
            });
            outcome.must_rebuild = true;
        } else if cluster >= outcome.tally.clusters {
            outside(image, outcome, (number, offset), fix, findings).await?;
        } else {
            let before = findings.report.corruptions;
            outcome
                .tally
                .add_area(image, findings, offset, cluster_size);
            // Where counts are narrow, a second reference does not show in them.
            outcome.must_rebuild |= findings.report.corruptions > before;
            let count = outcome.tally.references.get(cluster);
            if count != 1 {
                findings.corruption(|| format!("ERROR refcount block {number} refcount={count}"));
                outcome.must_rebuild = true;
            }
        }
    }
    Ok(())
}

/// Deals with a refcount block beyond the end of the file: repairing, the file is made
/// so long that it has one, if that is reasonable.
async fn outside(
    image: &mut Image,
    outcome: &mut Outcome,
    (number, offset): (u64, u64),
    fix: Option<Fix>,
    findings: &mut Findings,
) -> Result<()> {
    let what = || format!("refcount block {number} is outside image");
    if fix != Some(Fix::All) {
        findings.corruption_or_repair(false, what);
        return Ok(());
    }
    let cluster_size = image.geometry.cluster_size_bytes();
    let end = offset
        .checked_add(cluster_size)
        .filter(|&end| end <= i64::MAX as u64);
    let most = image.longest_bytes();
    let end = match end {
        None => Err(EINVAL),
        Some(end) if end > most => Err(EFBIG),
        Some(end) => Ok(end),
    };
    if end.is_ok() && !outcome.tally.is_free(image.cluster_of(offset)) {
        // What else points there reads as zeroes, and must go on doing so.
        findings.corruption_or_repair(false, what);
        outcome.must_rebuild = true;
        return Ok(());
    }
    let extended = match end {
        Err(errno) => Err(errno),
        Ok(end) => image.extend(end).await.map_err(|error| error.errno()),
    };
    if let Err(errno) = extended {
        findings.report(FindingKind::Corruption, 1, || {
            format!("Repairing {}", what())
        });
        findings.note(|| {
            let why = vellum_io::error::errno_text(errno);
            format!("ERROR could not resize image: {why}")
        });
        outcome.must_rebuild = true;
        return Ok(());
    }
    findings.corruption_or_repair(true, what);
    // The file has more clusters now whose counts matter.
    outcome.stored = Stored::load(image).await?;
    outcome.tally.grow(image.file_clusters());
    outcome
        .tally
        .add_area(image, findings, offset, cluster_size);
    Ok(())
}

/// Checks the refcounts and copied flags, and repairs what `fix` allows.
pub(super) async fn check(
    image: &mut Image,
    snapshots: &snapshots::Table,
    fix: Option<Fix>,
    findings: &mut Findings,
) -> Result<Outcome> {
    let mut outcome = count(image, snapshots, fix, findings).await?;
    repair::give_up_entries(image, &outcome, findings).await?;
    let before = findings.report;
    let any_lost = outcome.compare(image, None, findings);
    let must_rebuild = outcome.must_rebuild || any_lost;
    let highest = outcome.highest_cluster();
    match fix {
        Some(Fix::All) if must_rebuild => {
            let can_stay = !outcome.must_rebuild;
            outcome = match rebuild_all(image, snapshots, outcome, findings).await {
                Err(error) if can_stay && error.kind() == ErrorKind::NoSpace => {
                    findings.report = before;
                    fix_in_place(image, snapshots, findings).await?
                }
                rebuilt => rebuilt?,
            };
        }
        Some(Fix::Leaks) if must_rebuild => {
            return Err(cannot(
                "ERROR need to rebuild refcount structures",
                findings,
            ));
        }
        Some(fix) if findings.report.leaks + findings.report.corruptions > 0 => {
            let only_leaks = findings.report.corruptions == 0;
            findings.report = before;
            outcome.compare(image, Some(fix), findings);
            let leaks = match only_leaks {
                true => fix_refcounts::leaked_runs(&outcome),
                false => Vec::new(),
            };
            fix_refcounts::fix_refcounts(image, &mut outcome, fix).await?;
            fix_refcounts::punch_leaks(image, &leaks).await;
        }
        _ => {}
    }
    let report = findings.report;
    let sound = report.check_errors + report.corruptions + report.leaks == 0;
    let repairs = fix == Some(Fix::All) || (fix == Some(Fix::Leaks) && sound);
    if fix.is_some() && sound {
        fix_refcounts::clear_beyond(image, &outcome).await?;
    }
    if outcome.copied_flags_differ || fix.is_some() {
        outcome.load_beyond(image).await?;
        copied::check(image, &outcome, repairs, findings).await?;
    }
    findings.report.image_end_offset = image.offset_of(highest + 1);
    Ok(outcome)
}

/// Makes the refcounts anew, and frees the old ones.
async fn rebuild_all(
    image: &mut Image,
    snapshots: &snapshots::Table,
    mut outcome: Outcome,
    findings: &mut Findings,
) -> Result<Outcome> {
    let old = findings.report;
    for _ in 0..MAX_REBUILDS {
        findings.note(|| "Rebuilding refcount structure".into());
        rebuild::rebuild(image, &mut outcome).await?;
        image.reload().await?;
        findings.report = Default::default();
        outcome = count(image, snapshots, None, findings).await?;
        let report = findings.report;
        let any_lost = outcome.compare(image, Some(Fix::Leaks), findings);
        findings.report = report;
        if outcome.must_rebuild || any_lost {
            continue;
        }
        fix_refcounts::fix_refcounts(image, &mut outcome, Fix::Leaks).await?;
        let fixed = old.corruptions.saturating_sub(report.corruptions);
        findings.report.corruptions_fixed = old.corruptions_fixed + fixed;
        findings.report.leaks_fixed = old.leaks_fixed + old.leaks;
        return Ok(outcome);
    }
    Err(cannot(
        "ERROR rebuilt refcount structure is still broken",
        findings,
    ))
}

/// Corrects the refcounts in blocks that are not counted themselves, for which there is no other
/// room: nothing else refers to these blocks.
async fn fix_in_place(
    image: &mut Image,
    snapshots: &snapshots::Table,
    findings: &mut Findings,
) -> Result<Outcome> {
    findings.note(|| "No room for new refcounts, the old ones are corrected".into());
    let before = findings.report;
    findings.report = Default::default();
    let mut outcome = count(image, snapshots, None, findings).await?;
    findings.report = before;
    outcome.compare(image, Some(Fix::All), findings);
    fix_refcounts::fix_refcounts(image, &mut outcome, Fix::All).await?;
    Ok(outcome)
}

fn cannot(message: &str, findings: &mut Findings) -> Error {
    findings.note(|| message.to_owned());
    Error::from_errno("check", EIO)
        .context("check", message.to_owned())
        .with_errno(EIO)
}
