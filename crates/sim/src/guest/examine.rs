//! What a device shows after it was opened, compared with what the model allows: its
//! sectors, its snapshots and its bitmaps.

use std::ops::Range;

use vellum::BlockDevice;
use vellum::qcow2::AsQcow2;
use vellum::qcow2::SnapshotSelector;
use vellum_io::Buffer;

use super::snapshots::check_vm_state;
use super::{Guest, bitmaps};
use crate::failure::{Failure, FailureKind};
use crate::model::Model;
use crate::sparse_bytes::SECTOR_BYTES;

/// Up to this size everything is read; of larger devices, what was touched.
const READ_ALL_BYTES: u64 = 256 << 10;
/// How far around what was touched is read too.
const MARGIN_BYTES: u64 = 8 << 10;
const READ_BYTES: u64 = 64 << 10;

/// How much of an image is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// What was touched, and its neighbours.
    Quick,
    /// All sectors, and the image once more after it was closed.
    Thorough,
}

/// Compares a device that was opened just now with the model of [`Model::after_cut`].
pub(crate) async fn examine(
    guest: &Guest,
    device: &dyn BlockDevice,
    depth: Depth,
) -> Result<(), Failure> {
    match_snapshots(guest, device)?;
    guest.model.borrow_mut().end_cut(device.size_bytes())?;
    let ranges = ranges_to_read(&guest.model.borrow(), depth);
    let applied = guest.model.borrow_mut().take_applied();
    if let Err(failure) = compare_all(guest, device, ranges).await {
        // Perhaps the snapshot that was being applied is in force already.
        let Some(applied) = applied else {
            return Err(failure);
        };
        let ranges = ranges_to_read(&applied, depth);
        guest.model.replace(applied);
        compare_all(guest, device, ranges).await?;
    }
    compare_snapshots(guest, device, depth).await?;
    bitmaps::check(guest, device).await
}

async fn compare_all(
    guest: &Guest,
    device: &dyn BlockDevice,
    ranges: Vec<Range<u64>>,
) -> Result<(), Failure> {
    for range in ranges {
        compare(guest, device, range).await?;
    }
    Ok(())
}

/// The snapshots must be those that the model knows of.
fn match_snapshots(guest: &Guest, device: &dyn BlockDevice) -> Result<(), Failure> {
    let Some(image) = device.as_qcow2() else {
        return Ok(());
    };
    let found: Vec<String> = image.snapshots().into_iter().map(|one| one.id).collect();
    guest.model.borrow_mut().match_snapshots(&found)?;
    Ok(())
}

/// Every snapshot must hold what it held.
async fn compare_snapshots(
    guest: &Guest,
    device: &dyn BlockDevice,
    depth: Depth,
) -> Result<(), Failure> {
    let Some(image) = device.as_qcow2() else {
        return Ok(());
    };
    let snapshots = guest.model.borrow().snapshots().to_vec();
    for snapshot in snapshots {
        let what = ("snapshot", snapshot.id.clone());
        let failed = |error| Failure::error(FailureKind::Open, &what, &error);
        let selector = SnapshotSelector::Id(snapshot.id.clone());
        let shown = image.open_snapshot(selector).await.map_err(failed)?;
        check_vm_state(&shown, &snapshot.id).await?;
        if !snapshot.is_known() {
            continue;
        }
        if shown.size_bytes() != snapshot.size_bytes {
            let message = format!("{what:?} has {} bytes", shown.size_bytes());
            return Err(Failure::new(FailureKind::Content, message));
        }
        for range in sectors_to_read(snapshot.size_bytes, snapshot.touched(), depth) {
            let buffer = Buffer::zeroed((range.end - range.start) as usize);
            let bytes = shown.read(range.start, buffer).await.map_err(failed)?;
            let model = guest.model.borrow();
            model.check_snapshot(&snapshot, range.start, &bytes)?;
        }
    }
    Ok(())
}

async fn compare(
    guest: &Guest,
    device: &dyn BlockDevice,
    range: Range<u64>,
) -> Result<(), Failure> {
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(READ_BYTES);
        let begun = guest.model.borrow_mut().begin_watch();
        let mut buffer = Buffer::zeroed(len as usize);
        buffer.fill(0xcc);
        let buffer = device
            .read(at, buffer)
            .await
            .map_err(|error| Failure::error(FailureKind::Request, ("read", at, len), &error))?;
        guest.model.borrow_mut().end_read(begun, at, &buffer)?;
        at += len;
    }
    Ok(())
}

fn ranges_to_read(model: &Model, depth: Depth) -> Vec<Range<u64>> {
    sectors_to_read(model.size_bytes(), model.touched(), depth)
}

/// What is read of a device, of which these sectors were touched.
fn sectors_to_read(size: u64, touched: impl Iterator<Item = u64>, depth: Depth) -> Vec<Range<u64>> {
    if size <= READ_ALL_BYTES || depth == Depth::Thorough {
        return vec![0..size];
    }
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for sector in touched {
        let start = (sector * SECTOR_BYTES).saturating_sub(MARGIN_BYTES);
        let end = ((sector + 1) * SECTOR_BYTES + MARGIN_BYTES).min(size);
        match ranges.last_mut() {
            Some(last) if last.end >= start => last.end = end,
            _ => ranges.push(start..end),
        }
    }
    ranges
}
