//! Guest requests of an image with a write log: they note what they change.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::write_log::{MAX_RECORD_BYTES, RecordKind};
use vellum_io::{Buffer, Result};
use vellum_storage::mutants::{self, Mutant};

use super::log::WriteLog;
use super::overlaps::RequestId;
use super::pending::Change;
use crate::qcow2::image::Image;
use crate::qcow2::read::data::read;
use crate::{RequestFlags, ZeroRequest};
use vellum_io::range_lock::{Mode, RangeGuard};

/// Longer requests go past the log: they cost the disk more twice than a commit does.
const MAX_NOTED_BYTES: u64 = MAX_RECORD_BYTES;

/// What a disk writes as a whole.
const SECTOR_BYTES: u64 = 512;

/// A request that changes the guest's bytes. Dropped without a note, the next flush goes past
/// the log.
struct Noting<'a> {
    log: &'a WriteLog,
    change: Option<Change>,
    /// One that may be noted.
    noted: Option<RequestId>,
    /// One that is too long.
    _other: Option<OtherChange<'a>>,
    _turn: Option<RangeGuard>,
}

/// A change that is not noted, until this is dropped.
pub(super) struct OtherChange<'a> {
    log: &'a WriteLog,
    id: RequestId,
}

impl<'a> OtherChange<'a> {
    /// Begins a change of a guest range.
    pub(super) fn begin(log: &'a WriteLog, range: Range<u64>) -> OtherChange<'a> {
        let id = log.overlaps.begin_other(range);
        OtherChange { log, id }
    }
}

impl Drop for OtherChange<'_> {
    fn drop(&mut self) {
        self.log.pending.lock().note_other();
        self.log.overlaps.end_other(self.id);
    }
}

impl<'a> Noting<'a> {
    /// Begins a request; one that is short waits for its turn with those it overlaps.
    async fn begin(log: &'a WriteLog, range: &Range<u64>) -> Noting<'a> {
        // Rule W2: the image gets requests that overlap in the order of their notes.
        let turn = match is_short(range) && !mutants::is(Mutant::NoteInAnyOrder) {
            true => Some(log.noting.acquire(range.clone(), Mode::Exclusive).await),
            false => None,
        };
        let (noted, other) = match is_short(range) {
            true => (Some(log.overlaps.begin_noted(range.clone())), None),
            false => (None, Some(OtherChange::begin(log, range.clone()))),
        };
        Noting {
            log,
            change: None,
            noted,
            _other: other,
            _turn: turn,
        }
    }

    /// The request is done.
    fn end(mut self, change: Option<Change>) {
        self.change = change;
    }
}

impl Drop for Noting<'_> {
    fn drop(&mut self) {
        let Some(id) = self.noted else {
            return;
        };
        let max_bytes = self.log.max_pending_bytes();
        // Held over both: a change that begins later finds this one noted.
        let mut pending = self.log.pending.lock();
        let has_met = self.log.overlaps.end_noted(id) && !mutants::is(Mutant::NoteBesideOthers);
        match self.change.take() {
            Some(change) if !has_met => pending.note(change, max_bytes),
            _ => pending.note_other(),
        }
    }
}

fn is_short(range: &Range<u64>) -> bool {
    (1..=MAX_NOTED_BYTES).contains(&(range.end - range.start))
}

impl Image {
    /// The whole sectors around a range: a record of a part would mix old and new bytes in one
    /// sector if something newer reaches the disk that was not flushed.
    fn whole_sectors(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start / SECTOR_BYTES * SECTOR_BYTES;
        let end = range.end.next_multiple_of(SECTOR_BYTES);
        start..end.min(self.size_bytes()).max(range.end)
    }

    /// What the image shows of a range, as a change; `None` if it is too long or cannot be read.
    async fn change_as_read(self: &Arc<Self>, range: &Range<u64>) -> Option<Change> {
        if !is_short(range) {
            return None;
        }
        let buffer = Buffer::for_read((range.end - range.start) as usize);
        let bytes = read(self, range.start, buffer).await.ok()?;
        Some(Change::data(range.start, &bytes))
    }

    /// A guest's write; the range was checked.
    pub(crate) async fn guest_write(
        self: &Arc<Self>,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Result<Buffer> {
        let log = self.write_log.get().filter(|_| !buffer.is_empty());
        let Some(log) = log else {
            return self.write(offset_bytes, buffer, flags).await;
        };
        let written = offset_bytes..offset_bytes + buffer.len() as u64;
        let sectors = self.whole_sectors(&written);
        let noting = Noting::begin(log, &sectors).await;
        // The flush at the end is cheaper than what the image does for it.
        let plain = RequestFlags::default();
        let done = self
            .write_telling_place(offset_bytes, buffer, plain)
            .await?;
        let change = match sectors == written {
            true => is_short(&sectors).then(|| Change::data(offset_bytes, &done.buffer)),
            false => self.change_as_read(&sectors).await,
        };
        noting.end(change.map(|change| change.in_place(done.is_in_place)));
        self.flush_for(flags.fua).await?;
        Ok(done.buffer)
    }

    /// A guest's request for zeroes; the range was checked.
    pub(crate) async fn guest_zero(
        self: &Arc<Self>,
        offset_bytes: u64,
        len_bytes: u64,
        request: ZeroRequest,
    ) -> Result<()> {
        let Some(log) = self.write_log.get().filter(|_| len_bytes > 0) else {
            return self.zero(offset_bytes, len_bytes, request).await;
        };
        let kind = match request.may_unmap {
            true => RecordKind::Discard,
            false => RecordKind::Zeroes,
        };
        let zeroed = offset_bytes..offset_bytes + len_bytes;
        let sectors = self.whole_sectors(&zeroed);
        let noting = Noting::begin(log, &sectors).await;
        let plain = ZeroRequest {
            fua: false,
            ..request
        };
        self.zero(offset_bytes, len_bytes, plain).await?;
        let change = match sectors == zeroed {
            true => is_short(&sectors).then(|| Change::zeroes(kind, &sectors)),
            false => self.change_as_read(&sectors).await,
        };
        noting.end(change);
        self.flush_for(request.fua).await
    }

    /// Whether a request that is to be durable is followed by a flush, instead of being
    /// durable by itself: that would leave older records live.
    pub(crate) fn flushes_for(&self, fua: bool) -> bool {
        fua && self.write_log.get().is_some()
    }

    /// A guest's request that changes the bytes of a range in a way that is not noted, and is
    /// followed by a flush if `flushed` says so.
    pub(crate) async fn guest_change<T>(
        self: &Arc<Self>,
        range: Range<u64>,
        flushed: bool,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let log = self.write_log.get();
        let change = log.map(|log| OtherChange::begin(log, range));
        let done = work.await;
        drop(change);
        let done = done?;
        self.flush_for(flushed).await?;
        Ok(done)
    }

    async fn flush_for(self: &Arc<Self>, fua: bool) -> Result<()> {
        match fua {
            true => Box::pin(self.guest_flush()).await,
            false => Ok(()),
        }
    }
}
