//! Changes of the snapshots, as the guest's host makes them.

use std::rc::Rc;
use std::sync::Arc;

use vellum::qcow2::{NewSnapshot, Qcow2, SnapshotSelector};
use vellum::{BlockDevice, Error, ErrorKind};

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
pub(super) struct Begun {
    change: Change,
    /// The snapshot that it is about, if it is about one.
    selector: SnapshotSelector,
}

/// Begins a change; `None`: there is nothing to change.
pub(super) fn begin(guest: &Guest, device: &dyn BlockDevice, change: Change) -> Option<Begun> {
    device.as_qcow2()?;
    let mut model = guest.model.borrow_mut();
    let count = model.snapshots().len() as u64;
    let index = match change {
        Change::Take => 0,
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
        Change::Take => model.begin_snapshot(),
        Change::Apply(_) => model.begin_apply(index),
        Change::Delete(_) => model.begin_delete(index),
    }
    Some(Begun {
        change,
        selector: SnapshotSelector::Id(id.unwrap_or_default()),
    })
}

/// Makes a change that has begun.
pub(super) async fn change(
    guest: Rc<Guest>,
    device: Arc<dyn BlockDevice>,
    begun: Begun,
) -> Result<(), Failure> {
    let Some(image) = device.as_qcow2() else {
        return Ok(());
    };
    match begun.change {
        Change::Take => take(&guest, image).await,
        Change::Apply(_) => apply(&guest, image, begun.selector).await,
        Change::Delete(_) => delete(&guest, image, begun.selector).await,
    }
}

async fn take(guest: &Guest, image: &Qcow2) -> Result<(), Failure> {
    let made = image.create_snapshot(NewSnapshot::default()).await;
    let id = match made {
        Ok(made) => Some(made.id),
        Err(error) => refusable(guest, "take a snapshot", error).map(|()| None)?,
    };
    guest.model.borrow_mut().end_snapshot(id);
    Ok(())
}

async fn apply(guest: &Guest, image: &Qcow2, selector: SnapshotSelector) -> Result<(), Failure> {
    let applied = image.apply_snapshot(selector).await;
    let worked = applied.is_ok();
    applied.or_else(|error| refusable(guest, "apply a snapshot", error))?;
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
    deleted.or_else(|error| refusable(guest, "delete a snapshot", error))?;
    guest.model.borrow_mut().end_delete(worked);
    Ok(())
}

/// Lets pass what an image or its disk has no room for.
fn refusable(guest: &Guest, what: &str, error: Error) -> Result<(), Failure> {
    let options = &guest.options;
    let narrow = options.refcount_order < 3 && error.kind() == ErrorKind::InvalidArgument;
    let full = !options.traits.growable && error.kind() == ErrorKind::NoSpace;
    match narrow || full {
        true => Ok(()),
        false => Err(Failure::error(FailureKind::Request, what, &error)),
    }
}
