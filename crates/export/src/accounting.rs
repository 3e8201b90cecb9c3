//! What the clients of an export have asked for: how often, how much, how long it took, and what
//! failed. QEMU's `query-blockstats` and `block-latency-histogram-set` say what is counted.
//!
//! Each lane counts in memory of its own, so a request costs two looks at the clock and some
//! additions that no other lane waits for. How long requests take is counted always, in bins that
//! powers of two bound ([`Latencies`]): the bins stand for the number of requests too, so they cost no
//! addition more. Histograms with boundaries of a client's own are counted only where somebody wants
//! them.
//!
//! Invariants:
//! - A request is counted once, when it is answered; one that was refused before it began on the
//!   device is not.
//! - What is read while requests end may miss those that end just then, and nothing else.
//! - An export that nobody has asked for anything has no memory for counts.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use tracing::trace;
use vellum_io::lane;

use crate::fair_depth::{ExportDepth, FairDepth, StreamDepth};
use crate::room::{Room, RoomNotice};

/// So many lanes count apart from each other; more of them share.
const SHARDS: usize = 8;

/// What a request does to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Bytes are read.
    Read,
    /// Bytes or zeroes are written.
    Write,
    /// What was written is made durable.
    Flush,
    /// Space is given back.
    Discard,
}

impl Operation {
    /// All of them.
    pub const ALL: [Operation; 4] = [
        Operation::Read,
        Operation::Write,
        Operation::Flush,
        Operation::Discard,
    ];
}

/// A request that failed.
#[derive(Debug)]
pub struct FailedRequest<'a> {
    /// What it was to do.
    pub operation: Operation,
    /// The system's number of the error.
    pub errno: i32,
    /// What went wrong, in words.
    pub reason: &'a str,
}

type FailureSink = dyn Fn(&FailedRequest<'_>) + Send + Sync;

/// What was counted of one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OperationTotals {
    /// Requests that succeeded.
    pub requests: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// Requests that failed.
    pub failed: u64,
    /// How long those took that succeeded, in nanoseconds.
    pub time_ns: u64,
}

/// Bins of [`Latencies`].
pub const LATENCY_BINS: usize = 23;

/// The first bin holds what took no more nanoseconds than two to this power: 4.096 µs.
const FIRST_BIN_LOG2: u32 = 12;

/// How many requests of one operation took how long, since the export was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Latencies {
    /// Requests by the time that they took: bin `n` holds those beyond the bound of the bin before,
    /// up to [`Latencies::bound_ns`]; the last one all that took longer.
    pub bins: [u64; LATENCY_BINS],
    /// How long all of them took together, in nanoseconds.
    pub time_ns: u64,
}

impl Latencies {
    /// The most nanoseconds that a request of a bin took; `None`: the last one has no bound.
    pub fn bound_ns(bin: usize) -> Option<u64> {
        (bin + 1 < LATENCY_BINS).then(|| 1 << (FIRST_BIN_LOG2 + bin as u32))
    }

    fn bin(took_ns: u64) -> usize {
        // The power of two that is not below it.
        let log2 = u64::BITS - took_ns.saturating_sub(1).leading_zeros();
        (log2.saturating_sub(FIRST_BIN_LOG2) as usize).min(LATENCY_BINS - 1)
    }
}

/// How many requests of one operation took how long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    /// Where one bin ends and the next one begins, in nanoseconds, ascending.
    pub boundaries_ns: Vec<u64>,
    /// Requests that took less than the first boundary, those between it and the second, and so
    /// on: one more than there are boundaries.
    pub bins: Vec<u64>,
}

#[derive(Debug)]
struct Bins {
    boundaries_ns: Vec<u64>,
    bins: Vec<AtomicU64>,
}

#[derive(Debug, Default)]
struct Counters {
    /// Requests that succeeded, by the time that they took.
    bins: [AtomicU64; LATENCY_BINS],
    bytes: AtomicU64,
    failed: AtomicU64,
    time_ns: AtomicU64,
}

/// What some lanes have counted, in memory that no others write to.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    operations: [Counters; 4],
    /// Requests that began.
    begun: AtomicU64,
    /// The end of the last write in the disk.
    highest_written: AtomicU64,
    /// When the last request ended, in nanoseconds since [`Accounting::begun`].
    last_end_ns: AtomicU64,
}

/// Counts the requests of an export.
pub struct Accounting {
    /// Each made by the first lane that counts there.
    shards: [OnceLock<Box<Shard>>; SHARDS],
    begun: Instant,
    has_histograms: AtomicBool,
    histograms: RwLock<[Option<Bins>; 4]>,
    failures: OnceLock<Arc<FailureSink>>,
    pub(crate) depth: ExportDepth,
    pub(crate) room: Arc<Room>,
}

/// A request that is to be counted when it is answered.
#[derive(Debug)]
pub struct StartedRequest {
    operation: Operation,
    offset_bytes: u64,
    len_bytes: u64,
    at: Instant,
    /// Little else was in flight.
    shallow: bool,
}

/// The shard of the calling thread.
fn shard_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static OWN: Cell<Option<usize>> = const { Cell::new(None) });
    OWN.with(|own| match own.get() {
        Some(number) => number,
        None => {
            let number = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
            own.set(Some(number));
            number
        }
    })
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Default for Accounting {
    fn default() -> Self {
        Accounting::among(&FairDepth::default())
    }
}

impl Accounting {
    /// Counts for an export that shares what is below it with others.
    pub fn among(neighbours: &FairDepth) -> Self {
        Accounting {
            shards: Default::default(),
            begun: lane::now(),
            has_histograms: AtomicBool::new(false),
            histograms: RwLock::default(),
            failures: OnceLock::new(),
            depth: ExportDepth::new(neighbours),
            room: Arc::default(),
        }
    }

    /// Has `sink` hear of each request that fails, on the lane of the request. The first sink
    /// stays.
    pub fn on_failure(&self, sink: impl Fn(&FailedRequest<'_>) + Send + Sync + 'static) {
        let _ = self.failures.set(Arc::new(sink));
    }

    /// Has `sink` hear of it when requests wait for room, and when none does any more. The first
    /// sink stays.
    pub fn on_room(&self, sink: impl Fn(&RoomNotice<'_>) + Send + Sync + 'static) {
        self.room.on_notice(sink);
    }

    /// Requests that wait until their disk has room.
    pub fn waiting_for_room(&self) -> u64 {
        self.room.waiting()
    }

    /// Requests that have waited for room so far, with those that still do.
    pub fn room_waits(&self) -> u64 {
        self.room.waits()
    }

    /// What the calling thread counts in.
    fn shard(&self) -> &Shard {
        self.shards[shard_number()].get_or_init(Box::default)
    }

    /// Those that somebody has counted in.
    fn counted(&self) -> impl Iterator<Item = &Shard> {
        self.shards.iter().filter_map(|shard| Some(&**shard.get()?))
    }

    /// Notes that a request begins in a stream, which counts it already.
    pub(crate) fn start(
        &self,
        operation: Operation,
        (offset_bytes, len_bytes): (u64, u64),
        stream: &StreamDepth,
    ) -> StartedRequest {
        let at = lane::now();
        self.shard().begun.fetch_add(1, Ordering::Relaxed);
        trace!(
            name: "export_request_start",
            export = ?std::ptr::from_ref(self),
            operation = ?operation,
            offset = offset_bytes,
            bytes = len_bytes
        );
        StartedRequest {
            operation,
            offset_bytes,
            len_bytes,
            at,
            shallow: self.depth.begins(stream.get(), at),
        }
    }

    /// Counts a request that has succeeded.
    pub(crate) fn succeed(&self, request: &StartedRequest) {
        let shard = self.shard();
        let now = lane::now();
        let took_ns = nanoseconds(now.saturating_duration_since(request.at));
        trace!(
            name: "export_request_done",
            export = ?std::ptr::from_ref(self),
            operation = ?request.operation,
            offset = request.offset_bytes,
            bytes = request.len_bytes,
            took_ns
        );
        let counters = &shard.operations[request.operation as usize];
        counters.bins[Latencies::bin(took_ns)].fetch_add(1, Ordering::Relaxed);
        counters
            .bytes
            .fetch_add(request.len_bytes, Ordering::Relaxed);
        counters.time_ns.fetch_add(took_ns, Ordering::Relaxed);
        if request.operation == Operation::Write {
            let end = request.offset_bytes.saturating_add(request.len_bytes);
            shard.highest_written.fetch_max(end, Ordering::Relaxed);
        }
        self.note_end(shard, now);
        if request.shallow {
            self.depth.ended(request.at, now);
        }
        if self.has_histograms.load(Ordering::Relaxed)
            && let Some(bins) = &self.histograms.read()[request.operation as usize]
        {
            let bin = bins.boundaries_ns.partition_point(|end| *end <= took_ns);
            bins.bins[bin].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a request that has failed.
    pub(crate) fn fail(&self, request: &StartedRequest, errno: i32, reason: &str) {
        let shard = self.shard();
        trace!(
            name: "export_request_failed",
            export = ?std::ptr::from_ref(self),
            operation = ?request.operation,
            offset = request.offset_bytes,
            bytes = request.len_bytes,
            errno,
            reason
        );
        let counters = &shard.operations[request.operation as usize];
        counters.failed.fetch_add(1, Ordering::Relaxed);
        self.note_end(shard, lane::now());
        if let Some(sink) = self.failures.get() {
            sink(&FailedRequest {
                operation: request.operation,
                errno,
                reason,
            });
        }
    }

    fn note_end(&self, shard: &Shard, now: Instant) {
        let since_ns = nanoseconds(now.saturating_duration_since(self.begun));
        // Zero says that there was none.
        shard.last_end_ns.store(since_ns.max(1), Ordering::Relaxed);
    }

    /// What was counted of an operation.
    pub fn totals(&self, operation: Operation) -> OperationTotals {
        let mut totals = OperationTotals::default();
        for shard in self.counted() {
            let counters = &shard.operations[operation as usize];
            let bins = counters.bins.iter();
            totals.requests += bins.map(|bin| bin.load(Ordering::Relaxed)).sum::<u64>();
            totals.bytes += counters.bytes.load(Ordering::Relaxed);
            totals.failed += counters.failed.load(Ordering::Relaxed);
            totals.time_ns += counters.time_ns.load(Ordering::Relaxed);
        }
        totals
    }

    /// How long the requests of an operation took that succeeded.
    pub fn latencies(&self, operation: Operation) -> Latencies {
        let mut latencies = Latencies::default();
        for shard in self.counted() {
            let counters = &shard.operations[operation as usize];
            for (sum, bin) in latencies.bins.iter_mut().zip(&counters.bins) {
                *sum += bin.load(Ordering::Relaxed);
            }
            latencies.time_ns += counters.time_ns.load(Ordering::Relaxed);
        }
        latencies
    }

    /// Requests that have begun and are not answered yet.
    pub fn in_flight(&self) -> u64 {
        // In this order: what ends between the looks is taken for in flight, not for negative.
        let ended = |operation| {
            let totals = self.totals(operation);
            totals.requests + totals.failed
        };
        let ended: u64 = Operation::ALL.into_iter().map(ended).sum();
        let begun = self
            .counted()
            .map(|shard| shard.begun.load(Ordering::Relaxed));
        begun.sum::<u64>().saturating_sub(ended)
    }

    /// The offset of the disk in bytes behind which nothing was written.
    pub fn highest_written_bytes(&self) -> u64 {
        let highest = |shard: &Shard| shard.highest_written.load(Ordering::Relaxed);
        self.counted().map(highest).max().unwrap_or(0)
    }

    /// How long no request has ended; `None` if there was none.
    pub fn idle(&self) -> Option<Duration> {
        let end = |shard: &Shard| shard.last_end_ns.load(Ordering::Relaxed);
        let last_ns = self.counted().map(end).max().unwrap_or(0);
        let last = Duration::from_nanos(last_ns);
        let now = lane::now().saturating_duration_since(self.begun);
        (last_ns > 0).then(|| now.saturating_sub(last))
    }

    /// Counts from now on how long requests of an operation take, from zero; or no more, where
    /// there are no boundaries.
    ///
    /// `boundaries_ns` are in nanoseconds, ascending and greater than zero.
    pub fn set_histogram(&self, operation: Operation, boundaries_ns: Option<Vec<u64>>) {
        let mut histograms = self.histograms.write();
        histograms[operation as usize] = boundaries_ns.map(|boundaries_ns| Bins {
            bins: (0..=boundaries_ns.len())
                .map(|_| AtomicU64::new(0))
                .collect(),
            boundaries_ns,
        });
        let any = histograms.iter().any(Option::is_some);
        self.has_histograms.store(any, Ordering::Relaxed);
    }

    /// What was counted since [`Accounting::set_histogram`].
    pub fn histogram(&self, operation: Operation) -> Option<Histogram> {
        let histograms = self.histograms.read();
        let bins = histograms[operation as usize].as_ref()?;
        let count = |bin: &AtomicU64| bin.load(Ordering::Relaxed);
        Some(Histogram {
            boundaries_ns: bins.boundaries_ns.clone(),
            bins: bins.bins.iter().map(count).collect(),
        })
    }
}

impl fmt::Debug for Accounting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Accounting");
        for operation in Operation::ALL {
            debug.field(&format!("{operation:?}"), &self.totals(operation));
        }
        debug.finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn what_was_asked_for_is_counted_on_every_thread() {
        let accounting = Arc::new(Accounting::default());
        assert_eq!(accounting.idle(), None);
        let threads: Vec<_> = (0..2 * SHARDS as u64)
            .map(|number| {
                let accounting = accounting.clone();
                std::thread::spawn(move || {
                    let stream = StreamDepth::new(&accounting);
                    for _ in 0..100 {
                        let read = accounting.start(Operation::Read, (0, 10), &stream);
                        accounting.succeed(&read);
                        let write =
                            accounting.start(Operation::Write, (number * 512, 512), &stream);
                        accounting.succeed(&write);
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        let requests = 200 * SHARDS as u64;
        let read = accounting.totals(Operation::Read);
        assert_eq!((read.requests, read.bytes), (requests, 10 * requests));
        let write = accounting.totals(Operation::Write);
        assert_eq!((write.requests, write.bytes), (requests, 512 * requests));
        assert_eq!(accounting.totals(Operation::Flush), Default::default());
        let highest = 2 * SHARDS as u64 * 512;
        assert_eq!(accounting.highest_written_bytes(), highest);
        assert!(accounting.idle().is_some());
    }

    #[test]
    fn every_time_has_a_bin_up_to_its_bound() {
        for (took_ns, bin) in [(0, 0), (1, 0), (4096, 0), (4097, 1), (8192, 1), (8193, 2)] {
            assert_eq!(Latencies::bin(took_ns), bin, "{took_ns}");
        }
        for bin in 0..LATENCY_BINS - 1 {
            let bound_ns = Latencies::bound_ns(bin).unwrap();
            assert_eq!(Latencies::bin(bound_ns), bin);
            assert_eq!(Latencies::bin(bound_ns + 1), bin + 1);
        }
        assert_eq!(Latencies::bound_ns(LATENCY_BINS - 1), None);
        assert_eq!(Latencies::bin(u64::MAX), LATENCY_BINS - 1);
    }

    #[test]
    fn what_is_in_flight_is_known_and_an_idle_export_has_no_counts() {
        let accounting = Arc::new(Accounting::default());
        assert_eq!(accounting.in_flight(), 0);
        assert_eq!(accounting.counted().count(), 0);
        let stream = StreamDepth::new(&accounting);
        let read = accounting.start(Operation::Read, (0, 10), &stream);
        let flush = accounting.start(Operation::Flush, (0, 0), &stream);
        assert_eq!(accounting.in_flight(), 2);
        accounting.fail(&flush, 5, "Input/output error");
        assert_eq!(accounting.in_flight(), 1);
        accounting.succeed(&read);
        assert_eq!(accounting.in_flight(), 0);
        let latencies = accounting.latencies(Operation::Read);
        assert_eq!(latencies.bins.iter().sum::<u64>(), 1);
        assert_eq!(
            latencies.time_ns,
            accounting.totals(Operation::Read).time_ns
        );
    }

    #[test]
    fn failures_are_counted_and_told() {
        let accounting = Arc::new(Accounting::default());
        let stream = StreamDepth::new(&accounting);
        let told = Arc::new(Mutex::new(Vec::new()));
        let sink = told.clone();
        accounting.on_failure(move |failed| {
            let line = format!("{:?} {} {}", failed.operation, failed.errno, failed.reason);
            sink.lock().push(line);
        });
        let flush = accounting.start(Operation::Flush, (0, 0), &stream);
        accounting.fail(&flush, 5, "Input/output error");
        let totals = accounting.totals(Operation::Flush);
        assert_eq!((totals.requests, totals.failed), (0, 1));
        assert_eq!(*told.lock(), ["Flush 5 Input/output error"]);
    }

    #[test]
    fn a_histogram_has_a_bin_more_than_boundaries_and_begins_anew() {
        let accounting = Arc::new(Accounting::default());
        let stream = StreamDepth::new(&accounting);
        let write = |age: Duration| {
            let mut write = accounting.start(Operation::Write, (0, 1), &stream);
            write.at -= age;
            accounting.succeed(&write);
        };
        write(Duration::ZERO);
        assert_eq!(accounting.histogram(Operation::Write), None);
        let boundaries_ns = vec![1_000_000_000, 10_000_000_000];
        accounting.set_histogram(Operation::Write, Some(boundaries_ns.clone()));
        for age in [0, 0, 5, 50, 500] {
            write(Duration::from_secs(age));
        }
        let histogram = accounting.histogram(Operation::Write).unwrap();
        assert_eq!(histogram.boundaries_ns, boundaries_ns);
        assert_eq!(histogram.bins, [2, 1, 2]);
        accounting.set_histogram(Operation::Write, Some(vec![7]));
        let bins = accounting.histogram(Operation::Write).unwrap().bins;
        assert_eq!(bins, [0, 0]);
        accounting.set_histogram(Operation::Write, None);
        assert_eq!(accounting.histogram(Operation::Write), None);
    }
}
