//! Changes of the snapshots, as the guest's host makes them.

use std::rc::Rc;
use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::qcow2::{NewSnapshot, Qcow2, SnapshotSelector};
use vellum::{BlockDevice, Error, ErrorKind};
use vellum_io::Buffer;

use super::Guest;
use crate::failure::{Failure, FailureKind};
use crate::model::Model;
use crate::scenario::Change;

/// Whether everything that runs must have ended before a change: what a snapshot holds
/// that is taken beside a resize nobody could say.
pub(super) fn runs_alone(model: &Model, change: Change) -> bool {
    model.is_resizing() || model.is_changing_snapshots() || matches!(change, Change::Apply(_))
}

/// A change that has begun, as far as the model knows.
pub(super) struct PendingChange {
    change: Change,
    /// The snapshot that it is about, if it is about one.
    selector: SnapshotSelector,
}

/// Begins a change; `None`: there is nothing to change.
pub(super) fn begin(
    guest: &Guest,
    device: &dyn BlockDevice,
    change: Change,
) -> Option<PendingChange> {
    device.as_qcow2()?;
    let mut model = guest.model.borrow_mut();
    let count = model.snapshots().len() as u64;
    let index = match change {
        Change::Take | Change::TakeWithState(_) => 0,
        Change::Apply(number) | Change::Delete(number) => number.checked_rem(count)? as usize,
    };
    let held = model.snapshots().get(index);
    let has_bitmap = guest.options.bitmap_bits.is_some();
    // No snapshot is applied to an image that has bitmaps.
    if matches!(change, Change::Apply(_)) && (has_bitmap || !held?.is_known()) {
        return None;
    }
    let id = held.map(|held| held.id.clone());
    match change {
        Change::Take | Change::TakeWithState(_) => model.begin_snapshot(),
        Change::Apply(_) => model.begin_apply(index),
        Change::Delete(_) => model.begin_delete(index),
    }
    Some(PendingChange {
        change,
        selector: SnapshotSelector::Id(id.unwrap_or_default()),
    })
}

/// Makes a change that has begun.
pub(super) async fn change(
    guest: Rc<Guest>,
    device: Arc<dyn BlockDevice>,
    begun: PendingChange,
) -> Result<(), Failure> {
    let Some(image) = device.as_qcow2() else {
        return Ok(());
    };
    match begun.change {
        Change::Take => take(&guest, image, 0).await,
        Change::TakeWithState(len_bytes) => take(&guest, image, len_bytes).await,
        Change::Apply(_) => apply(&guest, image, begun.selector).await,
        Change::Delete(_) => delete(&guest, image, begun.selector).await,
    }
}

async fn take(guest: &Guest, image: &Qcow2, state_bytes: u64) -> Result<(), Failure> {
    let new = NewSnapshot {
        vm_state_size_bytes: state_bytes,
        ..NewSnapshot::default()
    };
    let saved = match state_bytes {
        0 => Ok(()),
        _ => image
            .save_vm_state(0, vm_state(state_bytes))
            .await
            .map(drop),
    };
    let made = match saved {
        Ok(()) => image.create_snapshot(new).await,
        Err(error) => Err(error),
    };
    let id = match made {
        Ok(made) => Some(made.id),
        Err(error) if guest.excuses(&error) => return Ok(()),
        Err(error) => refusable(guest, image, "take a snapshot", error).map(|()| None)?,
    };
    guest.model.borrow_mut().end_snapshot(id);
    Ok(())
}

/// The VM state of so many bytes: every length has bytes of its own.
fn vm_state(len_bytes: u64) -> Buffer {
    let mut state = Buffer::zeroed(len_bytes as usize);
    for (place, byte) in state.iter_mut().zip(len_bytes..) {
        *place = (byte % 251) as u8;
    }
    state
}

/// The VM state that an image shows must be that of this snapshot, if it has any.
pub(super) async fn check_vm_state(image: &Qcow2, id: &str) -> Result<(), Failure> {
    let snapshots = image.snapshots();
    let found = snapshots.iter().find(|snapshot| snapshot.id == id);
    let len_bytes = found.map_or(0, |snapshot| snapshot.vm_state_size_bytes);
    if len_bytes == 0 {
        return Ok(());
    }
    let buffer = Buffer::zeroed(len_bytes as usize);
    let what = ("load the VM state of snapshot", id);
    let failed = |error| Failure::error(FailureKind::Request, what, &error);
    let state = image.load_vm_state(0, buffer).await.map_err(failed)?;
    match state[..] == vm_state(len_bytes)[..] {
        true => Ok(()),
        false => {
            let message = format!("snapshot {id} has another VM state");
            Err(Failure::new(FailureKind::Content, message))
        }
    }
}

async fn apply(guest: &Guest, image: &Qcow2, selector: SnapshotSelector) -> Result<(), Failure> {
    let id = selector.to_string();
    let applied = image.apply_snapshot(selector).await;
    let worked = applied.is_ok();
    if let Err(error) = &applied
        && guest.excuses(error)
    {
        guest.astray.set(true);
        return Ok(());
    }
    applied.or_else(|error| refusable(guest, image, "apply a snapshot", error))?;
    if worked && !guest.failing.get() {
        check_vm_state(image, &id).await?;
    }
    let mut model = guest.model.borrow_mut();
    model.end_apply(worked);
    if image.size_bytes() != model.size_bytes() {
        let (is, expected) = (image.size_bytes(), model.size_bytes());
        let message = format!("the size is {is} after an apply, not {expected}");
        return Err(Failure::new(FailureKind::Request, message));
    }
    Ok(())
}

async fn delete(guest: &Guest, image: &Qcow2, selector: SnapshotSelector) -> Result<(), Failure> {
    let deleted = image.delete_snapshot(selector).await;
    let worked = deleted.is_ok();
    if let Err(error) = &deleted
        && guest.excuses(error)
    {
        return Ok(());
    }
    deleted.or_else(|error| refusable(guest, image, "delete a snapshot", error))?;
    guest.model.borrow_mut().end_delete(worked);
    Ok(())
}

/// Lets pass what an image or its disk has no space for.
fn refusable(guest: &Guest, image: &Qcow2, what: &str, error: Error) -> Result<(), Failure> {
    let is_narrow = image.header().refcount_order < 3;
    let narrow = is_narrow && error.kind() == ErrorKind::InvalidArgument;
    let full = !guest.options.traits.growable && error.kind() == ErrorKind::NoSpace;
    match narrow || full {
        true => Ok(()),
        false => Err(Failure::error(FailureKind::Request, what, &error)),
    }
}
