//! The end of a device: on a disk that works, and on one that fails.

use vellum::BlockDevice;

use super::Guest;
use crate::failure::{Failure, FailureKind};

/// Closes a device; a close makes everything durable, as a flush does.
pub(crate) async fn close(guest: &Guest, device: &dyn BlockDevice) -> Result<(), Failure> {
    let begun = guest.model.borrow_mut().begin_watch();
    guest.lift_quota();
    match device.close().await {
        Ok(()) => {}
        // What was acknowledged may still have waited for room.
        Err(error) if guest.may_close_without_room(&error) => return Ok(()),
        Err(error) => return Err(Failure::error(FailureKind::Request, "close", &error)),
    }
    guest.restore_quota();
    // It says nothing of what those who had the image open before have left behind.
    if !guest.unsettled.get() {
        guest.model.borrow_mut().end_flush(begun);
    }
    guest.closed.borrow_mut().push(guest.plugged.all_contents());
    Ok(())
}

/// Closes a device whose disk fails, however that ends; clusters may leak. Where it succeeds it
/// makes durable what was written since the device was opened.
pub(super) async fn close_failing(guest: &Guest, device: &dyn BlockDevice) {
    let begun = guest.model.borrow_mut().begin_watch();
    match device.close().await {
        Ok(()) if guest.unsettled.get() => {}
        Ok(()) => guest.model.borrow_mut().end_flush(begun),
        Err(_) => guest.unsettled.set(true),
    }
}
