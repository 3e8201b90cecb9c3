//! How much is done in a second: [`Speed`], a limit that can be changed while something is
//! done, and [`RateLimit`], which keeps to it.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use event_listener::Event;
use futures_util::future::select;
use vellum_io::lane::sleep;

/// How fast something may be done, now or later.
#[derive(Debug, Default)]
pub struct Speed {
    /// 0 is no limit.
    bytes_per_second: AtomicU64,
    changed: Event,
}

/// Spreads work so that it stays below a [`Speed`].
pub(crate) struct RateLimit {
    speed: Arc<Speed>,
    /// What the limit was since `started`.
    bytes_per_second: u64,
    started: Instant,
    granted_bytes: u64,
}

impl Speed {
    /// So many bytes a second at most; 0 for as many as there can be.
    pub fn new(bytes_per_second: u64) -> Arc<Self> {
        let speed = Speed::default();
        speed.set(bytes_per_second);
        Arc::new(speed)
    }

    /// The limit, in bytes a second; 0 if there is none.
    pub fn get(&self) -> u64 {
        self.bytes_per_second.load(Ordering::Relaxed)
    }

    /// Sets the limit, for what runs too.
    pub fn set(&self, bytes_per_second: u64) {
        self.bytes_per_second
            .store(bytes_per_second, Ordering::Relaxed);
        self.changed.notify(usize::MAX);
    }
}

impl RateLimit {
    pub(crate) fn new(speed: Arc<Speed>) -> Self {
        RateLimit {
            bytes_per_second: speed.get(),
            speed,
            started: Instant::now(),
            granted_bytes: 0,
        }
    }

    /// Waits until so many bytes may be done.
    pub(crate) async fn wait_for(&mut self, len_bytes: u64) {
        let speed = self.speed.clone();
        loop {
            let changed = speed.changed.listen();
            self.follow(speed.get());
            let due = self.due();
            let passed = self.started.elapsed();
            if due <= passed {
                break;
            }
            select(pin!(sleep(due - passed)), changed).await;
        }
        self.granted_bytes = self.granted_bytes.saturating_add(len_bytes);
    }

    /// Counts bytes that were done just now, and waits until the limit has them worked off.
    pub(crate) async fn spend(&mut self, len_bytes: u64) {
        self.granted_bytes = self.granted_bytes.saturating_add(len_bytes);
        self.wait_for(0).await;
    }

    /// When what was granted is worked off, from `started` on.
    fn due(&self) -> Duration {
        if self.bytes_per_second == 0 {
            return Duration::ZERO;
        }
        let seconds = self.granted_bytes as f64 / self.bytes_per_second as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// Goes on with another limit; what was granted beyond the old one is still owed.
    fn follow(&mut self, bytes_per_second: u64) {
        if bytes_per_second == self.bytes_per_second {
            return;
        }
        let owed = self.due().saturating_sub(self.started.elapsed());
        let owed_bytes = owed.as_secs_f64() * self.bytes_per_second as f64;
        self.granted_bytes = owed_bytes as u64;
        self.bytes_per_second = bytes_per_second;
        self.started = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use vellum_io::lane::block_on;

    use super::*;

    #[test]
    fn who_waits_hears_of_another_speed() {
        block_on(async {
            let speed = Speed::new(1);
            let mut limit = RateLimit::new(speed.clone());
            limit.wait_for(1 << 30).await;
            let mut waiting = Box::pin(limit.wait_for(1));
            assert!(waiting.as_mut().now_or_never().is_none());
            speed.set(1 << 20);
            assert!(
                waiting.as_mut().now_or_never().is_none(),
                "it is still owed"
            );
            speed.set(0);
            assert!(waiting.as_mut().now_or_never().is_some());
            drop(waiting);
            // Nothing is owed of what was done without a limit.
            speed.set(1);
            assert!(limit.wait_for(1).now_or_never().is_some());
            assert!(limit.wait_for(1).now_or_never().is_none());
        });
    }
}
