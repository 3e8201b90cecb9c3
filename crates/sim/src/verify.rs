//! What must hold after a power cut.
//!
//! In this order: the simulator's audit and the engine's check find leaks at worst;
//! the image opens; every sector reads as the model allows; after closing it again,
//! audit and check still find leaks at worst.
//!
//! After a clean close nothing has leaked that had not before; see `leaks`.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use vellum::qcow2::AsQcow2;

use vellum::BlockDevice;
use vellum::qcow2::SnapshotSelector;
use vellum_io::Buffer;

use crate::audit::{Frozen, audit};
use crate::bitmap;
use crate::disk::Mode;
use crate::drive::snapshots::check_vm_state;
use crate::drive::{Guest, close};
use crate::failure::{Failure, FailureKind, guarded};
use crate::image_engine::ImageEngine;
use crate::layout::Layout;
use crate::machine::{Machine, MachineStorages};
use crate::model::Model;
use crate::runtime::Runtime;
use crate::scenario::ImageOptions;
use crate::sparse_bytes::{SECTOR_BYTES, SparseBytes};

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

/// Starts a machine after a power cut and checks everything; gives the machine with
/// a model that knows what was read. The model that comes is that of
/// [`Model::after_cut`].
pub fn verify(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    mut machine: Machine,
    depth: Depth,
) -> Result<Machine, Failure> {
    guarded(|| {
        let plugged = machine.plug(options, Mode::Instant);
        let mut runtime = Runtime::new(plugged.disk.clone(), 0);
        // The refcounts of a dirty image are repaired when it is opened.
        let dirty = Layout::parse(&machine.files[0]).is_ok_and(|layout| layout.dirty);
        if !dirty {
            inspect(
                engine,
                &machine.files[0],
                &machine.frozen,
                &plugged,
                &mut runtime,
            )
            .map_err(|failure| failure.when("after the cut"))?;
        }
        inspect_backing(engine, options, &plugged, &mut runtime)?;
        let guest = Guest::new(
            engine,
            options,
            &plugged,
            std::mem::take(&mut machine.model),
        );
        let recovery = recover(guest.clone(), depth, dirty);
        runtime
            .block_on(recovery)?
            .map_err(|failure| failure.when("after the cut"))?;
        machine.model = guest.model.take();
        machine.model.make_durable();
        if dirty || depth == Depth::Thorough {
            runtime.finish_all();
            let image = plugged.contents().swap_remove(0);
            inspect(engine, &image, &machine.frozen, &plugged, &mut runtime)
                .map_err(|failure| failure.when("after the cut and a close"))?;
        }
        Ok(machine)
    })
}

/// What an image, and its backing file, have leaked.
pub(crate) fn leaks(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    machine: &Machine,
) -> Result<u64, Failure> {
    let plugged = machine.plug(options, Mode::Instant);
    let mut runtime = Runtime::new(plugged.disk.clone(), 0);
    let mut leaks = 0;
    let images = [Some(plugged.files()), plugged.backing_image(options)];
    for files in images.into_iter().flatten() {
        let found = runtime
            .block_on(engine.check(files))?
            .map_err(|error| Failure::error(FailureKind::Check, "check", &error))?;
        if found.corruptions + found.check_errors > 0 {
            return Err(Failure::new(FailureKind::Check, format!("{found:?}")));
        }
        leaks += found.leaks;
    }
    Ok(leaks)
}

/// Audits and checks a plugged image that holds `image` now.
pub(crate) fn inspect(
    engine: &Arc<dyn ImageEngine>,
    image: &SparseBytes,
    frozen: &Frozen,
    plugged: &MachineStorages,
    runtime: &mut Runtime,
) -> Result<(), Failure> {
    let problems = match engine.is_qcow2() {
        true => audit(image, frozen),
        false => Vec::new(),
    };
    if !problems.is_empty() {
        return Err(Failure::new(FailureKind::Audit, problems.join("; ")));
    }
    let check = engine.check(plugged.files());
    let findings = runtime
        .block_on(check)?
        .map_err(|error| Failure::error(FailureKind::Check, "check", &error))?;
    if findings.corruptions + findings.check_errors > 0 {
        return Err(Failure::new(FailureKind::Check, format!("{findings:?}")));
    }
    Ok(())
}

/// Audits and checks the backing file, which a commit may have written to.
fn inspect_backing(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    plugged: &MachineStorages,
    runtime: &mut Runtime,
) -> Result<(), Failure> {
    let Some(files) = plugged.backing_image(options) else {
        return Ok(());
    };
    let pages = plugged.backing_contents();
    let problems = audit(&pages, &Frozen::default());
    if !problems.is_empty() {
        let message = format!("backing file: {}", problems.join("; "));
        return Err(Failure::new(FailureKind::Audit, message));
    }
    let findings = runtime
        .block_on(engine.check(files))?
        .map_err(|error| Failure::error(FailureKind::Check, "check the backing file", &error))?;
    match findings.corruptions + findings.check_errors {
        0 => Ok(()),
        _ => Err(Failure::new(
            FailureKind::Check,
            format!("backing file: {findings:?}"),
        )),
    }
}

async fn recover(guest: Rc<Guest>, depth: Depth, dirty: bool) -> Result<(), Failure> {
    let device = guest.plugged.open(&*guest.engine, &guest.options).await?;
    examine(&guest, &*device, depth).await?;
    if dirty || depth == Depth::Thorough {
        close(&guest, &*device).await?;
    }
    Ok(())
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
    bitmap::check(guest, device).await
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
