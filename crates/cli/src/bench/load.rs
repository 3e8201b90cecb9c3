//! The load of one row: random requests of one block at a fixed depth, for a time, on the lane of
//! the caller, with flushes between them where that is asked. The same seed gives the same blocks
//! in the same order.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use vellum::{BlockDevice, Buffer, RequestFlags, Result};
use vellum_io::{lane, spawn};

use super::plan::BLOCK_BYTES;
use super::result::Sample;
use super::scratch::Interrupt;
use super::timeline::Recorder;

/// How often a run looks whether the user wants it to end.
const LOOK: Duration = Duration::from_millis(20);

/// Blocks that can be read: runs of them, each on one of several devices.
#[derive(Debug, Clone, Default)]
pub(super) struct Blocks {
    runs: Vec<Run>,
    count: u64,
}

#[derive(Debug, Clone, Copy)]
struct Run {
    /// Number of the blocks before.
    first: u64,
    offset_bytes: u64,
    device: usize,
}

impl Blocks {
    /// All whole blocks of a device.
    pub(super) fn whole(size_bytes: u64) -> Blocks {
        let mut blocks = Blocks::default();
        blocks.add(0, 0, size_bytes);
        blocks
    }

    /// Adds the whole blocks of a run.
    pub(super) fn add(&mut self, device: usize, offset_bytes: u64, len_bytes: u64) {
        let count = len_bytes / BLOCK_BYTES;
        if count > 0 {
            self.runs.push(Run {
                first: self.count,
                offset_bytes,
                device,
            });
            self.count += count;
        }
    }

    /// How many there are.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The device and offset of one of them, which must exist.
    pub(super) fn at(&self, index: u64) -> (usize, u64) {
        let after = self.runs.partition_point(|run| run.first <= index);
        let run = self.runs[after - 1];
        let offset_bytes = run.offset_bytes + (index - run.first) * BLOCK_BYTES;
        (run.device, offset_bytes)
    }
}

/// What to do.
#[derive(Debug, Clone)]
pub(super) struct Load {
    pub(super) devices: Vec<Arc<dyn BlockDevice>>,
    pub(super) blocks: Blocks,
    pub(super) write: bool,
    pub(super) depth: usize,
    pub(super) seconds: f64,
    /// Stop earlier after so many requests.
    pub(super) most: u64,
    pub(super) seed: u64,
    pub(super) over_time: Option<OverTime>,
    pub(super) interrupt: Interrupt,
}

/// Requests with flushes between them, whose course over time is noted.
#[derive(Debug, Clone, Copy)]
pub(super) struct OverTime {
    /// A flush after each so many requests. The others in flight go on meanwhile.
    pub(super) requests_per_flush: u64,
    pub(super) interval: Duration,
}

impl Load {
    /// Runs it; writes end with a flush, whose time counts.
    pub(super) async fn run(&self) -> Result<Sample> {
        let shared = Rc::new(Shared {
            over: Cell::new(false),
            left: Cell::new(self.most),
            recorder: RefCell::new(self.over_time.map(|what| Recorder::begin(what.interval))),
        });
        let (start, cpu) = (Instant::now(), cpu_time());
        let clock = spawn(watch(
            shared.clone(),
            start + Duration::from_secs_f64(self.seconds),
            self.interrupt.clone(),
        ));
        let load = Rc::new(self.clone());
        let mut seeds = fastrand::Rng::with_seed(self.seed);
        let workers: Vec<_> = (0..self.depth)
            .map(|_| spawn(work(load.clone(), shared.clone(), seeds.u64(..))))
            .collect();
        let mut operations = 0;
        let mut failure = None;
        for worker in workers {
            match worker.await {
                Ok(count) => operations += count,
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        // The clock may still sleep: it ends with its next look.
        shared.over.set(true);
        drop(clock);
        if let Some(error) = failure {
            return Err(error);
        }
        let timeline = shared.recorder.take().map(Recorder::end);
        if self.write {
            for device in &self.devices {
                device.flush().await?;
            }
        }
        Ok(Sample {
            operations,
            seconds: start.elapsed().as_secs_f64(),
            cpu_seconds: (cpu_time() - cpu).as_secs_f64(),
            grown_bytes: None,
            timeline,
        })
    }
}

struct Shared {
    over: Cell<bool>,
    left: Cell<u64>,
    recorder: RefCell<Option<Recorder>>,
}

/// Ends the load when its time is over, or when the user asks for it.
async fn watch(shared: Rc<Shared>, end: Instant, interrupt: Interrupt) {
    while !shared.over.get() {
        let now = Instant::now();
        if now >= end || interrupt.is_asked() {
            shared.over.set(true);
            return;
        }
        lane::sleep(LOOK.min(end - now)).await;
    }
}

/// One request after another; returns how many.
async fn work(load: Rc<Load>, shared: Rc<Shared>, seed: u64) -> Result<u64> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut buffer = Buffer::zeroed(BLOCK_BYTES as usize);
    random.fill(&mut buffer);
    let mut count = 0;
    while !shared.over.get() && shared.left.get() > 0 {
        shared.left.set(shared.left.get() - 1);
        let (device, offset_bytes) = load.blocks.at(random.u64(..load.blocks.count()));
        let device = &load.devices[device];
        let noted = load.over_time.map(|over_time| (over_time, Instant::now()));
        let io = match load.write {
            true => device.write(offset_bytes, buffer, RequestFlags::default()),
            false => device.read(offset_bytes, buffer),
        };
        buffer = io.await.inspect_err(|_| shared.over.set(true))?;
        count += 1;
        if let Some((over_time, begun)) = noted {
            let flushed = note(over_time, &shared, device, begun).await;
            flushed.inspect_err(|_| shared.over.set(true))?;
        }
    }
    Ok(count)
}

/// Notes a request that has ended, and flushes where it is time for that.
async fn note(
    over_time: OverTime,
    shared: &Shared,
    device: &Arc<dyn BlockDevice>,
    begun: Instant,
) -> Result<()> {
    let ended = match shared.recorder.borrow_mut().as_mut() {
        Some(recorder) => recorder.request(begun),
        None => return Ok(()),
    };
    if ended.is_multiple_of(over_time.requests_per_flush) {
        let begun = Instant::now();
        device.flush().await?;
        if let Some(recorder) = shared.recorder.borrow_mut().as_mut() {
            recorder.flush(begun);
        }
    }
    Ok(())
}

/// CPU time that this process has used so far.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_in_their_runs() {
        let mut blocks = Blocks::default();
        blocks.add(0, 65536, 8192);
        blocks.add(1, 0, 4095);
        blocks.add(1, 4096, 5000);
        assert_eq!(blocks.count(), 3);
        let found: Vec<_> = (0..3).map(|index| blocks.at(index)).collect();
        assert_eq!(found, [(0, 65536), (0, 69632), (1, 4096)]);
    }
}
