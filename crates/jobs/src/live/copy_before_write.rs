//! [`CopyBeforeWrite`]: keeps what a device showed at one moment, by copying it to another one
//! before it is overwritten.
//!
//! | file | what it does |
//! | --- | --- |
//! | `core` | which grains are to do, who copies them |
//! | `fleece` | a place for old bytes on their way to a slow target |
//! | `moment` | what a filter hands on to the one that takes its place |
//! | `snapshot` | the old bytes for readers |
//!
//! Invariants:
//! - A grain is *to do* until its old bytes are in the target, in the fleece, or in memory on
//!   their way to the target. A change of the source waits until no grain that it touches is; a
//!   grain never becomes to do again.
//! - Of the copies of one grain one runs at a time: who copies has claimed the grain.
//! - A read of old bytes, or a question what lies where, that met a grain to do ends before the
//!   grain is copied, and so before it is overwritten.
//! - Old bytes that are lost are never shown: then nothing is shown any more.

mod core;
mod fleece;
mod moment;
mod snapshot;

use std::any::Any;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::{Either, pending, select};
use vellum::{
    BlockDevice, Buffer, Error, ErrorKind, Io, Preallocation, RequestFlags, Result, ZeroRequest,
    delegate,
};
use vellum_io::bits::Bits;
use vellum_io::lane::sleep;
use vellum_io::{JoinHandle, spawn};

use self::core::{Broken, Core};
pub use self::moment::Moment;
use self::snapshot::{SnapshotAccess, SnapshotView};
use super::dirty::DirtyMap;
use super::given_up;
use crate::copy::{CopyError, Step};

/// A device, what it showed when this was made being kept in a target.
#[derive(Debug)]
pub struct CopyBeforeWrite {
    core: Arc<Core>,
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
    /// What happens if old bytes cannot be copied.
    pub on_error: OnCopyError,
    /// How long a change waits for the copy of what it overwrites; the copy fails then.
    pub timeout: Option<Duration>,
    /// Where old bytes wait for a slow target. Only for targets that do not show the source.
    pub fleece: Option<FleeceOptions>,
}

impl CopyBeforeWriteOptions {
    /// Copies plainly: a write fails whose old bytes cannot be copied, and waits for them.
    pub fn new(grain_bytes: u64, written: Arc<DirtyMap>) -> Self {
        CopyBeforeWriteOptions {
            grain_bytes,
            compress: false,
            written,
            on_error: OnCopyError::BreakWrite,
            timeout: None,
            fleece: None,
        }
    }
}

/// What happens if old bytes cannot be copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnCopyError {
    /// The change that would overwrite them fails.
    #[default]
    BreakWrite,
    /// The change is made, and nothing is kept any more.
    BreakSnapshot,
}

/// Where old bytes wait for a slow target.
#[derive(Debug, Clone)]
pub struct FleeceOptions {
    /// A device of the source's size, of zeroes, that nobody else uses. It need not survive
    /// anything.
    pub device: Arc<dyn BlockDevice>,
    /// How much of it is used at most, in bytes.
    pub max_bytes: u64,
    /// What happens where that is not enough.
    pub when_full: WhenFull,
}

/// What happens to a change for whose old bytes a fleece has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhenFull {
    /// It waits until the target itself has them.
    #[default]
    Wait,
    /// It is made, and nothing is kept any more.
    Fail,
}

impl CopyBeforeWrite {
    /// Keeps in `target`, a device of the same size that nobody else writes to, what
    /// `source` shows now. Nobody may write to the source but through the result.
    pub fn new(
        source: Arc<dyn BlockDevice>,
        target: Arc<dyn BlockDevice>,
        options: CopyBeforeWriteOptions,
    ) -> Arc<Self> {
        Arc::new(CopyBeforeWrite {
            core: Arc::new(Core::new(source, target, options)),
        })
    }

    /// Gives up in the source what has been copied: for sources that nobody writes to.
    pub fn discard_source(&self) {
        self.core.discard_source.store(true, Ordering::Relaxed);
    }

    /// Has the target hold what of a range is still to do.
    pub(super) fn copy(&self, range: Range<u64>) -> JoinHandle<Result<(), CopyError>> {
        let core = self.core.clone();
        let grains = core.grains(range.start, range.end - range.start);
        spawn(async move {
            match &core.fleece {
                Some(fleece) => fleece.send(&core, grains).await,
                None => core.clone().secure(grains).await,
            }
        })
    }

    /// Nobody wants what lies in a range: grains that are wholly inside need not be copied.
    pub(super) fn leave_out(&self, range: &Range<u64>) {
        let grains = self.whole_grains(range);
        let mut state = self.core.lock();
        for grain in grains {
            // One that is being copied must not be overwritten before it is.
            if !state.is_claimed(grain) {
                state.todo.remove(grain);
            }
        }
    }

    /// Has nobody see as it was what lies outside some ranges, in order: what of a grain lies
    /// inside is seen.
    pub fn show_only(&self, ranges: impl IntoIterator<Item = Range<u64>>) {
        let mut at = 0;
        for range in ranges {
            self.core.hide(&self.whole_grains(&(at..range.start)));
            at = range.end;
        }
        self.core.hide(&self.whole_grains(&(at..u64::MAX)));
    }

    /// The grains that are wholly inside a range.
    fn whole_grains(&self, range: &Range<u64>) -> Range<u64> {
        let core = &self.core;
        let end = match range.end >= core.size_bytes {
            true => core.grain_count(),
            false => range.end / core.grain_bytes,
        };
        range.start.div_ceil(core.grain_bytes).min(end)..end
    }

    /// The next range from `from` on that is to do, a piece at most.
    pub(super) fn next_todo(&self, from: u64) -> Option<Range<u64>> {
        let core = &self.core;
        let state = core.lock();
        core.next_run(&state.todo, &core.grains(from, u64::MAX - from))
    }

    /// The next range that is kept in a fleece, a piece at most.
    pub(super) fn next_kept(&self) -> Option<Range<u64>> {
        let core = &self.core;
        let state = core.lock();
        match state.kept.count() {
            0 => None,
            _ => core.next_run(&state.kept, &(0..core.grain_count())),
        }
    }

    /// Copies nothing any more: users write as without it, those too who wait for copies. Returns
    /// the ranges that the target lacks.
    pub fn end(&self) -> Vec<Range<u64>> {
        let left = self.todo();
        let grains = self.core.grain_count();
        let mut state = self.core.lock();
        state.todo = Bits::none(grains);
        state.kept = Bits::none(grains);
        state.is_over = true;
        drop(state);
        self.core.changed.notify(usize::MAX);
        left
    }

    /// Waits, after the end, until none of its requests touches the source any more, and a moment
    /// for those on their way to the target. Whether there are none; otherwise
    /// [`CopyBeforeWrite::left_target`] waits for them.
    pub async fn left(&self) -> bool {
        given_up::leave(&self.core.view, &self.core.target).await
    }

    /// Waits, after the end, until no request is on its way to the target.
    pub async fn left_target(&self) {
        given_up::cut_off(&self.core.target).await;
    }

    /// Makes durable, after the end, what the target has got; whether it is. One that does not answer
    /// in a moment is not waited for.
    pub async fn has_durable_target(&self) -> bool {
        given_up::in_a_moment(self.core.target.flush())
            .await
            .is_some_and(|flushed| flushed.is_ok())
    }

    pub(super) async fn flush_target(&self) -> Result<(), CopyError> {
        let flushed = self.core.target.flush().await;
        flushed.map_err(|cause| CopyError {
            step: Step::Write,
            offset_bytes: 0,
            cause,
        })
    }

    /// What the target lacks, in bytes.
    pub(super) fn todo_bytes(&self) -> u64 {
        let state = self.core.lock();
        let count = state.todo.count() + state.kept.count() + state.sent.count();
        (count * self.core.grain_bytes).min(self.core.size_bytes)
    }

    /// The ranges that the target lacks.
    pub fn todo(&self) -> Vec<Range<u64>> {
        let core = &self.core;
        let state = core.lock();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for grain in (0..core.grain_count()).filter(|grain| state.is_undone(*grain)) {
            let bytes = core.bytes(&(grain..grain + 1));
            match ranges.last_mut() {
                Some(last) if last.end == bytes.start => last.end = bytes.end,
                _ => ranges.push(bytes),
            }
        }
        ranges
    }

    /// Waits until something has been copied or kept.
    pub(super) async fn wait(&self, todo_bytes: u64) {
        loop {
            let changed = self.core.changed.listen();
            if self.todo_bytes() != todo_bytes
                || self.core.lock().kept.count() > 0
                || self.core.lock().broken.is_some()
            {
                return;
            }
            changed.await;
        }
    }

    /// Fails if old bytes are lost.
    pub(super) fn check(&self) -> Result<(), CopyError> {
        let broken = self.core.lock().broken;
        let (kind, message) = match broken {
            None => return Ok(()),
            Some(Broken::Full) => (ErrorKind::NoSpace, "No space left in the fleece"),
            Some(Broken::Copy) => (ErrorKind::Io, "What was overwritten could not be kept"),
        };
        Err(CopyError {
            step: Step::Write,
            offset_bytes: 0,
            cause: Error::new(kind, "backup", message),
        })
    }

    /// What users of the target are to go through where the target stands on the source,
    /// and shows what it does not hold through it.
    pub fn snapshot_view(&self) -> Arc<dyn BlockDevice> {
        Arc::new(SnapshotView(self.core.clone()))
    }

    /// What the source showed when this was made, read-only: of a filter without a fleece. What
    /// is discarded there is not shown any more, and given up in the target.
    pub fn snapshot(&self) -> Arc<dyn BlockDevice> {
        Arc::new(SnapshotAccess(self.core.clone()))
    }

    /// Makes a change, once what it overwrites is safe.
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
            let secured = secure_in_time(&core, grains).await;
            match (secured, core.on_error) {
                (Ok(()), _) => {}
                (Err(error), OnCopyError::BreakWrite) => return Err(error),
                (Err(_), OnCopyError::BreakSnapshot) => core.give_up(Broken::Copy),
            }
            begin(&*core.source).await
        }))
    }
}

/// Has old bytes safe, within the time that there is for that and as long as somebody wants them.
async fn secure_in_time(core: &Arc<Core>, grains: Range<u64>) -> Result<()> {
    const ETIMEDOUT: i32 = 110;
    let timeout = async {
        match core.timeout {
            Some(timeout) => sleep(timeout).await,
            None => pending().await,
        }
    };
    let (over, timeout) = (pin!(core.over()), pin!(timeout));
    let given_up = select(over, timeout);
    // What has begun goes on: others may wait for it.
    let secured = spawn(core.clone().secure(grains));
    match select(secured, given_up).await {
        Either::Left((secured, _)) => secured.map_err(|error| error.cause),
        Either::Right((Either::Left(_), _)) => Ok(()),
        Either::Right((Either::Right(_), _)) => {
            Err(Error::from_errno("copy before write", ETIMEDOUT))
        }
    }
}

impl BlockDevice for CopyBeforeWrite {
    delegate!(
        core.source: info, size_bytes, read, copy_up, flush, block_status, backing, identity, allocated_bytes,
    );

    fn truncate(&self, size_bytes: u64) -> Io<()> {
        let cut_bytes = self.core.size_bytes.saturating_sub(size_bytes);
        self.change(size_bytes, cut_bytes, move |source| {
            source.truncate(size_bytes)
        })
    }

    fn resize(&self, size_bytes: u64, preallocation: Preallocation) -> Io<()> {
        let cut_bytes = self.core.size_bytes.saturating_sub(size_bytes);
        self.change(size_bytes, cut_bytes, move |source| {
            source.resize(size_bytes, preallocation)
        })
    }

    fn close(&self) -> Io<()> {
        let core = self.core.clone();
        Io::start(async move {
            let closed = core.source.close().await;
            closed.and(core.target.close().await)
        })
    }

    fn format_device(&self) -> Option<&dyn Any> {
        Some(self)
    }

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

#[cfg(test)]
mod tests;
