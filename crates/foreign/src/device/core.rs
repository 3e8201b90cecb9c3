//! [`Core`]: what requests of one device share, and what each of them asks first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use vellum::{BlockDevice, Error, ErrorKind, Result, Storage};
use vellum_io::changes::Changes;
use vellum_io::range_lock::RangeLock;
use vellum_storage::{Event, EventListener};

use super::commits::Commits;
use super::inflated::Inflated;
use crate::facts::Facts;
use crate::inflations::Inflations;
use crate::layout::Layout;

#[derive(Debug)]
pub(super) struct Core<L: Layout> {
    pub(super) layout: L,
    pub(super) name: Arc<str>,
    pub(super) facts: Mutex<Arc<Facts>>,
    /// Who wants to be told of events of the image's file.
    pub(super) listener: Option<Arc<dyn EventListener>>,
    pub(super) backing: Option<Arc<dyn BlockDevice>>,
    pub(super) read_only: bool,
    /// In bytes of the guest.
    pub(super) ranges: Arc<RangeLock>,
    pub(super) changes: Changes,
    pub(super) commits: Commits<L::Changes>,
    /// The size that a resize is about to set, which changes of its own may reach already.
    pub(super) coming_bytes: AtomicU64,
    /// Why there are no more changes.
    pub(super) failure: Mutex<Option<Error>>,
    pub(super) closed: AtomicBool,
    pub(super) inflated: Inflated,
    /// By the generation of `inflated` and the block.
    pub(super) inflations: Inflations<(u64, u64)>,
}

impl<L: Layout> Core<L> {
    pub(super) fn error(&self, kind: ErrorKind, operation: &'static str, message: &str) -> Error {
        Error::new(kind, operation, message).target(&*self.name)
    }

    pub(super) fn check_range(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<()> {
        let end = offset_bytes.checked_add(len_bytes);
        match end.is_some_and(|end| end <= self.layout.size_bytes()) {
            true => Ok(()),
            false => Err(self
                .error(
                    ErrorKind::OutOfRange,
                    operation,
                    "request beyond the end of the device",
                )
                .at(offset_bytes)),
        }
    }

    /// What can be said of a change before it begins.
    pub(super) fn check_change(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<()> {
        if self.read_only {
            return Err(self.error(ErrorKind::ReadOnly, operation, "the device is read-only"));
        }
        self.check_range(operation, offset_bytes, len_bytes)
    }

    pub(super) fn check_changeable(&self) -> Result<()> {
        if let Some(failure) = &*self.failure.lock() {
            return Err(failure.clone());
        }
        if self.closed.load(Ordering::Acquire) {
            let message = "the device is closed";
            return Err(self.error(ErrorKind::InvalidArgument, "write", message));
        }
        Ok(())
    }

    /// Rule 11: nothing is changed any more.
    pub(super) fn fail_stop(&self, error: &Error) {
        self.failure.lock().get_or_insert_with(|| error.clone());
    }

    /// Tells whoever watches the file.
    pub(super) async fn tell(&self, event: Event) {
        if let Some(listener) = &self.listener {
            listener.emit(event).await;
        }
    }

    /// The block around an offset, as the device has it.
    pub(super) fn block_at(&self, offset_bytes: u64) -> std::ops::Range<u64> {
        let block_bytes = self.layout.block_bytes();
        let start = offset_bytes - offset_bytes % block_bytes;
        let coming_bytes = self.coming_bytes.load(Ordering::Acquire);
        let size_bytes = self.layout.size_bytes().max(coming_bytes);
        start..start.saturating_add(block_bytes).min(size_bytes)
    }

    pub(super) fn file(&self, index: usize) -> Result<&Arc<dyn Storage>> {
        let message = "the image has no such file";
        let file = self.layout.files().get(index);
        file.ok_or_else(|| self.error(ErrorKind::Corrupt, "open", message))
    }
}
