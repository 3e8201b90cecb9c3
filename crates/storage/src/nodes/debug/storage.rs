//! A storage whose requests fail, or wait, as rules say.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_io::align::{Alignment, RangeLocks, gather, scatter};
use vellum_io::buffer::total_len;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result, lane, spawn};

use crate::event::{Event, EventListener};
use crate::{Capabilities, Storage, StorageExtent, WriteFlags, ZeroFlags, delegate};

use super::debugger::Debugger;
use super::limits::{Limits, Piece};
use super::rules::RequestKind;

/// A storage with a debugger and with limits of its own.
#[derive(Debug)]
pub struct DebugStorage {
    inner: Arc<dyn Storage>,
    core: Arc<Core>,
}

/// What the tasks of requests share.
#[derive(Debug)]
struct Core {
    inner: Arc<dyn Storage>,
    debugger: Arc<Debugger>,
    limits: Limits,
    /// Whether others may see the debugger, and tell it of events.
    listens: bool,
    /// Blocks that are being read to be written back, and what changes whole ones.
    blocks: Arc<RangeLocks>,
    /// Changing requests that have ended, well or not.
    changes: AtomicU64,
    /// As many of them had ended when the last good flush began.
    flushed: AtomicU64,
}

impl DebugStorage {
    /// Puts `debugger` and `limits` in front of `inner`.
    pub fn new(inner: Arc<dyn Storage>, debugger: Arc<Debugger>, limits: Limits) -> Self {
        Self::with(inner, debugger, limits, true)
    }

    /// Only aligns: no request of another alignment reaches `inner`.
    pub fn aligned(inner: Arc<dyn Storage>, align_bytes: u64) -> Self {
        let limits = Limits {
            align_bytes,
            ..Limits::default()
        };
        Self::with(inner, Debugger::new(Vec::new(), |_| ()), limits, false)
    }

    fn with(
        inner: Arc<dyn Storage>,
        debugger: Arc<Debugger>,
        limits: Limits,
        listens: bool,
    ) -> Self {
        let own = inner.capabilities().request_alignment_bytes;
        let limits = Limits {
            align_bytes: limits.align_bytes.max(u64::from(own)).max(1),
            ..limits
        };
        DebugStorage {
            inner: inner.clone(),
            core: Arc::new(Core {
                inner,
                debugger,
                limits,
                listens,
                blocks: Arc::default(),
                changes: AtomicU64::new(0),
                flushed: AtomicU64::new(0),
            }),
        }
    }

    fn start<T: 'static, F>(&self, work: impl FnOnce(Arc<Core>) -> F) -> Io<T>
    where
        F: Future<Output = Result<T>> + 'static,
    {
        Io::task(spawn(work(self.core.clone())))
    }
}

impl Core {
    fn alignment(&self) -> Alignment {
        Alignment {
            // Checked by `Limits::check`; file alignments are small.
            request_bytes: self.limits.align_bytes.try_into().unwrap_or(1 << 30),
            memory_bytes: 1,
        }
    }

    /// Does what may change something, and notes that it was done.
    async fn changing<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let result = work.await;
        self.changes.fetch_add(1, Ordering::AcqRel);
        result
    }

    async fn flush(&self) -> Result<()> {
        let changes = self.changes.load(Ordering::Acquire);
        if changes != self.flushed.load(Ordering::Acquire) {
            self.check(RequestKind::Flush, "flush", &(0..0)).await?;
        }
        self.inner.flush().await?;
        self.flushed.fetch_max(changes, Ordering::AcqRel);
        Ok(())
    }

    /// Fails if a rule strikes the request.
    async fn check(
        &self,
        kind: RequestKind,
        operation: &'static str,
        range: &Range<u64>,
    ) -> Result<()> {
        let Some(strike) = self.debugger.strike(kind, range) else {
            return Ok(());
        };
        if !strike.immediately {
            lane::yield_now().await;
        }
        Err(Error::from_errno(operation, strike.errno)
            .target(self.inner.name())
            .at(range.start))
    }

    async fn read_piece(&self, range: &Range<u64>, buffers: Buffers) -> Result<Buffers> {
        self.check(RequestKind::Read, "read", range).await?;
        self.inner.read(range.start, buffers).await
    }

    /// Reads an aligned range, in as many pieces as the limits ask for.
    async fn read_aligned(&self, range: Range<u64>) -> Result<Buffer> {
        let mut pieces = Vec::new();
        for piece in self.limits.transfers(range) {
            let buffer = Buffer::for_read((piece.end - piece.start) as usize);
            let read = self.read_piece(&piece, Buffers::from_iter([buffer])).await;
            pieces.extend(read?);
        }
        Ok(Buffer::join_all(pieces))
    }

    async fn read(&self, offset_bytes: u64, mut buffers: Buffers) -> Result<Buffers> {
        let len_bytes = total_len(&buffers);
        let range = offset_bytes..offset_bytes + len_bytes;
        let around = self.alignment().around(offset_bytes, len_bytes);
        if around == range && self.limits.fits_transfer(len_bytes) {
            return self.read_piece(&range, buffers).await;
        }
        let whole = self.read_aligned(around.clone()).await?;
        scatter(
            &whole[(offset_bytes - around.start) as usize..],
            &mut buffers,
        );
        Ok(buffers)
    }

    async fn write_piece(
        &self,
        range: &Range<u64>,
        buffers: Buffers,
        flags: WriteFlags,
    ) -> Result<Buffers> {
        self.debugger.emit(Event::Pwritev).await;
        let result = match self.check(RequestKind::Write, "write", range).await {
            Ok(()) => self.inner.write(range.start, buffers, flags).await,
            Err(error) => Err(error),
        };
        self.debugger.emit(Event::PwritevDone).await;
        result
    }

    async fn write(
        &self,
        offset_bytes: u64,
        buffers: Buffers,
        flags: WriteFlags,
    ) -> Result<Buffers> {
        let len_bytes = total_len(&buffers);
        let range = offset_bytes..offset_bytes + len_bytes;
        if self.alignment().fits_range(offset_bytes, len_bytes)
            && self.limits.fits_transfer(len_bytes)
        {
            let _held = self
                .blocks
                .lock_for_write(self.alignment(), offset_bytes, len_bytes)
                .await;
            return self.write_piece(&range, buffers, flags).await;
        }
        let around = self.alignment().around(offset_bytes, len_bytes);
        let _held = self.blocks.lock_exclusive(around.clone()).await;
        let mut whole = self.pad(&range, &around).await?;
        let start = (offset_bytes - around.start) as usize;
        gather(&buffers, &mut whole[start..start + len_bytes as usize]);
        for piece in self.limits.transfers(around) {
            let part = whole.split_to((piece.end - piece.start) as usize);
            self.write_piece(&piece, Buffers::from_iter([part]), flags)
                .await?;
        }
        Ok(buffers)
    }

    /// A buffer for `around` that holds what stands around `range` now.
    async fn pad(&self, range: &Range<u64>, around: &Range<u64>) -> Result<Buffer> {
        let unit = self.limits.align_bytes;
        let mut whole = Buffer::zeroed((around.end - around.start) as usize);
        let shares_tail = range.end < around.end;
        if range.start > around.start || (shares_tail && around.end - around.start == unit) {
            self.debugger.emit(Event::PwritevRmwHead).await;
            let head = self.read_aligned(around.start..around.start + unit).await?;
            whole[..head.len()].copy_from_slice(&head);
            self.debugger.emit(Event::PwritevRmwAfterHead).await;
        }
        if shares_tail && around.end - around.start > unit {
            self.debugger.emit(Event::PwritevRmwTail).await;
            let tail = self.read_aligned(around.end - unit..around.end).await?;
            let at = whole.len() - tail.len();
            whole[at..].copy_from_slice(&tail);
            self.debugger.emit(Event::PwritevRmwAfterTail).await;
        }
        Ok(whole)
    }

    async fn write_zeroes(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        flags: ZeroFlags,
    ) -> Result<()> {
        for piece in self.limits.zeroes(offset_bytes..offset_bytes + len_bytes) {
            match piece {
                Piece::Whole(range) => self.zero_piece(&range, flags).await?,
                Piece::Part(_) if flags.no_fallback => {
                    let message = "the range is not aligned to what can be zeroed";
                    return Err(Error::new(ErrorKind::Unsupported, "write zeroes", message)
                        .target(self.inner.name()));
                }
                Piece::Part(range) => {
                    let zeroes = Buffer::zeroed((range.end - range.start) as usize);
                    let flags = WriteFlags { fua: flags.fua };
                    self.write(range.start, Buffers::from_iter([zeroes]), flags)
                        .await?;
                }
            }
        }
        Ok(())
    }

    async fn zero_piece(&self, range: &Range<u64>, flags: ZeroFlags) -> Result<()> {
        self.debugger.emit(Event::PwritevZero).await;
        self.check(RequestKind::WriteZeroes, "write zeroes", range)
            .await?;
        let len_bytes = range.end - range.start;
        let _held = self
            .blocks
            .lock_for_write(self.alignment(), range.start, len_bytes)
            .await;
        self.inner
            .write_zeroes(range.start, len_bytes, flags)
            .await?;
        self.debugger.emit(Event::PwritevDone).await;
        Ok(())
    }

    /// The part of a range that a request may have.
    fn whole_requests(&self, range: Range<u64>) -> Range<u64> {
        let unit = u64::from(self.alignment().request_bytes.max(1));
        let start = range.start.next_multiple_of(unit);
        start..(range.end / unit * unit).max(start)
    }

    async fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        for piece in self.limits.discards(offset_bytes..offset_bytes + len_bytes) {
            let range = match piece {
                Piece::Whole(range) => range,
                Piece::Part(range) => self.whole_requests(range),
            };
            // What is too small to be discarded keeps its space.
            if !range.is_empty() {
                self.check(RequestKind::Discard, "discard", &range).await?;
                let len_bytes = range.end - range.start;
                let _held = self
                    .blocks
                    .lock_for_write(self.alignment(), range.start, len_bytes)
                    .await;
                self.inner.discard(range.start, len_bytes).await?;
            }
        }
        Ok(())
    }
}

impl Storage for DebugStorage {
    delegate!(inner: name, version, len_bytes, modified_at, allocated_bytes, free_bytes, disk, close);

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            request_alignment_bytes: self.core.alignment().request_bytes,
            ..self.inner.capabilities()
        }
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        self.start(|core| async move { core.read(offset_bytes, buffers).await })
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        self.start(|core| async move {
            core.changing(core.write(offset_bytes, buffers, flags))
                .await
        })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        self.start(|core| async move {
            core.changing(core.write_zeroes(offset_bytes, len_bytes, flags))
                .await
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.start(|core| async move { core.changing(core.discard(offset_bytes, len_bytes)).await })
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.start(|core| async move {
            core.changing(core.inner.allocate(offset_bytes, len_bytes))
                .await
        })
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        self.start(|core| async move { core.changing(core.inner.truncate(len_bytes)).await })
    }

    fn flush(&self) -> Io<()> {
        self.start(|core| async move { core.flush().await })
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        self.start(|core| async move {
            let range = offset_bytes..offset_bytes + len_bytes;
            core.check(RequestKind::BlockStatus, "block status", &range)
                .await?;
            core.inner.block_status(offset_bytes, len_bytes).await
        })
    }

    fn event_listener(&self) -> Option<Arc<dyn EventListener>> {
        let debugger = self.core.listens.then(|| self.core.debugger.clone());
        debugger.map(|debugger| debugger as Arc<dyn EventListener>)
    }
}

#[cfg(test)]
mod tests;
