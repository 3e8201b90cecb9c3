//! `cache-clean-interval`: tables that nobody used for that long leave memory.

use std::sync::{Arc, Weak};
use std::time::Duration;

use vellum::qcow2::Qcow2;
use vellum_storage::{lane, spawn};

/// QEMU's default, in seconds.
const DEFAULT_INTERVAL_S: u64 = 600;

/// Cleans the image's caches every `interval_s` seconds (0: never) on the lane
/// that opens it, for as long as both exist.
pub(crate) fn start(image: &Arc<Qcow2>, interval_s: Option<u64>) {
    let interval_s = interval_s.unwrap_or(DEFAULT_INTERVAL_S);
    // Longer than any machine runs, and safe to add to any instant.
    let interval_s = interval_s.min(u64::from(u32::MAX));
    if interval_s > 0 {
        drop(spawn(clean(
            Arc::downgrade(image),
            Duration::from_secs(interval_s),
        )));
    }
}

async fn clean(image: Weak<Qcow2>, interval: Duration) {
    loop {
        lane::sleep(interval).await;
        match image.upgrade() {
            Some(image) => image.clean_caches(),
            None => return,
        }
    }
}
