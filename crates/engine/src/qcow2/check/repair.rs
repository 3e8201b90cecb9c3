//! The small writes of a repair: entries that are given up, and the header's marks.

use vellum_format::features::{Autoclear, Compatible, Incompatible};
use vellum_format::header::field;
use vellum_io::Buffer;

use super::findings::Findings;
use super::outcome::Outcome;
use super::report::FindingKind;
use super::source::Image;
use crate::Result;
use crate::qcow2::header::rewrite::rewrite_header;

/// The header's marks that a repair removes.
const MARKS: [Incompatible; 2] = [Incompatible::DIRTY, Incompatible::CORRUPT];

/// Writes the L2 entries that the walk has given up, which read as zeroes already;
/// durable when it returns.
pub(super) async fn give_up_entries(
    image: &Image,
    outcome: &Outcome,
    findings: &mut Findings,
) -> Result<()> {
    for zeroed in &outcome.zeroed {
        if !outcome.may_change_table(image, zeroed.table) {
            findings.report.corruptions_fixed -= 1;
            findings.report.corruptions += 1;
            findings.report(FindingKind::CheckError, 1, || {
                "ERROR: Overlap check failed".into()
            });
            continue;
        }
        let descriptor = zeroed.entry.descriptor.to_be_bytes();
        let bitmap = zeroed.entry.bitmap.to_be_bytes();
        let size = image.geometry.l2_entry_size_bytes() as usize;
        let entry = [descriptor, bitmap].concat();
        image
            .write(zeroed.at, Buffer::copy_of(&entry[..size]))
            .await?;
    }
    match outcome.zeroed.is_empty() {
        true => Ok(()),
        false => image.flush().await,
    }
}

/// Removes the header's marks "dirty" and "corrupt", once everything is durable that
/// makes them untrue, and what other programs have noted that is out of date now.
pub(super) async fn clear_marks(image: &Image, accepts_missing_data: bool) -> Result<()> {
    image.flush().await?;
    let header = &image.header;
    if header.version < 3 {
        return Ok(());
    }
    let clean = MARKS
        .into_iter()
        .fold(header.incompatible, |bits, mark| bits.without(mark));
    if clean != header.incompatible {
        let bytes = Buffer::copy_of(&clean.bits().to_be_bytes());
        image
            .write(field::INCOMPATIBLE_FEATURES as u64, bytes)
            .await?;
    }
    let compatible = header.compatible.without(Compatible::WAS_CUT_SHORT);
    if accepts_missing_data && compatible != header.compatible {
        let bytes = Buffer::copy_of(&compatible.bits().to_be_bytes());
        image
            .write(field::COMPATIBLE_FEATURES as u64, bytes)
            .await?;
    }
    let known = Autoclear(header.autoclear.bits() & Autoclear::KNOWN.bits());
    if known != header.autoclear {
        let bytes = Buffer::copy_of(&known.bits().to_be_bytes());
        image.write(field::AUTOCLEAR_FEATURES as u64, bytes).await?;
    }
    image.flush().await
}

/// Has the header no longer vouch for the clusters of a write log that holds nothing, which are leaks
/// from then on; durable when it returns. Whether it did.
pub(super) async fn free_log_clusters(image: &Image) -> Result<bool> {
    let header = &image.header;
    let holds_writes = header.incompatible.contains(Incompatible::WRITE_LOG);
    if holds_writes || header.write_log_inside().is_none() {
        return Ok(false);
    }
    rewrite_header(&image.storage, |header| {
        header.forget_write_log();
        Ok(())
    })
    .await?;
    Ok(true)
}

/// Removes the header's mark for a write log that holds writes; durable when it returns. Whether it
/// was there.
pub(super) async fn clear_write_log_mark(image: &Image) -> Result<bool> {
    let header = &image.header;
    let cleared = header.incompatible.without(Incompatible::WRITE_LOG);
    if cleared == header.incompatible {
        return Ok(false);
    }
    let bytes = Buffer::copy_of(&cleared.bits().to_be_bytes());
    image
        .write(field::INCOMPATIBLE_FEATURES as u64, bytes)
        .await?;
    image.flush().await?;
    Ok(true)
}
