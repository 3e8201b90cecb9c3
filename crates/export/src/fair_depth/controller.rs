//! How many requests an export may have in flight while another one has few: found by trying.
//!
//! How much deep queues cost a shallow one is a matter of the device. One that works on a single
//! request at a time has everybody wait for the whole queue; one that works on a thousand has
//! nobody wait. So the time of shallow requests is taken twice: for a moment with almost nothing
//! else in flight, and then with the deep queues going on. Deep queues get as much room as leaves
//! a shallow one half of the speed that it has alone.

use std::time::Duration;

/// No bound.
pub(super) const UNBOUNDED: usize = usize::MAX;
/// Deep queues are never held to less, but for the moments in which the device is measured.
const LEAST: usize = 4;
/// A bound that grows beyond this is none.
const MOST: usize = 128;
/// What a shallow request may take in any case: shorter times are the processor's, not a device's.
const PATIENCE_NS: u64 = 100_000;
/// Requests whose time is taken before something is concluded.
const SAMPLES: u32 = 8;
/// The device is measured for no longer than this.
const LONGEST_PROBE_NS: u64 = Duration::from_millis(20).as_nanos() as u64;
/// So much longer do deep queues go on than they are held up.
const PROBE_SHARE: u64 = 50;
/// The device is measured again after this at the earliest.
const PROBE_INTERVAL_NS: u64 = Duration::from_millis(500).as_nanos() as u64;
/// Without a request for so long, all that was found is forgotten.
const LAPSE_NS: u64 = Duration::from_secs(1).as_nanos() as u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    /// Nothing is known.
    #[default]
    Unknown,
    /// What deep queues have in flight ends.
    Draining,
    /// The device has little to do.
    Probing,
    /// Deep queues go on, within the bound.
    Sharing,
}

/// Finds the bound. All times are in nanoseconds since one beginning.
#[derive(Debug, Default)]
pub(super) struct Controller {
    phase: Phase,
    /// When the phase began, when it ends at the earliest.
    phase_begun: u64,
    phase_end: u64,
    /// What deep queues may have in flight while they share; zero before it is known.
    bound: usize,
    /// How long a shallow request takes with little else in flight.
    alone_ns: u64,
    /// Requests that began after this are counted.
    counted_from: u64,
    count: u32,
    sum_ns: u64,
    last: u64,
    next_probe: u64,
}

impl Controller {
    /// Takes in that a shallow request has ended; what each export may have in flight from now on.
    pub(super) fn ended(&mut self, began: u64, now: u64) -> usize {
        if self.phase == Phase::Unknown || now.saturating_sub(self.last) > LAPSE_NS {
            let unknown = Controller::default();
            *self = Controller {
                bound: UNBOUNDED,
                ..unknown
            };
            self.drain(now.saturating_sub(began), now);
        }
        self.last = now;
        if began >= self.counted_from {
            self.count += 1;
            self.sum_ns += now.saturating_sub(began);
        }
        match self.phase {
            Phase::Draining if now >= self.phase_end => {
                self.enter(Phase::Probing, now);
                self.phase_end = now + LONGEST_PROBE_NS;
            }
            Phase::Probing if self.is_probed(now) => {
                self.alone_ns = self.mean_ns();
                let held_up = now - self.phase_begun;
                self.next_probe = now + PROBE_INTERVAL_NS.max(PROBE_SHARE * held_up);
                self.enter(Phase::Sharing, now);
                // What is let go now takes its time to show.
                self.counted_from = now + self.alone_ns;
            }
            Phase::Sharing if self.count >= SAMPLES => self.adapt(now),
            _ => {}
        }
        match self.phase {
            Phase::Draining | Phase::Probing => 1,
            Phase::Unknown | Phase::Sharing => self.bound,
        }
    }

    fn enter(&mut self, phase: Phase, now: u64) {
        self.phase = phase;
        if phase != Phase::Probing {
            self.phase_begun = now;
        }
        (self.counted_from, self.count, self.sum_ns) = (now, 0, 0);
    }

    /// Holds deep queues up until what they have in flight is done.
    fn drain(&mut self, request_ns: u64, now: u64) {
        self.enter(Phase::Draining, now);
        self.phase_end = now + (2 * request_ns).min(4 * LONGEST_PROBE_NS);
    }

    fn is_probed(&self, now: u64) -> bool {
        self.count >= SAMPLES || self.count > 0 && now >= self.phase_end
    }

    fn mean_ns(&self) -> u64 {
        self.sum_ns / u64::from(self.count.max(1))
    }

    /// Concludes from the requests that were counted.
    fn adapt(&mut self, now: u64) {
        let mean_ns = self.mean_ns().max(1);
        let goal_ns = (2 * self.alone_ns).max(PATIENCE_NS);
        if mean_ns > goal_ns {
            let held = self.bound.min(MOST);
            let wanted = (held as u64).saturating_mul(goal_ns) / mean_ns;
            self.bound = (wanted as usize)
                .clamp(held / 4, held - held / 8)
                .max(LEAST);
        } else if mean_ns < goal_ns - goal_ns / 4 && self.bound != UNBOUNDED {
            self.bound += self.bound / 4 + 1;
            if self.bound > MOST {
                self.bound = UNBOUNDED;
            }
        }
        if now >= self.next_probe {
            return self.drain(mean_ns, now);
        }
        self.enter(Phase::Sharing, now);
        self.counted_from = now + mean_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shallow client beside a deep one, on a device that takes so long with so many requests
    /// in flight; for so long. What the bound was during each of its requests.
    fn beside(
        latency_ns: impl Fn(usize) -> u64,
        depth: usize,
        time: Duration,
    ) -> Vec<(u64, usize)> {
        let mut controller = Controller::default();
        let (mut now, mut bound, mut bounds) = (0, UNBOUNDED, Vec::new());
        // What is in flight follows the bound with the time that it takes.
        let mut in_flight = depth;
        while now < time.as_nanos() as u64 {
            let took = latency_ns(in_flight + 1);
            in_flight = depth.min(bound);
            bound = controller.ended(now, now + took);
            now += took;
            bounds.push((took, bound));
        }
        bounds
    }

    /// The time that the shallow client's requests took on average once all is found, and the
    /// share of time in which the deep one was held to one request.
    fn settled(bounds: &[(u64, usize)]) -> (u64, f64) {
        let half = &bounds[bounds.len() / 2..];
        let sum: u64 = half.iter().map(|(took, _)| took).sum();
        let held = half.iter().filter(|(_, bound)| *bound == 1);
        let held: u64 = held.map(|(took, _)| took).sum();
        (sum / half.len() as u64, held as f64 / sum as f64)
    }

    #[test]
    fn on_a_device_that_does_one_thing_at_a_time_a_shallow_queue_keeps_half_its_speed() {
        for alone_ns in [50_000, 500_000, 5_000_000] {
            let serial = |in_flight: usize| alone_ns * (2 + in_flight as u64) / 3;
            let bounds = beside(serial, 256, Duration::from_secs(20));
            let (mean_ns, held) = settled(&bounds);
            assert!(mean_ns < 5 * alone_ns / 2, "{alone_ns}: {mean_ns}");
            assert!(held < 0.05, "{alone_ns}: {held}");
            let least = bounds
                .iter()
                .filter(|(_, bound)| *bound > 1)
                .min_by_key(|b| b.1);
            assert!(least.is_some_and(|(_, bound)| *bound >= LEAST));
        }
    }

    #[test]
    fn on_a_device_that_does_all_at_once_nobody_is_held_up() {
        for alone_ns in [10_000, 80_000, 10_000_000] {
            let bounds = beside(|_| alone_ns, 256, Duration::from_secs(20));
            let (_, held) = settled(&bounds);
            assert!(held < 0.05, "{alone_ns}: {held}");
            assert!(
                bounds
                    .iter()
                    .all(|(_, bound)| [1, UNBOUNDED].contains(bound))
            );
        }
    }

    #[test]
    fn what_takes_less_than_any_disk_holds_nobody_up() {
        let bounds = beside(|all| 300 * all as u64, 256, Duration::from_secs(2));
        assert!(
            bounds
                .iter()
                .all(|(_, bound)| [1, UNBOUNDED].contains(bound))
        );
    }

    #[test]
    fn a_device_that_gets_better_is_used() {
        let mut controller = Controller::default();
        let mut now = 0;
        let mut bound = UNBOUNDED;
        let mut play = |latency: &dyn Fn(usize) -> u64, requests: usize| {
            for _ in 0..requests {
                let took = latency(bound.min(256) + 1);
                bound = controller.ended(now, now + took);
                now += took;
            }
            bound
        };
        let bounded = play(&|all| 50_000 * all as u64, 20_000);
        assert!((1..=16).contains(&bounded), "{bounded}");
        play(&|_| 60_000, 200_000);
        assert_eq!(controller.bound, UNBOUNDED);
    }
}
