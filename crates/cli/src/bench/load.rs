//! The load of one row: random requests of one block at a fixed depth, for a time, on the lane of
//! the caller. The same seed gives the same blocks in the same order.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use vellum::{BlockDevice, Buffer, RequestFlags, Result};
use vellum_io::{lane, spawn};

use super::plan::BLOCK_BYTES;
use super::result::Sample;
use super::scratch::Interrupt;

/// How often a run looks whether the user wants it to end.
const LOOK: Duration = Duration::from_millis(20);

/// Numbers that look random, the same for the same seed (splitmix64).
#[derive(Debug, Clone)]
pub(super) struct Numbers(u64);

impl Numbers {
    pub(super) fn new(seed: u64) -> Numbers {
        Numbers(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not 0.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        // The high half of the product: no division, and even enough.
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }
}

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
    pub(super) interrupt: Interrupt,
}

impl Load {
    /// Runs it; writes end with a flush, whose time counts.
    pub(super) async fn run(&self) -> Result<Sample> {
        let shared = Rc::new(Shared {
            over: Cell::new(false),
            left: Cell::new(self.most),
        });
        let (start, cpu) = (Instant::now(), cpu_time());
        let clock = spawn(watch(
            shared.clone(),
            start + Duration::from_secs_f64(self.seconds),
            self.interrupt.clone(),
        ));
        let load = Rc::new(self.clone());
        let mut seeds = Numbers::new(self.seed);
        let workers: Vec<_> = (0..self.depth)
            .map(|_| spawn(work(load.clone(), shared.clone(), seeds.next())))
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
        })
    }
}

struct Shared {
    over: Cell<bool>,
    left: Cell<u64>,
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
    let mut numbers = Numbers::new(seed);
    let mut buffer = Buffer::zeroed(BLOCK_BYTES as usize);
    fill(&mut buffer, &mut numbers);
    let mut count = 0;
    while !shared.over.get() && shared.left.get() > 0 {
        shared.left.set(shared.left.get() - 1);
        let (device, offset_bytes) = load.blocks.at(numbers.below(load.blocks.count()));
        let device = &load.devices[device];
        let io = match load.write {
            true => device.write(offset_bytes, buffer, RequestFlags::default()),
            false => device.read(offset_bytes, buffer),
        };
        buffer = io.await.inspect_err(|_| shared.over.set(true))?;
        count += 1;
    }
    Ok(count)
}

/// Fills a buffer with bytes that nothing can compress.
pub(super) fn fill(buffer: &mut [u8], numbers: &mut Numbers) {
    for word in buffer.chunks_mut(8) {
        let bytes = numbers.next().to_ne_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
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

    #[test]
    fn numbers_stay_below_and_repeat() {
        let draw = |seed| {
            let mut numbers = Numbers::new(seed);
            (0..100).map(|_| numbers.below(7)).collect::<Vec<_>>()
        };
        assert!(draw(3).iter().all(|&n| n < 7));
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }
}
