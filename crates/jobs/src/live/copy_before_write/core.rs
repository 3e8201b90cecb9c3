//! What becomes of the grains of a device: which are still to do, who copies them, and how.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use event_listener::Event;
use parking_lot::{Mutex, MutexGuard};
use vellum::nodes::Link;
use vellum::{BlockDevice, Buffer, Error, ErrorKind, Extent, RequestFlags, Result, ZeroRequest};
use vellum_io::bits::Bits;
use vellum_io::range_lock::overlap;

use super::fleece::Fleece;
use super::{CopyBeforeWriteOptions, OnCopyError};
use crate::copy::{CopyError, Step};
use crate::live::dirty::{DirtyMap, grain_bytes_for};
use crate::live::parallel::PIECE_BYTES;

/// The largest cluster that a target can have, in bytes.
const MAX_CLUSTER_BYTES: u64 = 2 << 20;

/// What the error of a snapshot that is no more says.
const EACCES: i32 = 13;

#[derive(Debug)]
pub(super) struct Core {
    pub(super) source: Arc<dyn BlockDevice>,
    /// The source, for copies.
    pub(super) view: Arc<Link>,
    pub(super) target: Arc<Link>,
    pub(super) size_bytes: u64,
    pub(super) grain_bytes: u64,
    compress: bool,
    pub(super) discard_source: AtomicBool,
    pub(super) on_error: OnCopyError,
    pub(super) timeout: Option<Duration>,
    pub(super) fleece: Option<Fleece>,
    state: Mutex<State>,
    /// A grain has been copied, or a claim or a read has ended.
    pub(super) changed: Event,
    /// What users have written.
    pub(super) written: Arc<DirtyMap>,
}

#[derive(Debug)]
pub(super) struct State {
    /// Grains whose old bytes are in the source alone.
    pub(super) todo: Bits,
    /// Grains whose old bytes are in the fleece.
    pub(super) kept: Bits,
    /// Grains whose old bytes are on their way to the target, and changes do not wait for that.
    pub(super) sent: Bits,
    /// Grains that take room in the fleece, or are about to.
    pub(super) used_grains: u64,
    /// Grains that are being copied.
    claims: Vec<Range<u64>>,
    /// Grains that are being read as they were.
    reads: Vec<Range<u64>>,
    /// Grains that nobody may see as they were.
    pub(super) hidden: Option<Bits>,
    /// Nobody wants old bytes any more.
    pub(super) is_over: bool,
    /// Why what the source showed is not known any more.
    pub(super) broken: Option<Broken>,
    /// Grains that the target lacked then.
    lost: Option<Bits>,
}

/// Why old bytes are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Broken {
    /// They could not be copied in time, or at all.
    Copy,
    /// The fleece had no room for them.
    Full,
}

/// A piece of the old bytes in memory.
pub(super) struct Piece {
    at: u64,
    len_bytes: u64,
    /// Zeroes without it.
    data: Option<Buffer>,
}

enum Next {
    Copy(CopyGuard),
    /// Somebody else is copying.
    Wait,
    Nothing,
}

/// Grains that are being copied, until it is dropped.
pub(super) struct CopyGuard {
    core: Arc<Core>,
    pub(super) grains: Range<u64>,
}

/// Grains that are being read as they were, until it is dropped.
pub(super) struct ReadGuard {
    core: Arc<Core>,
    grains: Range<u64>,
}

fn drop_one(ranges: &mut Vec<Range<u64>>, range: &Range<u64>) {
    if let Some(at) = ranges.iter().position(|other| other == range) {
        ranges.swap_remove(at);
    }
}

/// The refusal of what nobody can see any more.
pub(super) fn inaccessible(offset_bytes: u64) -> Error {
    let error = Error::new(ErrorKind::Denied, "read snapshot", "Permission denied");
    error.with_errno(EACCES).at(offset_bytes)
}

impl State {
    pub(super) fn is_claimed(&self, grain: u64) -> bool {
        self.claims.iter().any(|claim| claim.contains(&grain))
    }

    /// What is not in the target.
    pub(super) fn is_undone(&self, grain: u64) -> bool {
        let is_lost = self.lost.as_ref().is_some_and(|lost| lost.contains(grain));
        is_lost
            || [&self.todo, &self.kept, &self.sent]
                .iter()
                .any(|bits| bits.contains(grain))
    }

    /// Claims nothing but grains to do, whose first is `start`.
    fn claim_from(&mut self, start: u64, limit: u64) -> Option<Range<u64>> {
        let end = self.todo.run_end(start, limit);
        let free = (start..end).take_while(|grain| !self.is_claimed(*grain));
        let claimed = start..start + free.count() as u64;
        if claimed.is_empty() {
            return None;
        }
        self.claims.push(claimed.clone());
        Some(claimed)
    }
}

impl Core {
    pub(super) fn new(
        source: Arc<dyn BlockDevice>,
        target: Arc<dyn BlockDevice>,
        options: CopyBeforeWriteOptions,
    ) -> Core {
        let size_bytes = source.size_bytes();
        let grain_bytes = grain_bytes_for(options.grain_bytes, size_bytes);
        let grains = size_bytes.div_ceil(grain_bytes);
        let fleece = options.fleece.filter(|_| grain_bytes <= 4 * PIECE_BYTES);
        Core {
            view: Link::new(source.clone()),
            source,
            target: Link::new(target),
            size_bytes,
            grain_bytes,
            compress: options.compress,
            discard_source: AtomicBool::new(false),
            on_error: options.on_error,
            timeout: options.timeout,
            fleece: fleece.map(|options| Fleece::new(options, grain_bytes)),
            state: Mutex::new(State {
                todo: Bits::all(grains),
                kept: Bits::none(grains),
                sent: Bits::none(grains),
                used_grains: 0,
                claims: Vec::new(),
                reads: Vec::new(),
                hidden: None,
                is_over: false,
                broken: None,
                lost: None,
            }),
            changed: Event::new(),
            written: options.written,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// How many grains the device has.
    pub(super) fn grain_count(&self) -> u64 {
        self.size_bytes.div_ceil(self.grain_bytes)
    }

    /// The grains that a range of bytes touches.
    pub(super) fn grains(&self, offset_bytes: u64, len_bytes: u64) -> Range<u64> {
        let end = offset_bytes.saturating_add(len_bytes).min(self.size_bytes);
        let start = offset_bytes.min(end);
        match start == end {
            true => 0..0,
            false => start / self.grain_bytes..end.div_ceil(self.grain_bytes),
        }
    }

    pub(super) fn bytes(&self, grains: &Range<u64>) -> Range<u64> {
        let byte = |grain: u64| (grain * self.grain_bytes).min(self.size_bytes);
        byte(grains.start)..byte(grains.end)
    }

    /// Grains of a piece at most.
    pub(super) fn most_grains(&self) -> u64 {
        (PIECE_BYTES / self.grain_bytes).max(1)
    }

    /// The first run of some grains that are set, in bytes and a piece at most.
    pub(super) fn next_run(&self, bits: &Bits, grains: &Range<u64>) -> Option<Range<u64>> {
        let start = bits.find(grains.clone(), true)?;
        let limit = grains.end.min(start + self.most_grains());
        Some(self.bytes(&(start..bits.run_end(start, limit))))
    }

    pub(super) fn has_todo(&self, grains: &Range<u64>) -> bool {
        self.lock().todo.find(grains.clone(), true).is_some()
    }

    /// Claims the first of some grains that are to do.
    fn claim(self: &Arc<Self>, grains: &Range<u64>) -> Next {
        let most = self.most_grains();
        let mut state = self.lock();
        let (mut from, mut waits) = (grains.start, false);
        while let Some(start) = state.todo.find(from..grains.end, true) {
            match state.claim_from(start, grains.end.min(start + most)) {
                Some(claimed) => return Next::Copy(self.guard(claimed)),
                None => {
                    waits = true;
                    from = start + 1;
                }
            }
        }
        match waits {
            true => Next::Wait,
            false => Next::Nothing,
        }
    }

    fn guard(self: &Arc<Self>, grains: Range<u64>) -> CopyGuard {
        CopyGuard {
            core: self.clone(),
            grains,
        }
    }

    /// As [`Core::claim`]; nothing if the first are not to be had.
    pub(super) fn try_claim(self: &Arc<Self>, grains: &Range<u64>) -> Option<CopyGuard> {
        match self.claim(grains) {
            Next::Copy(claim) => Some(claim),
            Next::Wait | Next::Nothing => None,
        }
    }

    /// Has the old bytes of some grains where no change of the source reaches them.
    pub(super) async fn secure(self: Arc<Self>, grains: Range<u64>) -> Result<(), CopyError> {
        loop {
            let changed = self.changed.listen();
            match self.claim(&grains) {
                Next::Copy(claim) => claim.carry_out().await?,
                Next::Wait => changed.await,
                Next::Nothing => return Ok(()),
            }
        }
    }

    /// Has nobody wait for old bytes any more: they are lost.
    pub(super) fn give_up(&self, why: Broken) {
        let none = || Bits::none(self.grain_count());
        let mut state = self.lock();
        if state.broken.is_none() {
            let mut lost = none();
            let undone = (0..self.grain_count()).filter(|grain| state.is_undone(*grain));
            undone.for_each(|grain| lost.insert(grain));
            state.lost = Some(lost);
            state.broken = Some(why);
        }
        state.todo = none();
        state.kept = none();
        drop(state);
        self.changed.notify(usize::MAX);
    }

    /// Waits until nothing is being copied.
    pub(super) async fn settled(&self) {
        loop {
            let changed = self.changed.listen();
            if self.lock().claims.is_empty() {
                return;
            }
            changed.await;
        }
    }

    /// Waits until nobody wants old bytes any more.
    pub(super) async fn over(&self) {
        loop {
            let changed = self.changed.listen();
            if self.lock().is_over {
                return;
            }
            changed.await;
        }
    }

    /// How much of a range is read at once, and whether that is zeroes.
    fn step(&self, extent: &Extent, rest_bytes: u64) -> (u64, bool) {
        let len_bytes = match self.compress {
            // Compressed clusters are written as wholes.
            true => rest_bytes,
            false => extent.len_bytes.clamp(1, rest_bytes),
        };
        let is_zero = extent.kind.is_zero() && extent.len_bytes >= len_bytes;
        // A grain of a huge device is longer than memory.
        let most_bytes = match (is_zero, self.compress) {
            (true, _) => len_bytes,
            (false, true) => MAX_CLUSTER_BYTES,
            (false, false) => PIECE_BYTES,
        };
        (len_bytes.min(most_bytes), is_zero)
    }

    /// Reads a part of a range, from its begin on.
    async fn read_piece(
        &self,
        from: &dyn BlockDevice,
        range: Range<u64>,
    ) -> Result<Piece, CopyError> {
        let (at, rest_bytes) = (range.start, range.end - range.start);
        let failed = |step| {
            move |cause| CopyError {
                step,
                offset_bytes: at,
                cause,
            }
        };
        let status = from.block_status(at, rest_bytes, u32::MAX).await;
        let extent = status.map_err(failed(Step::Status))?;
        let (len_bytes, is_zero) = self.step(&extent, rest_bytes);
        let data = match is_zero {
            true => None,
            false => {
                let buffer = Buffer::for_read(len_bytes as usize);
                Some(from.read(at, buffer).await.map_err(failed(Step::Read))?)
            }
        };
        Ok(Piece {
            at,
            len_bytes,
            data,
        })
    }

    /// Reads a range that fits into memory.
    pub(super) async fn read_all(
        &self,
        from: &dyn BlockDevice,
        range: Range<u64>,
    ) -> Result<Vec<Piece>, CopyError> {
        let mut pieces = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let piece = self.read_piece(from, at..range.end).await?;
            at += piece.len_bytes;
            pieces.push(piece);
        }
        Ok(pieces)
    }

    /// Writes a piece, which is still there afterwards, to the target.
    pub(super) async fn write_piece(&self, piece: &Piece) -> Result<(), CopyError> {
        let written = match &piece.data {
            Some(data) => self.write_data(piece.at, Buffer::copy_of(data)).await,
            None => self.write_zeroes(piece).await,
        };
        written.map_err(|cause| CopyError {
            step: Step::Write,
            offset_bytes: piece.at,
            cause,
        })
    }

    async fn write_data(&self, at: u64, data: Buffer) -> Result<()> {
        let flags = RequestFlags::default();
        let written = match self.compress {
            true => self.target.write_compressed(at, data, flags).await,
            false => self.target.write(at, data, flags).await,
        };
        written.map(drop)
    }

    async fn write_zeroes(&self, piece: &Piece) -> Result<()> {
        let request = ZeroRequest::default().may_unmap(true);
        self.target
            .write_zeroes(piece.at, piece.len_bytes, request)
            .await
    }

    /// Copies a range from the source to the target.
    async fn copy(&self, range: Range<u64>) -> Result<(), CopyError> {
        let mut at = range.start;
        while at < range.end {
            let piece = self.read_piece(&*self.view, at..range.end).await?;
            let written = match piece.data {
                Some(data) => self.write_data(at, data).await,
                None => self.write_zeroes(&piece).await,
            };
            written.map_err(|cause| CopyError {
                step: Step::Write,
                offset_bytes: at,
                cause,
            })?;
            at += piece.len_bytes;
        }
        Ok(())
    }

    /// Gives up in the source what is in the target, where that is wanted.
    pub(super) async fn discard_copied(&self, range: &Range<u64>) {
        if self.discard_source.load(Ordering::Relaxed) {
            // It is a hint: what stays takes only space.
            let len_bytes = range.end - range.start;
            let _ = self.view.discard(range.start, len_bytes).await;
        }
    }

    /// Begins a read of some grains as they were.
    pub(super) async fn read(self: Arc<Self>, grains: Range<u64>) -> ReadGuard {
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

/// Zeroes to be hashed.
const ZEROES: [u8; 4096] = [0; 4096];

/// A part of a piece, inside one grain.
pub(super) struct Part<'a> {
    pub(super) end_bytes: u64,
    len_bytes: usize,
    data: Option<&'a [u8]>,
}

impl Part<'_> {
    /// Adds the bytes to a hash.
    pub(super) fn add_to(&self, hasher: &mut blake3::Hasher) {
        let Some(data) = self.data else {
            let mut left = self.len_bytes;
            while left > 0 {
                let len = left.min(ZEROES.len());
                hasher.update(&ZEROES[..len]);
                left -= len;
            }
            return;
        };
        hasher.update(data);
    }
}

impl Piece {
    /// Cuts the piece at the ends of grains.
    pub(super) fn parts(&self, grain_bytes: u64) -> impl Iterator<Item = Part<'_>> {
        let end = self.at + self.len_bytes;
        let mut next = self.at;
        std::iter::from_fn(move || {
            let start = next;
            next = end.min((start / grain_bytes + 1) * grain_bytes);
            let inside = (start - self.at) as usize..(next - self.at) as usize;
            (start < end).then(|| Part {
                end_bytes: next,
                len_bytes: inside.len(),
                data: self.data.as_ref().map(|data| &data[inside]),
            })
        })
    }

    /// Writes the piece to a device that holds zeroes where nothing was written.
    pub(super) async fn put(&self, device: &dyn BlockDevice) -> Result<()> {
        match &self.data {
            Some(data) => {
                let flags = RequestFlags::default();
                let written = device.write(self.at, Buffer::copy_of(data), flags);
                written.await.map(drop)
            }
            None => Ok(()),
        }
    }
}

impl CopyGuard {
    /// Waits until nobody reads the grains as they were.
    async fn wait_for_readers(&self) {
        loop {
            let changed = self.core.changed.listen();
            let is_read = {
                let state = self.core.lock();
                state.reads.iter().any(|read| overlap(read, &self.grains))
            };
            match is_read {
                true => changed.await,
                false => return,
            }
        }
    }

    /// Has the old bytes in the fleece if there is one with room for them, and in the target
    /// otherwise.
    async fn carry_out(self) -> Result<(), CopyError> {
        self.wait_for_readers().await;
        if let Some(fleece) = &self.core.fleece
            && fleece.keep(&self.core, &self.grains).await
        {
            return Ok(());
        }
        if self.core.lock().broken.is_some() {
            return Ok(());
        }
        let range = self.core.bytes(&self.grains);
        self.core.copy(range.clone()).await?;
        self.core.discard_copied(&range).await;
        let mut state = self.core.lock();
        for grain in self.grains.clone() {
            state.todo.remove(grain);
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
