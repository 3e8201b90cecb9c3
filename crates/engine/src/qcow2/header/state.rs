//! [`HeaderState`]: the header of an open image in memory, and whose turn it is to write it.

use std::sync::Arc;

use parking_lot::Mutex;

use vellum_format::header::Header;

/// The header of an open image.
#[derive(Debug)]
pub(crate) struct HeaderState {
    current: Mutex<Arc<Header>>,
    /// One at a time writes to the header on disk.
    writing: async_lock::Mutex<()>,
}

impl HeaderState {
    /// The header as it was read.
    pub(crate) fn new(header: Header) -> Self {
        HeaderState {
            current: Mutex::new(Arc::new(header)),
            writing: async_lock::Mutex::new(()),
        }
    }

    /// The header as it is now.
    pub(crate) fn get(&self) -> Arc<Header> {
        self.current.lock().clone()
    }

    /// Changes the header in memory.
    pub(super) fn change(&self, change: impl FnOnce(&mut Header)) {
        change(Arc::make_mut(&mut self.current.lock()));
    }

    /// Waits until nobody else writes to the header on disk, and keeps others from it.
    pub(crate) async fn lock_for_writing(&self) -> async_lock::MutexGuard<'_, ()> {
        self.writing.lock().await
    }
}
