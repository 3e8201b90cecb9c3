//! Breaks an image and has it repaired.
//!
//! The mark "dirty" is on disk before anything is broken, so that whoever finds the
//! image after a power cut knows that its refcounts are not to be trusted.

use vellum_io::{Buffer, Buffers};
use vellum_storage::WriteFlags;

use super::Guest;
use crate::failure::{Failure, FailureKind};
use crate::layout::{AUTOCLEAR_OFFSET, CHECKSUMS, COPIED, FEATURES_OFFSET, Layout, Mapped};
use crate::scenario::Damage;
use crate::sparse_bytes::SparseBytes;

/// Breaks the image of a guest, which is not open, and repairs it.
pub(super) async fn break_and_repair(guest: &Guest, damage: Damage) -> Result<(), Failure> {
    let pages = guest.plugged.contents().swap_remove(0);
    let layout = Layout::parse(&pages);
    let layout = layout.map_err(|message| Failure::new(FailureKind::Audit, message))?;
    if layout.version >= 3 && damage != Damage::None {
        // Else a crash before the repair leaves what checksums are there to find.
        let known = pages.be64(AUTOCLEAR_OFFSET) & !CHECKSUMS;
        write(guest, vec![(AUTOCLEAR_OFFSET, known)]).await?;
        let dirty = pages.be64(FEATURES_OFFSET) | 1;
        write(guest, vec![(FEATURES_OFFSET, dirty)]).await?;
        write(guest, broken(&layout, &pages, damage)).await?;
    }
    let repair = guest.engine.repair(guest.plugged.files());
    let findings = repair
        .await
        .map_err(|error| Failure::error(FailureKind::Check, damage, &error))?;
    if findings.corruptions + findings.check_errors > 0 {
        let message = format!("left after the repair of {damage:?}: {findings:?}");
        return Err(Failure::new(FailureKind::Check, message));
    }
    Ok(())
}

/// Writes words and makes them durable.
async fn write(guest: &Guest, words: Vec<(u64, u64)>) -> Result<(), Failure> {
    let failed = |error| Failure::error(FailureKind::Setup, "break the image", &error);
    let storage = guest.plugged.files().image;
    for (offset, word) in words {
        let buffers = Buffers::from_iter([Buffer::copy_of(&word.to_be_bytes())]);
        storage
            .write(offset, buffers, WriteFlags::default())
            .await
            .map_err(failed)?;
    }
    storage.flush().await.map_err(failed)
}

/// The words that break an image.
fn broken(layout: &Layout, pages: &SparseBytes, damage: Damage) -> Vec<(u64, u64)> {
    let entry = |number: u64| {
        layout
            .blocks
            .get(number as usize % layout.blocks.len().max(1))
    };
    let at = |index: u64| layout.table_offset + index * 8;
    match damage {
        Damage::None => Vec::new(),
        Damage::CountsLost(step) => counts(layout, pages, |cluster, count| {
            (count > 0 && cluster % (step + 1) == 0).then_some(0)
        }),
        Damage::CountsHigh(step) => counts(layout, pages, |cluster, count| {
            let most = u64::MAX >> (64 - (1u64 << layout.refcount_order));
            (cluster % (step + 1) == 0 && count < most).then_some(count + 1)
        }),
        Damage::BlockLost(number) => entry(number)
            .map(|&(index, _)| (at(index), 0))
            .into_iter()
            .collect(),
        // Smaller clusters have no space between them.
        Damage::BlockUnaligned(_) if layout.cluster_bits == 9 => Vec::new(),
        Damage::BlockUnaligned(number) => entry(number)
            .map(|&(index, block)| (at(index), block + 512))
            .into_iter()
            .collect(),
        Damage::BlockTwice => {
            let last = layout.blocks.last().map_or(0, |&(index, _)| index);
            let entries = layout.table_clusters * layout.cluster_bytes() / 8;
            let first = layout.blocks.first().map_or(0, |&(_, block)| block);
            match last + 1 < entries {
                true => vec![(at(last + 1), first)],
                false => Vec::new(),
            }
        }
        Damage::Flags(step) => {
            let entries = mapped(layout, pages);
            let entries = entries.into_iter().filter(|entry| entry.host().is_some());
            entries
                .step_by(step as usize)
                .map(|mapped| (mapped.entry_offset, mapped.entry ^ COPIED))
                .collect()
        }
    }
}

fn mapped(layout: &Layout, pages: &SparseBytes) -> Vec<Mapped> {
    let tables = layout.l1.iter();
    tables
        .flat_map(|&(index, entry)| layout.mappings(pages, index, entry))
        .collect()
}

/// The words of the refcount blocks in which some counts are others.
fn counts(
    layout: &Layout,
    pages: &SparseBytes,
    change: impl Fn(u64, u64) -> Option<u64>,
) -> Vec<(u64, u64)> {
    let mut broken = pages.clone();
    let clusters = pages.len_bytes().div_ceil(layout.cluster_bytes());
    for cluster in 0..clusters {
        let count = layout.refcount(pages, cluster);
        if let Some(other) = change(cluster, count) {
            layout.set_refcount(&mut broken, cluster, other);
        }
    }
    let blocks = layout.blocks.iter();
    let words = blocks.flat_map(|&(_, block)| (block..block + layout.cluster_bytes()).step_by(8));
    words
        .filter(|&at| broken.be64(at) != pages.be64(at))
        .map(|at| (at, broken.be64(at)))
        .collect()
}
