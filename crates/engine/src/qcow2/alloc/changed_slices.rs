//! [`ChangedSlices`]: what of the refcounts has changed while somebody counts.

use std::collections::HashSet;

use parking_lot::Mutex;

/// Slices of refcount blocks that have changed, by their keys, while somebody counts.
#[derive(Debug, Default)]
pub(super) struct ChangedSlices {
    /// One counts at a time.
    turn: async_lock::Mutex<()>,
    /// `None` while nobody counts.
    keys: Mutex<Option<HashSet<u64>>>,
}

impl ChangedSlices {
    /// Notes a slice that changes. Call it with the slice locked, or before anybody finds it.
    pub(super) fn note(&self, key: u64) {
        if let Some(keys) = &mut *self.keys.lock() {
            keys.insert(key);
        }
    }
}

/// Somebody counts.
pub(super) struct Counting<'a> {
    changed: &'a ChangedSlices,
    _turn: async_lock::MutexGuard<'a, ()>,
}

impl<'a> Counting<'a> {
    pub(super) async fn begin(changed: &'a ChangedSlices) -> Self {
        let _turn = changed.turn.lock().await;
        *changed.keys.lock() = Some(HashSet::new());
        Counting { changed, _turn }
    }

    /// What has changed since the last call.
    pub(super) fn take(&self) -> HashSet<u64> {
        self.changed
            .keys
            .lock()
            .replace(HashSet::new())
            .unwrap_or_default()
    }
}

impl Drop for Counting<'_> {
    fn drop(&mut self) {
        *self.changed.keys.lock() = None;
    }
}
