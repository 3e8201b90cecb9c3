//! [`PollWindow`]: whether it is worth while for a queue to look for requests before it sleeps.

use std::time::Duration;

/// The first time that a queue looks for requests before it sleeps.
const FIRST_POLL: Duration = Duration::from_micros(4);

/// How long a queue looks for requests before it sleeps: longer where that would have spared it a
/// sleep, not at all where it would not.
#[derive(Debug)]
pub(super) struct PollWindow {
    pub(super) window: Duration,
    limit: Duration,
}

impl PollWindow {
    pub(super) fn new(limit: Duration) -> PollWindow {
        let window = Duration::ZERO;
        PollWindow { window, limit }
    }

    /// Takes in how long a sleep was.
    pub(super) fn adapt(&mut self, slept: Duration) {
        if slept > self.limit {
            self.window = Duration::ZERO;
        } else if slept > self.window {
            self.window = (self.window * 2).max(FIRST_POLL).min(self.limit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_polls_only_where_that_spares_a_sleep_and_never_longer_than_its_limit() {
        let limit = Duration::from_micros(32);
        let mut poll = PollWindow::new(limit);
        assert_eq!(poll.window, Duration::ZERO);
        for _ in 0..10 {
            poll.adapt(Duration::from_micros(30));
            assert!(poll.window <= limit);
        }
        assert_eq!(poll.window, limit);
        poll.adapt(Duration::from_millis(1));
        assert_eq!(poll.window, Duration::ZERO);
        let mut off = PollWindow::new(Duration::ZERO);
        off.adapt(Duration::ZERO);
        assert_eq!(off.window, Duration::ZERO);
    }
}
