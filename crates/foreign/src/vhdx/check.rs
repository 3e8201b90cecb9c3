//! Whether blocks lie where blocks may lie.

use std::sync::Arc;

use vellum::{Result, Storage};

use super::bat::{BITMAP_BLOCK_BYTES, Entry, Shape, State};
use super::image::Image;
use super::region::overlap_message;
use super::replay::OnLog;
use crate::facts::{CheckReport, Fix};

/// Looks at all entries. A log that waits is replayed where `fix` says so, and counts as a damage
/// that was mended.
///
/// # Errors
/// As [`super::open`], but for the entries.
pub async fn check(file: &Arc<dyn Storage>, fix: Fix) -> Result<CheckReport> {
    let target = |error: vellum::Error| error.target(file.name());
    let on_log = match fix == Fix::default() {
        true => OnLog::Refuse,
        false => OnLog::Replay,
    };
    let image = Image::read(file.clone(), on_log).await.map_err(target)?;
    let (shape, entries) = image.read_table().await.map_err(target)?;
    let mut report = CheckReport::default();
    if image.was_replayed {
        report.corruptions_fixed += 1;
    }
    let file_bytes = file.len_bytes()?;
    check_entries(&image, &shape, &entries, file_bytes, |message| {
        report.corruption(message);
        true
    });
    Ok(report)
}

/// Tells `found` of each entry that leads where it may not, in QEMU's words, as long as that gives `true`.
pub(super) fn check_entries(
    image: &Image,
    shape: &Shape,
    entries: &[u64],
    file_bytes: u64,
    mut found: impl FnMut(String) -> bool,
) {
    for (index, &entry) in (0..shape.entries).zip(entries) {
        let entry = Entry(entry);
        // Older QEMUs let the last block end with the disk.
        let (block_bytes, needed_bytes) = match shape.block_of(index) {
            Some(block) => match entry.state() {
                Some(State::FullyPresent | State::PartiallyPresent) => {
                    let block_bytes = image.parameters.block_bytes;
                    let rest_bytes = image.parameters.size_bytes - block * block_bytes;
                    (block_bytes, rest_bytes.min(block_bytes))
                }
                _ => continue,
            },
            None if image.parent.is_some() && entry.has_bitmap() => {
                (BITMAP_BLOCK_BYTES, BITMAP_BLOCK_BYTES)
            }
            None => continue,
        };
        let messages = problems(image, index, entry, block_bytes, needed_bytes, file_bytes);
        for message in messages.into_iter().flatten() {
            if !found(message) {
                return;
            }
        }
    }
}

fn problems(
    image: &Image,
    index: u64,
    entry: Entry,
    block_bytes: u64,
    needed_bytes: u64,
    file_bytes: u64,
) -> [Option<String>; 3] {
    let offset_bytes = entry.offset_bytes();
    let is_too_far = offset_bytes > i64::MAX as u64 - block_bytes;
    let overflow = is_too_far.then(|| format!("VHDX BAT entry {index} offset overflow."));
    let end = offset_bytes.saturating_add(needed_bytes);
    let past_end = |which: &str, at: u64| {
        format!(
            "VHDX BAT entry {index} {which} offset {at} points after end of file ({file_bytes}). \
             Image has probably been truncated."
        )
    };
    let cut_off = if offset_bytes >= file_bytes {
        Some(past_end("start", offset_bytes))
    } else if end > file_bytes {
        Some(past_end("end", end - 1))
    } else {
        None
    };
    let overlap = image.regions.taken.overlap(offset_bytes, block_bytes);
    let block_end = offset_bytes.saturating_add(block_bytes);
    let overlap = overlap.map(|(start, end)| overlap_message(offset_bytes, block_end, start, end));
    [overflow, cut_off, overlap]
}
