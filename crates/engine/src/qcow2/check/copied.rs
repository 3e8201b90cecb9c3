//! Reports, or puts right, the copied flags of the active tables that are not what
//! the refcounts on disk say. Runs after the refcounts have been repaired.

use std::ops::Range;

use vellum_format::l1::L1_ENTRY_SIZE_BYTES;
use vellum_format::{L1Entry, L2Entry};

use super::findings::Findings;
use super::outcome::Outcome;
use super::source::Image;
use super::tables;
use super::walk::has_cluster;
use crate::{Buffer, Result};

/// Tables whose changes are kept in memory until they are written, in bytes.
const GROUP_BYTES: u64 = 16 << 20;

/// An entry of the active L1 table whose L2 table has a readable refcount.
struct Used {
    index: usize,
    entry: L1Entry,
    refcount: u64,
}

/// A change of a table.
type Patch = (u64, Buffer);

/// Reports the flags in QEMU's order, each L1 entry and then the L2 table behind it;
/// with `repairs` they are put right, where nothing else lies in the same place.
pub(super) async fn check(
    image: &Image,
    outcome: &Outcome,
    repairs: bool,
    findings: &mut Findings,
) -> Result<()> {
    let header = &image.header;
    let table = image
        .read_l1_table(header.l1_table_offset, header.l1_entries)
        .await?;
    let size = image.geometry.cluster_size_bytes();
    image.spend(used_entries(image, outcome, &table).count() as u64 * size)?;
    let mut used = used_entries(image, outcome, &table);
    let l1 = image.header.l1_table_offset.0;
    let l1_bytes = u64::from(image.header.l1_entries) * L1_ENTRY_SIZE_BYTES;
    let repairs_l1 = repairs && is_alone(image, outcome, l1..l1 + l1_bytes);
    let mut any = false;
    loop {
        let group: Vec<Used> = used.by_ref().take((GROUP_BYTES / size) as usize).collect();
        if group.is_empty() {
            break;
        }
        let offsets: Vec<u64> = group.iter().map(|used| used.entry.raw_offset()).collect();
        let mut patches: Vec<Patch> = Vec::new();
        tables::for_each_table(image, &offsets, size, |number, table| {
            let used = &group[number];
            patches.extend(l1_entry(image, used, repairs_l1, findings));
            let repairs = repairs && outcome.may_change_table(image, offsets[number]);
            let patch = l2_table(image, outcome, table, repairs, findings);
            patches.extend(patch.map(|(at, bytes)| (offsets[number] + at, bytes)));
            Ok(())
        })
        .await?;
        any |= !patches.is_empty();
        for (at, bytes) in patches {
            image.write(at, bytes).await?;
        }
    }
    match any {
        true => image.flush().await,
        false => Ok(()),
    }
}

/// Whether all clusters of a range have one reference.
fn is_alone(image: &Image, outcome: &Outcome, range: Range<u64>) -> bool {
    let clusters = image.cluster_of(range.start)..=image.cluster_of(range.end.saturating_sub(1));
    clusters
        .into_iter()
        .all(|cluster| outcome.tally.references.get(cluster) == 1)
}

fn used_entries<'a>(
    image: &'a Image,
    outcome: &'a Outcome,
    table: &'a [u8],
) -> impl Iterator<Item = Used> + 'a {
    (0..table.len() / 8).filter_map(|index| {
        let entry = L1Entry::read(table, index)?;
        if entry.raw_offset() == 0 {
            return None;
        }
        let refcount = outcome.stored.get(image.cluster_of(entry.raw_offset()))?;
        Some(Used {
            index,
            entry,
            refcount,
        })
    })
}

fn l1_entry(image: &Image, used: &Used, repairs: bool, findings: &mut Findings) -> Option<Patch> {
    let &Used {
        index,
        entry,
        refcount,
    } = used;
    if (refcount == 1) == entry.copied() {
        return None;
    }
    findings.corruption_or_repair(repairs, || {
        format!(
            "OFLAG_COPIED L2 cluster: l1_index={index} l1_entry={:x} refcount={refcount}",
            entry.0
        )
    });
    let right = entry.with_copied(refcount == 1);
    let at = image.header.l1_table_offset.0 + index as u64 * L1_ENTRY_SIZE_BYTES;
    repairs.then(|| (at, Buffer::copy_of(&right.0.to_be_bytes())))
}

/// The part of an L2 table that changes, with its place in the table.
fn l2_table(
    image: &Image,
    outcome: &Outcome,
    table: &[u8],
    repairs: bool,
    findings: &mut Findings,
) -> Option<Patch> {
    let geometry = &image.geometry;
    let entry_size = geometry.l2_entry_size_bytes() as usize;
    let mut right = Vec::new();
    let mut changed: Option<Range<usize>> = None;
    for (index, entry, refcount) in wrong_entries(image, outcome, table) {
        findings.corruption_or_repair(repairs, || {
            format!(
                "OFLAG_COPIED data cluster: l2_entry={:x} refcount={refcount}",
                entry.descriptor
            )
        });
        if !repairs {
            continue;
        }
        if right.is_empty() {
            right = table.to_vec();
        }
        let at = index * entry_size;
        let flag = entry.with_copied(refcount == 1).descriptor.to_be_bytes();
        right[at..at + flag.len()].copy_from_slice(&flag);
        let start = changed.map_or(at, |changed| changed.start);
        changed = Some(start..at + flag.len());
    }
    changed.map(|changed| (changed.start as u64, Buffer::copy_of(&right[changed])))
}

/// The entries of an L2 table whose flag is wrong, with their index and refcount.
fn wrong_entries<'a>(
    image: &'a Image,
    outcome: &'a Outcome,
    table: &'a [u8],
) -> impl Iterator<Item = (usize, L2Entry, u64)> + 'a {
    let geometry = &image.geometry;
    (0..geometry.l2_entries() as usize).filter_map(move |index| {
        let entry = L2Entry::read(table, index, geometry)?;
        if !has_cluster(entry, geometry) {
            return None;
        }
        let refcount = match geometry.external_data {
            true => 1,
            false => outcome.stored.get(image.cluster_of(entry.raw_offset()))?,
        };
        ((refcount == 1) != entry.copied()).then_some((index, entry, refcount))
    })
}
