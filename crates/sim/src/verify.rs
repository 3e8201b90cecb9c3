//! What must hold after a power cut.
//!
//! In this order: the simulator's audit and the engine's check find leaks at worst;
//! the image opens; every sector reads as the model allows; after closing it again,
//! audit and check still find leaks at worst.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum_storage::Buffer;

use crate::audit::{Frozen, audit};
use crate::disk::Mode;
use crate::drive::{Guest, close};
use crate::failure::{Failure, FailureKind, guarded};
use crate::layout::Layout;
use crate::machine::{Machine, Plugged};
use crate::model::Model;
use crate::pages::{Pages, SECTOR_BYTES};
use crate::scenario::ImageOptions;
use crate::subject::Subject;
use crate::world::World;

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
    subject: &Arc<dyn Subject>,
    options: &ImageOptions,
    mut machine: Machine,
    depth: Depth,
) -> Result<Machine, Failure> {
    guarded(|| {
        let plugged = machine.plug(options, Mode::Instant);
        let mut world = World::new(plugged.disk.clone(), 0);
        // The refcounts of a dirty image are repaired when it is opened.
        let dirty = Layout::parse(&machine.files[0]).is_ok_and(|layout| layout.dirty);
        if !dirty {
            inspect(
                subject,
                &machine.files[0],
                &machine.frozen,
                &plugged,
                &mut world,
            )
            .map_err(|failure| failure.when("after the cut"))?;
        }
        inspect_backing(subject, options, &plugged, &mut world)?;
        let guest = Rc::new(Guest {
            subject: subject.clone(),
            options: options.clone(),
            plugged: plugged.clone(),
            model: RefCell::new(std::mem::take(&mut machine.model)),
        });
        let recovery = recover(guest.clone(), depth, dirty);
        world
            .block_on(recovery)?
            .map_err(|failure| failure.when("after the cut"))?;
        machine.model = guest.model.take();
        machine.model.make_durable();
        if dirty || depth == Depth::Thorough {
            world.settle();
            let image = plugged.contents().swap_remove(0);
            inspect(subject, &image, &machine.frozen, &plugged, &mut world)
                .map_err(|failure| failure.when("after the cut and a close"))?;
        }
        Ok(machine)
    })
}

/// Audits and checks a plugged image that holds `image` now.
pub(crate) fn inspect(
    subject: &Arc<dyn Subject>,
    image: &Pages,
    frozen: &Frozen,
    plugged: &Plugged,
    world: &mut World,
) -> Result<(), Failure> {
    let problems = audit(image, frozen);
    if !problems.is_empty() {
        return Err(Failure::new(FailureKind::Audit, problems.join("; ")));
    }
    let check = subject.check(plugged.files());
    let findings = world
        .block_on(check)?
        .map_err(|error| Failure::error(FailureKind::Check, "check", &error))?;
    if findings.corruptions + findings.check_errors > 0 {
        return Err(Failure::new(FailureKind::Check, format!("{findings:?}")));
    }
    Ok(())
}

/// Audits and checks the backing file, which a commit may have written to.
fn inspect_backing(
    subject: &Arc<dyn Subject>,
    options: &ImageOptions,
    plugged: &Plugged,
    world: &mut World,
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
    let findings = world
        .block_on(subject.check(files))?
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
    let device = guest.plugged.open(&*guest.subject, &guest.options).await?;
    let size_bytes = device.size_bytes();
    guest.model.borrow_mut().end_resize(size_bytes)?;
    let ranges = ranges_to_read(&guest.model.borrow(), depth);
    for range in ranges {
        compare(&guest, &*device, range).await?;
    }
    if dirty || depth == Depth::Thorough {
        close(&guest, &*device).await?;
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
    let size = model.size_bytes();
    if size <= READ_ALL_BYTES || depth == Depth::Thorough {
        return vec![0..size];
    }
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for sector in model.touched() {
        let start = (sector * SECTOR_BYTES).saturating_sub(MARGIN_BYTES);
        let end = ((sector + 1) * SECTOR_BYTES + MARGIN_BYTES).min(size);
        match ranges.last_mut() {
            Some(last) if last.end >= start => last.end = end,
            _ => ranges.push(start..end),
        }
    }
    ranges
}
