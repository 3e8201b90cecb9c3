//! What becomes of an image whose metadata contradicts itself or cannot be written: it is marked
//! corrupt, users are told once, and changes are refused from then on.

use super::fail_stop::State;
use crate::qcow2::image::Image;
use crate::qcow2::messages::Corruption;
use std::sync::atomic::Ordering;
use tracing::trace;
use vellum_format::features::Incompatible;
use vellum_io::{Error, ErrorKind};

impl Image {
    /// Deals with metadata that contradicts itself: a writable image is marked
    /// corrupt and accepts no more changes, so that the damage does not spread.
    pub(crate) async fn mark_corrupt(&self, error: Error) -> Error {
        let ours = error.target_name().is_none_or(|name| name == self.name);
        let error = self.name_error(error);
        let stopped = || self.fail_stop.check("write", &self.name).is_err();
        if error.kind() != ErrorKind::Corrupt || !ours || stopped() {
            return error;
        }
        self.say_corrupt(&error);
        if self.read_only {
            return error;
        }
        self.stop_changes(error.clone());
        if self.geometry.version >= 3 {
            let corrupt = |bits: Incompatible| bits.with(Incompatible::CORRUPT);
            // The first error is the one to report, whether or not the mark holds.
            drop(self.change_incompatible(corrupt).await);
            // Also if it may not: whoever writes the other marks writes this one again.
            self.change_header(|header| header.incompatible = corrupt(header.incompatible));
        }
        error
    }

    /// Tells users of metadata that contradicts itself; of several faults of an image
    /// that is only read, the first.
    fn say_corrupt(&self, error: &Error) {
        let why = error.message();
        if !self.read_only {
            self.messages.say(&format!(
                "qcow2: Marking image as corrupt: {why}; further corruption events will be \
                 suppressed"
            ));
        } else if !self.fail_stop.said.swap(true, Ordering::Relaxed) {
            self.messages.say(&format!(
                "qcow2: Image is corrupt: {why}; further non-fatal corruption events will be \
                 suppressed"
            ));
        } else {
            return;
        }
        self.messages.tell_corruption(&Corruption {
            message: why,
            offset_bytes: error.offset_bytes(),
            is_fatal: !self.read_only,
        });
    }

    /// Stops all changes from now on.
    pub(crate) fn stop_changes(&self, reason: Error) {
        trace!(name: "qcow2_changes_stopped", image = self.name, reason = %reason);
        self.fail_stop.change(|state| match state {
            State::Open => State::Broken(reason),
            State::Unwritten(first) => State::Broken(first),
            stopped => stopped,
        });
    }

    /// Stops all changes since metadata could not be written; the close tries again.
    /// A failed barrier is different: what it should have made durable may be lost.
    pub(crate) fn stop_changes_until_retry(&self, reason: Error) {
        trace!(name: "qcow2_changes_stopped", image = self.name, reason = %reason);
        self.fail_stop.change(|state| match state {
            State::Open => State::Unwritten(reason),
            stopped => stopped,
        });
    }

    /// Lets the close try once more to write what could not be written.
    pub(crate) fn allow_retry(&self) {
        self.fail_stop.change(|state| match state {
            State::Unwritten(_) => State::Open,
            other => other,
        });
    }

    /// Refuses all changes from now on, for the image is closed.
    pub(crate) fn end_use(&self) {
        self.fail_stop.change(|_| State::Ended);
    }

    /// Whether the image is closed.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(*self.fail_stop.lock(), State::Ended)
    }
}
