//! Leaky buckets: how fast requests may go, and how long the next one waits.
//! Pure arithmetic over given moments.

use std::time::{Duration, Instant};

/// No rate may be higher than this, per second.
pub const MAX_RATE: u64 = 1_000_000_000_000_000;

/// One limit: units per second on average, and how far above that for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// Units per second in the long run; 0 means no limit.
    pub average: u64,
    /// Units per second in a burst; 0 means only a tenth of a second's worth.
    pub burst: u64,
    /// How long a burst lasts, in seconds.
    pub burst_seconds: u64,
}

impl Default for Limit {
    fn default() -> Self {
        Limit::rate(0)
    }
}

impl Limit {
    /// A plain rate per second.
    pub const fn rate(average: u64) -> Limit {
        Limit {
            average,
            burst: 0,
            burst_seconds: 1,
        }
    }
}

/// The limits of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ThrottleLimits {
    /// Bytes of all requests.
    pub bps_total: Limit,
    /// Bytes of reads.
    pub bps_read: Limit,
    /// Bytes of writes, zeroes and discards.
    pub bps_write: Limit,
    /// All requests.
    pub iops_total: Limit,
    /// Reads.
    pub iops_read: Limit,
    /// Writes, zeroes and discards.
    pub iops_write: Limit,
    /// A request counts once for each of so many bytes; 0: once.
    pub iops_size_bytes: u64,
}

impl ThrottleLimits {
    /// No limits.
    pub const NONE: ThrottleLimits = ThrottleLimits {
        bps_total: Limit::rate(0),
        bps_read: Limit::rate(0),
        bps_write: Limit::rate(0),
        iops_total: Limit::rate(0),
        iops_read: Limit::rate(0),
        iops_write: Limit::rate(0),
        iops_size_bytes: 0,
    };

    fn all(&self) -> [Limit; 6] {
        [
            self.bps_total,
            self.bps_read,
            self.bps_write,
            self.iops_total,
            self.iops_read,
            self.iops_write,
        ]
    }

    /// Why these limits cannot be kept together, in QEMU's words.
    pub fn contradiction(&self) -> Option<String> {
        let both = |total: Limit, read: Limit, write: Limit| {
            (total.average != 0 && (read.average != 0 || write.average != 0))
                || (total.burst != 0 && (read.burst != 0 || write.burst != 0))
        };
        if both(self.bps_total, self.bps_read, self.bps_write)
            || both(self.iops_total, self.iops_read, self.iops_write)
        {
            return Some(
                "bps/iops/max total values and read/write values cannot be used at the same time"
                    .to_owned(),
            );
        }
        let has_iops = [self.iops_total, self.iops_read, self.iops_write]
            .iter()
            .any(|limit| limit.average != 0);
        if self.iops_size_bytes != 0 && !has_iops {
            return Some("iops size requires an iops value to be set".to_owned());
        }
        self.all().into_iter().find_map(contradiction)
    }
}

/// Why one limit cannot be kept.
fn contradiction(limit: Limit) -> Option<String> {
    if limit.average > MAX_RATE || limit.burst > MAX_RATE {
        return Some(format!(
            "bps/iops/max values must be within [0, {MAX_RATE}]"
        ));
    }
    let text = if limit.burst_seconds == 0 {
        "the burst length cannot be 0"
    } else if limit.burst_seconds > 1 && limit.burst == 0 {
        "burst length set without burst rate"
    } else if limit.burst != 0 && limit.burst_seconds > MAX_RATE / limit.burst {
        "burst length too high for this burst rate"
    } else if limit.burst != 0 && limit.average == 0 {
        "bps_max/iops_max require corresponding bps/iops values"
    } else if limit.burst != 0 && limit.burst < limit.average {
        "bps_max/iops_max cannot be lower than bps/iops"
    } else {
        return None;
    };
    Some(text.to_owned())
}

/// Whether a request reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

#[derive(Debug)]
struct Bucket {
    limit: Limit,
    level: f64,
    burst_level: f64,
}

impl Bucket {
    fn leak(&mut self, seconds: f64) {
        let leak = |level: f64, rate: u64| (level - rate as f64 * seconds).max(0.0);
        self.level = leak(self.level, self.limit.average);
        self.burst_level = leak(self.burst_level, self.limit.burst);
    }

    /// How many seconds it takes until a request fits again.
    fn wait_seconds(&self) -> f64 {
        let limit = &self.limit;
        if limit.average == 0 {
            return 0.0;
        }
        let size = match limit.burst {
            0 => limit.average as f64 / 10.0,
            burst => (burst * limit.burst_seconds) as f64,
        };
        let extra = self.level - size;
        if extra > 0.0 {
            return extra / limit.average as f64;
        }
        if limit.burst_seconds > 1 {
            let extra = self.burst_level - limit.burst as f64 / 10.0;
            if extra > 0.0 {
                return extra / limit.burst as f64;
            }
        }
        0.0
    }

    fn count(&mut self, units: f64) {
        self.level += units;
        self.burst_level += units;
    }
}

/// The buckets of a group, in the order of [`ThrottleLimits::all`].
#[derive(Debug)]
pub(super) struct Buckets {
    buckets: [Bucket; 6],
    iops_size_bytes: u64,
    leaked_at: Option<Instant>,
}

impl Buckets {
    pub(super) fn new(limits: ThrottleLimits) -> Self {
        Buckets {
            buckets: limits.all().map(|limit| Bucket {
                limit,
                level: 0.0,
                burst_level: 0.0,
            }),
            iops_size_bytes: limits.iops_size_bytes,
            leaked_at: None,
        }
    }

    /// Which buckets bytes go into, and which requests.
    fn indexes(direction: Direction) -> ([usize; 2], [usize; 2]) {
        match direction {
            Direction::Read => ([0, 1], [3, 4]),
            Direction::Write => ([0, 2], [3, 5]),
        }
    }

    /// How long the next request has to wait, if it has to.
    pub(super) fn wait(&mut self, direction: Direction, now: Instant) -> Option<Duration> {
        let passed = self
            .leaked_at
            .map_or(Duration::ZERO, |then| now.saturating_duration_since(then));
        self.leaked_at = Some(now);
        for bucket in &mut self.buckets {
            bucket.leak(passed.as_secs_f64());
        }
        let (bytes, requests) = Self::indexes(direction);
        let seconds = bytes
            .into_iter()
            .chain(requests)
            .map(|index| self.buckets[index].wait_seconds())
            .fold(0.0, f64::max);
        // At least a little, so that rounding makes nobody spin.
        (seconds > 0.0).then(|| Duration::from_secs_f64(seconds.clamp(1e-6, 86_400.0)))
    }

    /// Counts a request.
    pub(super) fn count(&mut self, direction: Direction, len_bytes: u64) {
        let units = match self.iops_size_bytes {
            0 => 1.0,
            size => (len_bytes as f64 / size as f64).max(1.0),
        };
        let (bytes, requests) = Self::indexes(direction);
        for index in bytes {
            self.buckets[index].count(len_bytes as f64);
        }
        for index in requests {
            self.buckets[index].count(units);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_told_in_qemus_words() {
        let limits = |change: fn(&mut ThrottleLimits)| {
            let mut limits = ThrottleLimits::default();
            change(&mut limits);
            limits.contradiction()
        };
        assert_eq!(limits(|_| ()), None);
        assert_eq!(limits(|l| l.bps_read = Limit::rate(1)), None);
        for (change, text) in [
            (
                (|l| {
                    l.bps_total = Limit::rate(1);
                    l.bps_read = Limit::rate(1);
                }) as fn(&mut ThrottleLimits),
                "bps/iops/max total values and read/write values cannot be used at the same time",
            ),
            (
                |l| l.iops_size_bytes = 1,
                "iops size requires an iops value to be set",
            ),
            (
                |l| l.bps_total.burst_seconds = 0,
                "the burst length cannot be 0",
            ),
            (
                |l| l.bps_total.burst_seconds = 2,
                "burst length set without burst rate",
            ),
            (
                |l| l.bps_total.burst = 2,
                "bps_max/iops_max require corresponding bps/iops values",
            ),
            (
                |l| {
                    l.bps_total.average = 3;
                    l.bps_total.burst = 2;
                },
                "bps_max/iops_max cannot be lower than bps/iops",
            ),
        ] {
            assert_eq!(limits(change).as_deref(), Some(text));
        }
    }

    #[test]
    fn a_full_bucket_waits_for_what_is_too_much() {
        let mut buckets = Buckets::new(ThrottleLimits {
            bps_read: Limit::rate(1000),
            ..ThrottleLimits::default()
        });
        let now = Instant::now();
        assert_eq!(buckets.wait(Direction::Read, now), None);
        buckets.count(Direction::Read, 600);
        // 100 bytes fit; the other 500 leak in half a second.
        let wait = buckets.wait(Direction::Read, now).unwrap();
        assert_eq!(wait.as_millis(), 500);
        assert_eq!(buckets.wait(Direction::Write, now), None);
        let later = now + Duration::from_millis(501);
        assert_eq!(buckets.wait(Direction::Read, later), None);
    }

    #[test]
    fn a_long_burst_has_its_own_rate() {
        let mut buckets = Buckets::new(ThrottleLimits {
            iops_total: Limit {
                average: 10,
                burst: 100,
                burst_seconds: 10,
            },
            ..ThrottleLimits::default()
        });
        let now = Instant::now();
        for _ in 0..11 {
            assert_eq!(buckets.wait(Direction::Write, now), None);
            buckets.count(Direction::Write, 1);
        }
        let wait = buckets.wait(Direction::Write, now).unwrap();
        assert_eq!(wait.as_millis(), 10);
    }
}
