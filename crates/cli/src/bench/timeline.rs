//! What a run did as time went on: its requests in intervals, and how long the slowest of them
//! took. No I/O; `load` notes what happens, the outputs read the [`Timeline`].

use std::time::{Duration, Instant};

/// A single interval holds too few requests to say how slow a run gets: so many in a row do.
pub(super) const SMOOTHED_INTERVALS: usize = 10;
/// Of the requests of a run, this share takes no longer than what is told.
const MOST: f64 = 0.999;

/// A run over time.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Timeline {
    pub(super) interval_seconds: f64,
    /// Requests that ended in each whole interval.
    pub(super) operations: Vec<u64>,
    /// How long requests and flushes take at most, but for one in a thousand, in microseconds.
    pub(super) request_us: Option<f64>,
    pub(super) flush_us: Option<f64>,
    /// How long the image took to close: what a write log still held is brought into it then.
    pub(super) close_seconds: f64,
}

impl Timeline {
    /// Requests a second in the slowest [`SMOOTHED_INTERVALS`] in a row, or in the whole of a run
    /// that is shorter.
    pub(super) fn lowest_iops(&self) -> Option<f64> {
        let count = self.operations.len().min(SMOOTHED_INTERVALS);
        if count == 0 {
            return None;
        }
        let sums = self.operations.windows(count).map(|w| w.iter().sum());
        sums.min().map(|sum| self.iops(sum, count))
    }

    /// The middle of each `count` intervals in a row, in seconds, and their requests a second.
    pub(super) fn points(&self, count: usize) -> impl Iterator<Item = (f64, f64)> {
        let count = count.max(1);
        self.operations
            .chunks(count)
            .enumerate()
            .map(move |(index, some)| {
                let middle = (index * count) as f64 + some.len() as f64 / 2.0;
                let iops = self.iops(some.iter().sum(), some.len());
                (middle * self.interval_seconds, iops)
            })
    }

    fn iops(&self, operations: u64, intervals: usize) -> f64 {
        let seconds = intervals as f64 * self.interval_seconds;
        operations as f64 / seconds.max(f64::MIN_POSITIVE)
    }
}

/// Notes the requests of a run as they end.
#[derive(Debug)]
pub(super) struct Recorder {
    start: Instant,
    interval: Duration,
    operations: Vec<u64>,
    requests_us: Vec<u32>,
    flushes_us: Vec<u32>,
}

impl Recorder {
    /// Of a run that begins now.
    pub(super) fn begin(interval: Duration) -> Recorder {
        Recorder {
            start: Instant::now(),
            interval,
            operations: Vec::new(),
            requests_us: Vec::new(),
            flushes_us: Vec::new(),
        }
    }

    /// A request has ended; returns how many have so far.
    pub(super) fn request(&mut self, begun: Instant) -> u64 {
        let index = self.intervals(self.start.elapsed());
        if index >= self.operations.len() {
            self.operations.resize(index + 1, 0);
        }
        self.operations[index] += 1;
        self.requests_us.push(micros(begun.elapsed()));
        self.requests_us.len() as u64
    }

    /// A flush has ended.
    pub(super) fn flush(&mut self, begun: Instant) {
        self.flushes_us.push(micros(begun.elapsed()));
    }

    /// The run is over now: what it did. An interval that has not ended is left out, since it
    /// would look like a slow one.
    pub(super) fn end(mut self) -> Timeline {
        let whole = self.intervals(self.start.elapsed());
        self.operations.resize(whole, 0);
        Timeline {
            interval_seconds: self.interval.as_secs_f64(),
            operations: self.operations,
            request_us: most(self.requests_us),
            flush_us: most(self.flushes_us),
            close_seconds: 0.0,
        }
    }

    /// Whole intervals in a time.
    fn intervals(&self, time: Duration) -> usize {
        (time.as_nanos() / self.interval.as_nanos().max(1)) as usize
    }
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

/// What [`MOST`] of the values do not exceed.
fn most(mut values: Vec<u32>) -> Option<f64> {
    let rank = (values.len() as f64 * MOST).ceil() as usize;
    let index = rank.checked_sub(1)?;
    let (_, value, _) = values.select_nth_unstable(index);
    Some(f64::from(*value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(operations: Vec<u64>) -> Timeline {
        Timeline {
            interval_seconds: 0.5,
            operations,
            ..Timeline::default()
        }
    }

    #[test]
    fn the_lowest_is_that_of_several_intervals() {
        assert_eq!(timeline(Vec::new()).lowest_iops(), None);
        assert_eq!(timeline(vec![1, 3]).lowest_iops(), Some(4.0), "all of it");
        let mut operations = vec![100; 30];
        operations[20] = 0;
        assert_eq!(timeline(operations).lowest_iops(), Some(180.0));
    }

    #[test]
    fn points_stand_in_the_middle_of_their_intervals() {
        let timeline = timeline(vec![1, 2, 3, 4, 6]);
        let points: Vec<_> = timeline.points(2).collect();
        assert_eq!(points, [(0.5, 3.0), (1.5, 7.0), (2.25, 12.0)]);
    }

    #[test]
    fn one_of_a_thousand_may_take_longer() {
        assert_eq!(most(Vec::new()), None);
        assert_eq!(most(vec![7]), Some(7.0));
        assert_eq!(most((1..=1000).rev().collect()), Some(999.0));
    }

    #[test]
    fn an_interval_that_has_not_ended_is_left_out() {
        let mut recorder = Recorder::begin(Duration::from_secs(3600));
        let begun = Instant::now();
        assert_eq!(recorder.request(begun), 1);
        assert_eq!(recorder.request(begun), 2);
        recorder.flush(begun);
        let timeline = recorder.end();
        assert!(timeline.operations.is_empty(), "{timeline:?}");
        assert!(timeline.request_us.is_some() && timeline.flush_us.is_some());
    }
}
