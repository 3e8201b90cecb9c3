//! [`Estimate`]: how long a job will still take, told from how it got on in the last seconds.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::pending;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vellum_io::lane;
use vellum_jobs::job::Status;

use super::Job;

/// How often a running job is looked at.
const PAUSE: Duration = Duration::from_secs(1);
/// So far back counts how it got on.
const WINDOW: Duration = Duration::from_secs(10);
/// Before, nothing can be said.
const SHORTEST: Duration = Duration::from_secs(2);
/// Longer is no estimate.
const LONGEST_SECONDS: f64 = 100.0 * 86_400.0;

/// What was left of a job in the last seconds. It counts what is left and not what is done: a
/// guest that writes makes more of a mirror's work, and one that writes faster than is copied
/// has no end in sight.
#[derive(Debug, Default)]
pub(super) struct Estimate {
    left: VecDeque<(Instant, u64)>,
}

impl Estimate {
    /// Notes what is left now.
    pub(super) fn note(&mut self, now: Instant, left_bytes: u64) {
        self.left.push_back((now, left_bytes));
        while let Some((since, _)) = self.left.front()
            && now.duration_since(*since) > WINDOW
        {
            self.left.pop_front();
        }
    }

    /// Forgets how it got on: it does not go on now.
    pub(super) fn forget(&mut self) {
        self.left.clear();
    }

    /// How long it will take until nothing is left; `None` if that cannot be said, or no end is
    /// in sight.
    pub(super) fn seconds_left(&self, now: Instant, left_bytes: u64) -> Option<u64> {
        let (since, then_bytes) = self.left.front()?;
        let passed = now.duration_since(*since);
        let gone_bytes = then_bytes.checked_sub(left_bytes)?;
        if passed < SHORTEST || gone_bytes == 0 {
            return None;
        }
        let bytes_per_second = gone_bytes as f64 / passed.as_secs_f64();
        let seconds = (left_bytes as f64 / bytes_per_second).ceil();
        (seconds <= LONGEST_SECONDS).then_some(seconds as u64)
    }
}

impl Job {
    /// Follows how it gets on, as long as it runs, if that is wanted.
    pub(super) async fn watch(&self, is_wanted: bool) -> Infallible {
        if !is_wanted {
            pending::<()>().await;
        }
        loop {
            self.until(|job| job.status() == Status::Running).await;
            let (done_bytes, total_bytes) = self.progress();
            let left_bytes = total_bytes.saturating_sub(done_bytes);
            self.estimate.borrow_mut().note(lane::now(), left_bytes);
            lane::sleep(PAUSE).await;
            if self.status() != Status::Running {
                self.estimate.borrow_mut().forget();
            }
        }
    }

    /// How long it will still run, as far as that can be said.
    pub(super) fn seconds_left(&self) -> Option<u64> {
        if self.status() != Status::Running || self.is_paused() {
            return None;
        }
        let (done_bytes, total_bytes) = self.progress();
        let left_bytes = total_bytes.saturating_sub(done_bytes);
        self.estimate.borrow().seconds_left(lane::now(), left_bytes)
    }

    /// Tells that beside the rest, if it can be said.
    pub(super) fn describe_estimate(&self, described: &mut Value) {
        if let Some(seconds) = self.seconds_left() {
            described["x-vellum-seconds-left"] = json!(seconds);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// What is told after each second, of a job of which so much is left each second.
    fn told(left: impl IntoIterator<Item = u64>) -> Vec<Option<u64>> {
        let begun = Instant::now();
        let mut estimate = Estimate::default();
        let seconds = left.into_iter().enumerate().map(|(second, left_bytes)| {
            let now = begun + Duration::from_secs(second as u64);
            estimate.note(now, left_bytes);
            estimate.seconds_left(now, left_bytes)
        });
        seconds.collect()
    }

    #[test]
    fn a_steady_job_is_told_exactly() {
        let told = told((0..=20).map(|second| (200 - 10 * second) * MIB));
        assert_eq!(told[..2], [None, None], "too early");
        for (second, told) in told.iter().enumerate().skip(2) {
            assert_eq!(*told, Some(20 - second as u64), "second {second}");
        }
    }

    #[test]
    fn a_guest_that_writes_as_fast_as_is_copied_has_no_end_in_sight() {
        assert!(told([100 * MIB; 20]).iter().all(Option::is_none));
        let grows = told((0..20).map(|second| (100 + second) * MIB));
        assert!(grows.iter().all(Option::is_none));
        // Half of what is copied is written anew.
        let half = told((0..=10).map(|second| (200 - 5 * second) * MIB));
        assert_eq!(half[10], Some(30));
    }

    #[test]
    fn only_the_last_seconds_count() {
        let fast = (0..50).map(|second| (10_000 - 100 * second) * MIB);
        let slow = (0..20).map(|second| (5_000 - 10 * second) * MIB);
        assert_eq!(told(fast.chain(slow)).last(), Some(&Some(481)));
        let stopped = told(
            (0..5)
                .map(|second| (50 - second) * MIB)
                .chain([45 * MIB; 12]),
        );
        assert_eq!(stopped.last(), Some(&None), "it stands still");
    }

    #[test]
    fn what_takes_years_is_no_estimate() {
        assert_eq!(told([1 << 50, (1 << 50) - 1, (1 << 50) - 2])[2], None);
    }

    #[test]
    fn a_pause_counts_for_nothing() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut estimate = Estimate::default();
        estimate.note(at(0), 100 * MIB);
        estimate.note(at(3), 70 * MIB);
        estimate.forget();
        assert_eq!(estimate.seconds_left(at(100), 70 * MIB), None);
        estimate.note(at(100), 70 * MIB);
        assert_eq!(estimate.seconds_left(at(102), 50 * MIB), Some(5));
    }
}
