//! Comparing two devices by content.

use std::collections::VecDeque;
use std::sync::Arc;

use futures_channel::oneshot::Receiver;
use vellum::{BlockDevice, Buffer, Error, Extent, ExtentKind, Io, Result};

use crate::worker_lanes::WorkerLanes;

/// How devices are compared.
#[derive(Debug, Clone, Copy, Default)]
pub struct CompareOptions {
    /// Sizes and allocation have to agree too.
    pub strict: bool,
}

/// Which of the two devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The first one.
    First,
    /// The second one.
    Second,
}

/// What the comparison found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The content is the same (sizes may differ by zeroes unless strict).
    Identical,
    /// Strict mode: the sizes differ.
    SizeMismatch,
    /// Strict mode: the allocation differs at an offset in bytes.
    StatusMismatch(u64),
    /// The content differs at an offset in bytes.
    ContentMismatch(u64),
}

/// Why a comparison could not be finished.
#[derive(Debug, Clone)]
pub struct CompareError {
    /// The device that failed.
    pub side: Side,
    /// Reading failed (rather than asking for the allocation).
    pub reading: bool,
    /// Where, in bytes.
    pub offset_bytes: u64,
    /// Why.
    pub cause: Error,
}

type Found = Result<Option<u64>, CompareError>;

/// Bytes of one check: what it reads of both devices stays near the processor until it
/// is compared.
const CHUNK_BYTES: u64 = 256 << 10;
/// Checks in flight at once, at least.
const PARALLEL: usize = 4;
/// Checks in flight for each lane.
const CHECKS_PER_LANE: usize = 3;

/// A device of the pair.
#[derive(Debug, Clone)]
struct ComparedDevice {
    side: Side,
    device: Arc<dyn BlockDevice>,
}

impl ComparedDevice {
    async fn status(&self, at: u64) -> Result<Extent, CompareError> {
        let len_bytes = self.device.size_bytes() - at;
        let status = self.device.block_status(at, len_bytes, u32::MAX).await;
        status.map_err(|cause| CompareError {
            side: self.side,
            reading: false,
            offset_bytes: at,
            cause,
        })
    }

    fn read(&self, at: u64, len_bytes: u64) -> Io<Buffer> {
        self.device.read(at, Buffer::for_read(len_bytes as usize))
    }

    fn read_error(&self, offset_bytes: u64, cause: Error) -> CompareError {
        CompareError {
            side: self.side,
            reading: true,
            offset_bytes,
            cause,
        }
    }
}

/// Compares two devices; `progress` hears the bytes done of all.
///
/// # Errors
/// If a device cannot be read or asked for its allocation. That the two differ is an
/// [`Outcome`].
pub async fn compare(
    first: &Arc<dyn BlockDevice>,
    second: &Arc<dyn BlockDevice>,
    options: CompareOptions,
    mut progress: impl FnMut(u64, u64),
) -> Result<Outcome, CompareError> {
    let first = ComparedDevice {
        side: Side::First,
        device: first.clone(),
    };
    let second = ComparedDevice {
        side: Side::Second,
        device: second.clone(),
    };
    let sizes = [first.device.size_bytes(), second.device.size_bytes()];
    if options.strict && sizes[0] != sizes[1] {
        return Ok(Outcome::SizeMismatch);
    }
    let mut checks = ChecksInFlight::default();
    let outcome = walk(&first, &second, options.strict, &mut checks, &mut progress).await;
    checks.workers.end().await;
    outcome
}

/// Walks over both devices and has checked what has to be read.
async fn walk(
    first: &ComparedDevice,
    second: &ComparedDevice,
    strict: bool,
    checks: &mut ChecksInFlight,
    progress: &mut impl FnMut(u64, u64),
) -> Result<Outcome, CompareError> {
    let sizes = [first.device.size_bytes(), second.device.size_bytes()];
    let (common, all) = (sizes[0].min(sizes[1]), sizes[0].max(sizes[1]));
    let longer = if sizes[0] > sizes[1] { first } else { second };
    let mut at = 0;
    while at < all {
        let step = match at < common {
            true => step_both(first, second, at, strict, checks).await?,
            false => step_rest(longer, at, checks).await?,
        };
        let Some(end) = step else {
            let found = checks.finish().await?;
            return Ok(found.map_or(Outcome::StatusMismatch(at), Outcome::ContentMismatch));
        };
        at = end;
        checks.reach(at);
        if let Some(offset) = checks.keep_below(checks.most()).await? {
            return Ok(Outcome::ContentMismatch(offset));
        }
        progress(checks.done_bytes, all);
    }
    let found = checks.finish().await?;
    if found.is_none() {
        progress(all, all);
    }
    Ok(found.map_or(Outcome::Identical, Outcome::ContentMismatch))
}

/// Starts checking what both devices have at `at`; tells where that ends, or
/// `None` if strict mode finds the allocation different.
async fn step_both(
    first: &ComparedDevice,
    second: &ComparedDevice,
    at: u64,
    strict: bool,
    checks: &mut ChecksInFlight,
) -> Result<Option<u64>, CompareError> {
    let sizes = [first.device.size_bytes(), second.device.size_bytes()];
    let (one, two) = (first.status(at).await?, second.status(at).await?);
    if strict && kind(&one, sizes[0] - at) != kind(&two, sizes[1] - at) {
        return Ok(None);
    }
    let left = sizes[0].min(sizes[1]) - at;
    let mut len_bytes = one.len_bytes.min(two.len_bytes).clamp(1, left);
    if !(one.kind.is_zero() && two.kind.is_zero()) {
        len_bytes = len_bytes.min(CHUNK_BYTES);
        let end = at + len_bytes;
        match (one.kind.needs_reading(), two.kind.needs_reading()) {
            (true, true) => {
                let (first, second) = (first.clone(), second.clone());
                checks.push(end, move || same(first, second, at, len_bytes));
            }
            (true, false) => checks.push_empty(first, at, len_bytes),
            (false, true) => checks.push_empty(second, at, len_bytes),
            (false, false) => {}
        }
    }
    Ok(Some(at + len_bytes))
}

/// Starts checking that the longer device has only zeroes at `at`.
async fn step_rest(
    longer: &ComparedDevice,
    at: u64,
    checks: &mut ChecksInFlight,
) -> Result<Option<u64>, CompareError> {
    let status = longer.status(at).await?;
    let mut len_bytes = status.len_bytes.clamp(1, longer.device.size_bytes() - at);
    if status.kind.needs_reading() {
        len_bytes = len_bytes.min(CHUNK_BYTES);
        checks.push_empty(longer, at, len_bytes);
    }
    Ok(Some(at + len_bytes))
}

/// What strict mode compares of an extent.
fn kind(extent: &Extent, left_bytes: u64) -> (ExtentKind, bool, bool) {
    (
        extent.kind,
        extent.host.is_some(),
        extent.len_bytes >= left_bytes,
    )
}

/// Compares a range of both devices.
async fn same(first: ComparedDevice, second: ComparedDevice, at: u64, len_bytes: u64) -> Found {
    let reads = (first.read(at, len_bytes), second.read(at, len_bytes));
    let one = reads.0.await.map_err(|cause| first.read_error(at, cause))?;
    let two = reads
        .1
        .await
        .map_err(|cause| second.read_error(at, cause))?;
    Ok(first_difference(&one, &two).map(|position| at + position as u64))
}

/// Looks for anything but zeroes in a range of one device.
async fn empty(half: ComparedDevice, at: u64, len_bytes: u64) -> Found {
    let bytes = half
        .read(at, len_bytes)
        .await
        .map_err(|cause| half.read_error(at, cause))?;
    if bytes.is_zero() {
        return Ok(None);
    }
    Ok(bytes
        .chunks(SECTOR_BYTES)
        .position(|sector| sector.iter().any(|&byte| byte != 0))
        .map(|sector| at + (sector * SECTOR_BYTES) as u64))
}

/// Differences are told by sector.
const SECTOR_BYTES: usize = 512;

fn first_difference(one: &[u8], two: &[u8]) -> Option<usize> {
    if one == two {
        return None;
    }
    let sectors = one.chunks(SECTOR_BYTES).zip(two.chunks(SECTOR_BYTES));
    let sector = sectors.into_iter().position(|(a, b)| a != b)?;
    Some(sector * SECTOR_BYTES)
}

/// Checks in flight; their results count in the order they were made.
#[derive(Default)]
struct ChecksInFlight {
    running: VecDeque<(u64, Receiver<Found>)>,
    workers: WorkerLanes,
    /// Everything below this offset is done.
    done_bytes: u64,
}

impl ChecksInFlight {
    /// Starts a check of what ends at `end`.
    fn push<F>(&mut self, end: u64, check: impl FnOnce() -> F + Send + 'static)
    where
        F: Future<Output = Found> + 'static,
    {
        let found = self.workers.run(check);
        self.running.push_back((end, found));
    }

    /// Starts looking for anything but zeroes in a range of one device.
    fn push_empty(&mut self, half: &ComparedDevice, at: u64, len_bytes: u64) {
        let half = half.clone();
        self.push(at + len_bytes, move || empty(half, at, len_bytes));
    }

    /// How many checks may run at once.
    fn most(&self) -> usize {
        PARALLEL.max(CHECKS_PER_LANE * self.workers.lanes())
    }

    /// Notes that everything up to `end` is covered by checks.
    fn reach(&mut self, end: u64) {
        if self.running.is_empty() {
            self.done_bytes = end;
        }
    }

    /// Waits until fewer than `limit` checks run; tells the first difference.
    async fn keep_below(&mut self, limit: usize) -> Found {
        while self.running.len() >= limit.max(1) {
            let Some((end, check)) = self.running.pop_front() else {
                break;
            };
            let found = check.await.expect("a check that panicked ends the job");
            if let Some(offset) = found? {
                return Ok(Some(offset));
            }
            self.done_bytes = end;
        }
        Ok(None)
    }

    async fn finish(&mut self) -> Found {
        self.keep_below(1).await
    }
}
