//! The snapshot table: read as far as it can be, and written anew where entries had
//! to be given up or completed.
//!
//! Order of writing: clusters are counted; barrier; the new table; barrier; one write
//! to the header; barrier; the old clusters are counted no longer. A table that only
//! ends earlier stays where it is.

use std::ops::Range;

use vellum_format::header::field;
use vellum_format::snapshot::{self, SnapshotEntry};
use vellum_format::{Header, limits};

use super::findings::Findings;
use super::fix_refcounts;
use super::outcome::Outcome;
use super::place::Places;
use super::rebuild;
use super::report::{FindingKind, Fix};
use super::source::Image;
use super::stored::Stored;
use crate::qcow2::header::load;
use crate::qcow2::integrity::errors::bad_format;
use crate::{Buffer, Result};

/// What is read of a table at first, and at most: one entry more than fits the limit.
const FIRST_READ_BYTES: u64 = 65536;
const MAX_READ_BYTES: u64 = limits::MAX_SNAPSHOT_TABLE_SIZE_BYTES + (1 << 20);

/// The snapshot table, as far as a repair keeps it.
pub(super) struct Table {
    pub(super) entries: Vec<SnapshotEntry>,
    /// Where the table lies.
    pub(super) offset_bytes: u64,
    /// Bytes that the entries fill on disk.
    pub(super) size_bytes: u64,
    /// Some entry is not as it is on disk.
    is_changed: bool,
}

/// Reads the snapshot table. One that is broken ends the check, as in QEMU, unless
/// `fix` allows to give up what breaks it; that counts as corruptions.
pub(super) async fn read(
    image: &Image,
    fix: Option<Fix>,
    findings: &mut Findings,
) -> Result<Table> {
    let mut header = image.header.clone();
    let overhang = header.snapshot_count.saturating_sub(limits::MAX_SNAPSHOTS);
    let repairs = fix == Some(Fix::All);
    if repairs && overhang > 0 {
        findings.note(|| format!("Discarding {overhang} overhanging snapshots"));
        findings.report.corruptions += u64::from(overhang);
        header.snapshot_count -= overhang;
    }
    if let Err(error) = load::check_snapshot_table(&header) {
        findings.report(FindingKind::Unreadable, 1, || match overhang {
            0 => format!("ERROR {}", error.message()),
            _ => format!(
                "ERROR {}\nYou can force-remove all {overhang} overhanging snapshots with \
                 qemu-img check -r all",
                error.message()
            ),
        });
        return Err(error);
    }
    let mut table = match repairs {
        true => salvage(image, &header, findings).await?,
        false => read_strictly(image, &header, findings).await?,
    };
    for (index, entry) in table.entries.iter_mut().enumerate() {
        if header.version >= 3 && entry.disk_size_bytes.is_none() {
            let what = || format!("snapshot table entry {index} is incomplete");
            // The one who writes the table counts the repair.
            match repairs {
                true => {
                    findings.report.corruptions += 1;
                    findings.repair(|| format!("Repairing {}", what()));
                    entry.disk_size_bytes = Some(image.header.guest_size_bytes());
                    table.is_changed = true;
                }
                false => findings.corruption(|| format!("ERROR {}", what())),
            }
        }
    }
    Ok(table)
}

async fn read_strictly(image: &Image, header: &Header, findings: &mut Findings) -> Result<Table> {
    match load::snapshots(&image.storage, header).await {
        Ok(table) => Ok(Table {
            entries: table.entries,
            offset_bytes: header.snapshots_offset.0,
            size_bytes: table.size_bytes,
            is_changed: false,
        }),
        Err(error) => {
            let why = error.message();
            findings.report(FindingKind::Unreadable, 1, || {
                format!("ERROR failed to read the snapshot table: {why}")
            });
            Err(error)
        }
    }
}

/// Reads all entries that the limits leave room for, each with as much extra data.
async fn salvage(image: &Image, header: &Header, findings: &mut Findings) -> Result<Table> {
    let offset_bytes = header.snapshots_offset.0;
    let mut table = Table {
        entries: Vec::new(),
        offset_bytes,
        size_bytes: 0,
        is_changed: false,
    };
    let mut bytes = Buffer::zeroed(0);
    // What the table would take if it were written as it is kept.
    let mut kept_bytes = 0;
    while (table.entries.len() as u32) < header.snapshot_count {
        let index = table.entries.len() as u32;
        let at = table.size_bytes.next_multiple_of(8);
        let rest = bytes.get(at as usize..).unwrap_or(&[]);
        let decoded = SnapshotEntry::decode_cutting(rest, index);
        let more = (bytes.len() as u64 * 2).clamp(FIRST_READ_BYTES, MAX_READ_BYTES);
        if decoded.is_err() && more > bytes.len() as u64 {
            bytes = load::read_bytes(&image.storage, offset_bytes, more).await?;
            continue;
        }
        let dropped = |extra: u32| extra.saturating_sub(limits::MAX_SNAPSHOT_EXTRA_DATA_BYTES);
        if let Ok((_, _, extra)) = decoded
            && dropped(extra) > 0
        {
            let most = limits::MAX_SNAPSHOT_EXTRA_DATA_BYTES;
            findings.note(|| {
                format!(
                    "Discarding too much extra metadata in snapshot table entry {index} \
                     ({extra} > {most})"
                )
            });
            findings.report.corruptions += 1;
        }
        match decoded {
            Ok((entry, used, extra)) if fits(kept_bytes, used, dropped(extra)) => {
                kept_bytes += used as u64 - u64::from(dropped(extra));
                table.is_changed |= dropped(extra) > 0;
                table.size_bytes = at + used as u64;
                table.entries.push(entry);
            }
            _ => {
                let left = header.snapshot_count - index;
                findings.note(|| {
                    format!("Discarding {left} overhanging snapshots (snapshot table is too big)")
                });
                findings.report.corruptions += u64::from(left);
                break;
            }
        }
    }
    Ok(table)
}

fn fits(kept_bytes: u64, used: usize, dropped: u32) -> bool {
    let size = kept_bytes.next_multiple_of(8) + used as u64 - u64::from(dropped);
    size <= limits::MAX_SNAPSHOT_TABLE_SIZE_BYTES
}

/// Makes the snapshot table what `table` says. The refcounts have been repaired before.
pub(super) async fn rewrite(image: &mut Image, table: &Table, outcome: &mut Outcome) -> Result<()> {
    if table.is_changed {
        return write_anew(image, table, outcome).await;
    }
    let count = (table.entries.len() as u32).to_be_bytes();
    image
        .write(field::SNAPSHOT_COUNT as u64, Buffer::copy_of(&count))
        .await?;
    image.flush().await?;
    image.reload().await
}

/// Writes the entries of `table` to a new place, and gives up the old one.
async fn write_anew(image: &mut Image, table: &Table, outcome: &mut Outcome) -> Result<()> {
    let bytes =
        snapshot::encode_table(&table.entries).map_err(|error| bad_format("check", &error))?;
    let clusters = image.geometry.clusters_for(bytes.len() as u64);
    let mut place = 0;
    if clusters > 0 {
        let end = outcome.tally.clusters;
        place = Places::new(image).take(outcome, 0, clusters, |_| true)?;
        count_new(image, outcome, place.min(end)..place + clusters).await?;
        let mut whole = Buffer::zeroed((clusters * image.geometry.cluster_size_bytes()) as usize);
        whole[..bytes.len()].copy_from_slice(&bytes);
        image.write(image.offset_of(place), whole).await?;
        image.flush().await?;
    }
    let mut fields = [0; 12];
    fields[..4].copy_from_slice(&(table.entries.len() as u32).to_be_bytes());
    fields[4..].copy_from_slice(&image.offset_of(place).to_be_bytes());
    image
        .write(field::SNAPSHOT_COUNT as u64, Buffer::copy_of(&fields))
        .await?;
    image.flush().await?;
    image.reload().await?;
    if table.size_bytes > 0 {
        let first = image.cluster_of(table.offset_bytes);
        let last = image.cluster_of(table.offset_bytes + table.size_bytes - 1);
        for cluster in first..=last {
            let count = outcome.tally.references.get(cluster);
            outcome
                .tally
                .references
                .set(cluster, count.saturating_sub(1));
        }
    }
    fix_refcounts::fix_refcounts(image, outcome, Fix::Leaks).await
}

/// Raises the refcounts of new clusters, and of those that have come into the file with
/// them; where there is no block for them, all are made anew.
async fn count_new(image: &mut Image, outcome: &mut Outcome, clusters: Range<u64>) -> Result<()> {
    let is_unused = |cluster| outcome.tally.references.get(cluster) == 0;
    let has_block = |cluster| is_unused(cluster) || outcome.stored.has_block(cluster);
    if clusters.clone().all(has_block) {
        return fix_refcounts::fix_refcounts(image, outcome, Fix::All).await;
    }
    let old = outcome.stored.clusters(image);
    rebuild::rebuild(image, outcome).await?;
    image.reload().await?;
    outcome.stored = Stored::load(image).await?;
    for cluster in old {
        outcome.tally.references.set(cluster, 0);
    }
    fix_refcounts::fix_refcounts(image, outcome, Fix::Leaks).await
}
