//! `cache-clean-interval`: tables that nobody used for that long leave memory.

use std::sync::{Arc, Weak};
use std::time::Duration;

use vellum::qcow2::Qcow2;
use vellum_io::{lane, spawn};

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

/// How long what is left of an image that has gone may stay: a server opens thousands.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);

async fn clean(image: Weak<Qcow2>, interval: Duration) {
    loop {
        let mut rest = interval;
        while !rest.is_zero() && image.strong_count() > 0 {
            let step = rest.min(LONGEST_SLEEP);
            lane::sleep(step).await;
            rest -= step;
        }
        match image.upgrade() {
            Some(image) => image.clean_caches(),
            None => return,
        }
    }
}
