//! A limit on how much is done in a second.

use std::time::{Duration, Instant};

/// Spreads work so that it stays below a number of bytes a second.
pub(crate) struct RateLimit {
    bytes_per_second: u64,
    started: Instant,
    granted_bytes: u64,
}

impl RateLimit {
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        RateLimit {
            bytes_per_second: bytes_per_second.max(1),
            started: Instant::now(),
            granted_bytes: 0,
        }
    }

    pub(crate) async fn wait_for(&mut self, len_bytes: u64) {
        let due = Duration::from_secs_f64(self.granted_bytes as f64 / self.bytes_per_second as f64);
        self.granted_bytes += len_bytes;
        let passed = self.started.elapsed();
        if due > passed {
            vellum_storage::lane::sleep(due - passed).await;
        }
    }
}
