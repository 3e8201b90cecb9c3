//! [`CopyBeforeWrite`]: keeps what a device showed at one moment, by copying it to another one
//! before it is overwritten.
//!
//! Invariants:
//! - A grain is *to do* until its old bytes are in the target. A change of the source
//!   waits until no grain that it touches is; a grain never becomes to do again.
//! - Of the copies of one grain one runs at a time: who copies has claimed the grain.
//! - Where the target shows the source through, a read of the target, or a question what
//!   lies where, that met a grain to do ends before the grain is copied, and so before it is
//!   overwritten.

use std::ops::Range;
use std::sync::Arc;

use event_listener::Event;
use parking_lot::{Mutex, MutexGuard};
use vellum::{BlockDevice, Buffer, Extent, Io, RequestFlags, ZeroRequest, delegate};
use vellum_io::{JoinHandle, spawn};

use super::bits::{Bits, grain_bytes_for};
use super::dirty::DirtyMap;
use super::parallel::PIECE_BYTES;
use crate::copy::{CopyError, Step};

/// The largest cluster that a target can have, in bytes.
const MAX_CLUSTER_BYTES: u64 = 2 << 20;

/// How far a question about a target reaches that shows the source through, in bytes.
const MAX_ASKED_BYTES: u64 = 16 << 20;

/// A device, what it showed when this was made being kept in a target.
#[derive(Debug)]
pub struct CopyBeforeWrite {
    core: Arc<Core>,
}

#[derive(Debug)]
struct Core {
    source: Arc<dyn BlockDevice>,
    target: Arc<dyn BlockDevice>,
    size_bytes: u64,
    grain_bytes: u64,
    compress: bool,
    state: Mutex<State>,
    /// A grain has been copied, or a claim or a read has ended.
    changed: Event,
    /// What users have written.
    written: Arc<DirtyMap>,
}

#[derive(Debug)]
struct State {
    todo: Bits,
    /// Grains that are being copied.
    claims: Vec<Range<u64>>,
    /// Grains that are being read through the target.
    reads: Vec<Range<u64>>,
}

/// How a filter keeps what was there.
#[derive(Debug)]
pub struct CopyBeforeWriteOptions {
    /// Bytes that are copied at once at least: a power of two, and a multiple of the
    /// target's cluster.
    pub grain_bytes: u64,
    /// Write compressed clusters.
    pub compress: bool,
    /// Where writes of users are noted.
    pub written: Arc<DirtyMap>,
}

enum Next {
    Copy(CopyGuard),
    /// Somebody else is copying.
    Wait,
    Nothing,
}

/// Grains that are being copied, until it is dropped.
struct CopyGuard {
    core: Arc<Core>,
    grains: Range<u64>,
}

/// Grains that are being read, until it is dropped.
struct ReadGuard {
    core: Arc<Core>,
    grains: Range<u64>,
}

fn overlap(one: &Range<u64>, two: &Range<u64>) -> bool {
    one.start < two.end && two.start < one.end
}

fn drop_one(ranges: &mut Vec<Range<u64>>, range: &Range<u64>) {
    if let Some(at) = ranges.iter().position(|other| other == range) {
        ranges.swap_remove(at);
    }
}

impl State {
    fn is_claimed(&self, grain: u64) -> bool {
        self.claims.iter().any(|claim| claim.contains(&grain))
    }

    /// The first grain to do of some.
    fn first(&self, grains: &Range<u64>) -> Option<u64> {
        let mut at = grains.start;
        while at < grains.end {
            if self.todo.is_set(at) {
                return Some(at);
            }
            at = self.todo.run_end(at, grains.end);
        }
        None
    }
}

impl Core {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The grains that a range of bytes touches.
    fn grains(&self, offset_bytes: u64, len_bytes: u64) -> Range<u64> {
        let end = offset_bytes.saturating_add(len_bytes).min(self.size_bytes);
        let start = offset_bytes.min(end);
        match start == end {
            true => 0..0,
            false => start / self.grain_bytes..end.div_ceil(self.grain_bytes),
        }
    }

    fn bytes(&self, grains: &Range<u64>) -> Range<u64> {
        let byte = |grain: u64| (grain * self.grain_bytes).min(self.size_bytes);
        byte(grains.start)..byte(grains.end)
    }

    fn has_todo(&self, grains: &Range<u64>) -> bool {
        self.lock().first(grains).is_some()
    }

    /// Claims the first of some grains that are to do.
    fn claim(self: &Arc<Self>, grains: &Range<u64>) -> Next {
        let most = (PIECE_BYTES / self.grain_bytes).max(1);
        let mut state = self.lock();
        let (mut from, mut waits) = (grains.start, false);
        while let Some(start) = state.first(&(from..grains.end)) {
            let limit = grains.end.min(start + most);
            let end = state.todo.run_end(start, limit);
            let free = (start..end).take_while(|grain| !state.is_claimed(*grain));
            let claimed = start..start + free.count() as u64;
            if claimed.is_empty() {
                waits = true;
                from = start + 1;
                continue;
            }
            state.claims.push(claimed.clone());
            return Next::Copy(CopyGuard {
                core: self.clone(),
                grains: claimed,
            });
        }
        match waits {
            true => Next::Wait,
            false => Next::Nothing,
        }
    }

    /// Has the old bytes of some grains in the target.
    async fn secure(self: Arc<Self>, grains: Range<u64>) -> Result<(), CopyError> {
        loop {
            let changed = self.changed.listen();
            match self.claim(&grains) {
                Next::Copy(claim) => claim.carry_out().await?,
                Next::Wait => changed.await,
                Next::Nothing => return Ok(()),
            }
        }
    }

    async fn copy(&self, range: Range<u64>) -> Result<(), CopyError> {
        let mut at = range.start;
        while at < range.end {
            let failed = |step| {
                move |cause| CopyError {
                    step,
                    offset_bytes: at,
                    cause,
                }
            };
            let rest_bytes = range.end - at;
            let status = self.source.block_status(at, rest_bytes, u32::MAX).await;
            let extent = status.map_err(failed(Step::Status))?;
            let mut len_bytes = match self.compress {
                // Compressed clusters are written as wholes.
                true => rest_bytes,
                false => extent.len_bytes.clamp(1, rest_bytes),
            };
            let zero = extent.kind.is_zero() && extent.len_bytes >= len_bytes;
            if !zero {
                // A grain of a huge device is longer than memory.
                len_bytes = len_bytes.min(match self.compress {
                    true => MAX_CLUSTER_BYTES,
                    false => PIECE_BYTES,
                });
            }
            if zero {
                let request = ZeroRequest::default().may_unmap(true);
                let zeroes = self.target.write_zeroes(at, len_bytes, request).await;
                zeroes.map_err(failed(Step::Write))?;
            } else {
                let buffer = Buffer::for_read(len_bytes as usize);
                let read = self.source.read(at, buffer).await;
                let data = read.map_err(failed(Step::Read))?;
                let flags = RequestFlags::default();
                let written = match self.compress {
                    true => self.target.write_compressed(at, data, flags).await,
                    false => self.target.write(at, data, flags).await,
                };
                written.map_err(failed(Step::Write))?;
            }
            at += len_bytes;
        }
        Ok(())
    }

    /// Begins a read of some grains through the target.
    async fn read(self: Arc<Self>, grains: Range<u64>) -> ReadGuard {
        loop {
            let changed = self.changed.listen();
            {
                let mut state = self.lock();
                if !state.claims.iter().any(|claim| overlap(claim, &grains)) {
                    state.reads.push(grains.clone());
                    drop(state);
                    return ReadGuard { core: self, grains };
                }
            }
            changed.await;
        }
    }
}

impl CopyGuard {
    async fn carry_out(self) -> Result<(), CopyError> {
        loop {
            let changed = self.core.changed.listen();
            let is_read = {
                let state = self.core.lock();
                state.reads.iter().any(|read| overlap(read, &self.grains))
            };
            match is_read {
                true => changed.await,
                false => break,
            }
        }
        self.core.copy(self.core.bytes(&self.grains)).await?;
        let mut state = self.core.lock();
        for grain in self.grains.clone() {
            state.todo.clear(grain);
        }
        Ok(())
    }
}

impl Drop for CopyGuard {
    fn drop(&mut self) {
        drop_one(&mut self.core.lock().claims, &self.grains);
        self.core.changed.notify(usize::MAX);
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        drop_one(&mut self.core.lock().reads, &self.grains);
        self.core.changed.notify(usize::MAX);
    }
}

impl CopyBeforeWrite {
    /// Keeps in `target`, a device of the same size that nobody else writes to, what
    /// `source` shows now. Nobody may write to the source but through the result.
    pub fn new(
        source: Arc<dyn BlockDevice>,
        target: Arc<dyn BlockDevice>,
        keeping: CopyBeforeWriteOptions,
    ) -> Arc<Self> {
        let size_bytes = source.size_bytes();
        let grain_bytes = grain_bytes_for(keeping.grain_bytes, size_bytes);
        let grains = size_bytes.div_ceil(grain_bytes);
        let mut todo = Bits::none(grains);
        (0..grains).for_each(|grain| todo.set(grain));
        Arc::new(CopyBeforeWrite {
            core: Arc::new(Core {
                source,
                target,
                size_bytes,
                grain_bytes,
                compress: keeping.compress,
                state: Mutex::new(State {
                    todo,
                    claims: Vec::new(),
                    reads: Vec::new(),
                }),
                changed: Event::new(),
                written: keeping.written,
            }),
        })
    }

    /// Copies what of a range is still to do.
    pub(super) fn copy(&self, range: Range<u64>) -> JoinHandle<Result<(), CopyError>> {
        let grains = self.core.grains(range.start, range.end - range.start);
        spawn(self.core.clone().secure(grains))
    }

    /// Nobody wants what lies in a range: grains that are wholly inside need not be copied.
    pub(super) fn leave_out(&self, range: &Range<u64>) {
        let grain_bytes = self.core.grain_bytes;
        let end = match range.end >= self.core.size_bytes {
            true => self.core.size_bytes.div_ceil(grain_bytes),
            false => range.end / grain_bytes,
        };
        let mut state = self.core.lock();
        for grain in range.start.div_ceil(grain_bytes)..end {
            // One that is being copied must not be overwritten before it is.
            if !state.is_claimed(grain) {
                state.todo.clear(grain);
            }
        }
    }

    /// The next range from `from` on that is to do, a piece at most.
    pub(super) fn next_todo(&self, from: u64) -> Option<Range<u64>> {
        let core = &self.core;
        let grains = core.grains(from, u64::MAX - from);
        let state = core.lock();
        let start = state.first(&grains)?;
        let limit = grains
            .end
            .min(start + (PIECE_BYTES / core.grain_bytes).max(1));
        Some(core.bytes(&(start..state.todo.run_end(start, limit))))
    }

    /// Copies nothing any more: users write as without it.
    pub fn end(&self) {
        let grains = self.core.size_bytes.div_ceil(self.core.grain_bytes);
        self.core.lock().todo = Bits::none(grains);
    }

    /// What is still to do, in bytes.
    pub(super) fn todo_bytes(&self) -> u64 {
        let todo = self.core.lock().todo.count();
        (todo * self.core.grain_bytes).min(self.core.size_bytes)
    }

    /// The ranges that are still to do.
    pub fn todo(&self) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        let mut at = 0;
        while let Some(range) = self.next_todo(at) {
            at = range.end;
            ranges.push(range);
        }
        ranges
    }

    /// Waits until something has been copied.
    pub(super) async fn wait(&self, todo_bytes: u64) {
        loop {
            let changed = self.core.changed.listen();
            if self.todo_bytes() != todo_bytes {
                return;
            }
            changed.await;
        }
    }

    /// What users of the target are to go through where the target stands on the source,
    /// and shows what it does not hold through it.
    pub fn snapshot_view(&self) -> Arc<dyn BlockDevice> {
        Arc::new(SnapshotView(self.core.clone()))
    }

    /// Makes a change, once what it overwrites is in the target.
    fn change<T: 'static>(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        begin: impl FnOnce(&dyn BlockDevice) -> Io<T> + 'static,
    ) -> Io<T> {
        let core = &self.core;
        core.written.mark(offset_bytes, len_bytes);
        let grains = core.grains(offset_bytes, len_bytes);
        if !core.has_todo(&grains) {
            return begin(&*core.source);
        }
        let core = core.clone();
        Io::task(spawn(async move {
            let secured = core.clone().secure(grains).await;
            secured.map_err(|error| error.cause)?;
            begin(&*core.source).await
        }))
    }
}

impl BlockDevice for CopyBeforeWrite {
    delegate!(
        core.source: info, size_bytes, read, flush, block_status, truncate, resize, close, backing,
        allocated_bytes,
    );

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        self.change(offset_bytes, buffer.len() as u64, move |source| {
            source.write(offset_bytes, buffer, flags)
        })
    }

    fn write_compressed(
        &self,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Io<Buffer> {
        self.change(offset_bytes, buffer.len() as u64, move |source| {
            source.write_compressed(offset_bytes, buffer, flags)
        })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.change(offset_bytes, len_bytes, move |source| {
            source.write_zeroes(offset_bytes, len_bytes, request)
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.change(offset_bytes, len_bytes, move |source| {
            source.discard(offset_bytes, len_bytes)
        })
    }

    fn clear(&self) -> Io<()> {
        self.change(0, u64::MAX, |source| source.clear())
    }
}

/// The target, as one sees the source's old bytes through it.
#[derive(Debug)]
struct SnapshotView(Arc<Core>);

impl BlockDevice for SnapshotView {
    delegate!(
        0.target: info, size_bytes, write, write_zeroes, discard, flush, truncate, close, backing,
        allocated_bytes,
    );

    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        let core = self.0.clone();
        let grains = core.grains(offset_bytes, buffer.len() as u64);
        if !core.has_todo(&grains) {
            return core.target.read(offset_bytes, buffer);
        }
        Io::task(spawn(async move {
            let _read = core.clone().read(grains).await;
            core.target.read(offset_bytes, buffer).await
        }))
    }

    /// What the target does not hold is asked of the source: what lies there must not be
    /// overwritten, and so not copied, in between.
    fn block_status(&self, offset_bytes: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
        let core = self.0.clone();
        if !core.has_todo(&core.grains(offset_bytes, len_bytes)) {
            return core.target.block_status(offset_bytes, len_bytes, max_depth);
        }
        // Writes wait for it, so no more is asked than is answered soon.
        let len_bytes = len_bytes.min(MAX_ASKED_BYTES);
        let grains = core.grains(offset_bytes, len_bytes);
        Io::task(spawn(async move {
            let _read = core.clone().read(grains).await;
            let asked = core.target.block_status(offset_bytes, len_bytes, max_depth);
            asked.await
        }))
    }
}

#[cfg(test)]
mod tests;
