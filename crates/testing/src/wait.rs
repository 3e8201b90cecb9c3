//! Waiting for a condition, with a limit.

use std::time::{Duration, Instant};

/// How long anything may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Waits until a condition holds; panics with `what` if it does not within [`PATIENCE`].
#[track_caller]
pub fn until(what: &str, holds: impl FnMut() -> bool) {
    within(PATIENCE, what, holds);
}

/// As [`until`], with another limit.
#[track_caller]
pub fn within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < deadline, "not in {limit:?}: {what}");
        std::thread::sleep(POLL_INTERVAL);
    }
}
