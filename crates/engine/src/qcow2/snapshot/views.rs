//! [`SnapshotViews`]: which snapshots of an image are open as devices of their own. They keep in
//! memory where their data lies, so nobody may move that meanwhile.

use std::sync::{Arc, OnceLock};

/// See the module's head. None is opened while `resizing` is held.
#[derive(Debug, Default)]
pub(crate) struct SnapshotViews {
    /// Held by every snapshot of this image that is open.
    open: Arc<()>,
    /// `open` of the image whose snapshot this one is.
    of: OnceLock<Arc<()>>,
}

impl SnapshotViews {
    /// Notes that a snapshot is open, as long as the image is there whose `view` this is.
    pub(crate) fn note(&self, view: &SnapshotViews) {
        let is_first = view.of.set(self.open.clone()).is_ok();
        debug_assert!(is_first, "it is a snapshot of one image");
    }

    /// Whether a snapshot of this image is open.
    pub(crate) fn are_open(&self) -> bool {
        Arc::strong_count(&self.open) > 1
    }
}
