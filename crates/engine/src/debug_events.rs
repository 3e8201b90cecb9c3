//! Telling a debugger under the image file what is about to happen, under the names
//! that QEMU's `blkdebug` gives these moments.
//!
//! Nobody listens in ordinary use: then a call costs one look at whether somebody
//! does. Who listens may hold the caller, so no lock of `std` is held here.

use std::sync::Arc;

use vellum_storage::{Event, Storage};

/// Tells the debugger of `file`, if there is one, of an event, and waits as long as it holds us.
/// Who has the image asks `Image::emit`.
#[inline]
pub(crate) async fn emit(file: &Arc<dyn Storage>, event: Event) {
    if let Some(debugger) = file.debugger()
        && let Some(suspension) = debugger.event(event)
    {
        Box::pin(suspension.resumed()).await;
    }
}
