//! [`Mirror`]: brings what was written to a device into another one.
//!
//! Invariants:
//! - A range is copied while it is held, and called clean before the copy looks at it. So
//!   of two copies of one range none runs into the other, and what is written meanwhile is
//!   called dirty afterwards.
//! - A copy that has not begun when the next round does never begins: users who are held up
//!   wait for no copy of what the last round copies anyway.
//! - Who keeps pace writes to the device first, and copies from there: the target never
//!   shows bytes that the device does not.
//! - Who need not wait for a copy any longer leaves the range dirty; the copy goes on, and
//!   holds the range until it has ended.

use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use event_listener::Event;
use futures_util::future::{Either, select};
use parking_lot::Mutex;
use vellum::nodes::Link;
use vellum::{BlockDevice, Buffer, Io, RequestFlags, ZeroRequest};
use vellum_io::lane::sleep;
use vellum_io::range_lock::{Mode, RangeGuard, RangeLock};
use vellum_io::{JoinHandle, spawn};

use super::dirty::DirtyMap;
use super::live_mirror::MirrorPart;
use super::parallel::PIECE_BYTES;
use crate::copy::{CopyError, Step};
use crate::piece::Content;
use crate::scope::look_above;

/// So long does a writer wait for a copy that nobody asked it to wait for, while the target
/// answers to nothing.
const PATIENCE: Duration = Duration::from_secs(2);
/// What is written to the target at once while writers wait for it: so much that a slow target
/// answers to something every now and then.
const SHORT_REQUEST_BYTES: u64 = 128 << 10;

/// What writers do about copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    /// Writes are only noted.
    Free,
    /// Writers wait until what they wrote is in the target, so that less becomes dirty
    /// than is copied; not for long, since it is the job that wants it.
    Converging,
    /// Writers wait until what they wrote is in the target, however long that takes.
    Demanded,
    /// The job is given up: nobody waits.
    Over,
}

/// A device, and the one that is to become like it.
#[derive(Debug)]
pub(super) struct Mirror {
    /// What users change.
    source: Arc<dyn BlockDevice>,
    /// The job's own ways to both.
    pub(super) view: Arc<Link>,
    pub(super) target: Arc<Link>,
    part: MirrorPart,
    unmap: bool,
    dirty: Arc<DirtyMap>,
    /// Ranges that are being copied, or written and then copied.
    spans: Arc<RangeLock>,
    pace: Mutex<Pace>,
    pace_changed: Event,
    /// The number of the latest round.
    round: AtomicU64,
    copied_bytes: AtomicU64,
    in_flight_bytes: AtomicU64,
    /// How many requests the target has answered to.
    answers: AtomicU64,
}

impl Mirror {
    /// Nothing is copied yet, and what is written is only noted.
    pub(super) fn new(
        source: Arc<dyn BlockDevice>,
        target: Arc<dyn BlockDevice>,
        (part, unmap): (MirrorPart, bool),
        dirty: Arc<DirtyMap>,
    ) -> Arc<Mirror> {
        Arc::new(Mirror {
            view: Link::new(source.clone()),
            source,
            target: Link::new(target),
            part,
            unmap,
            dirty,
            spans: Arc::default(),
            pace: Mutex::new(Pace::Free),
            pace_changed: Event::new(),
            round: AtomicU64::new(0),
            copied_bytes: AtomicU64::new(0),
            in_flight_bytes: AtomicU64::new(0),
            answers: AtomicU64::new(0),
        })
    }

    /// What writers do now.
    pub(super) fn pace(&self) -> Pace {
        *self.pace.lock()
    }

    /// Has writers do something else from now on, if they do what is expected.
    pub(super) fn change_pace(&self, expected: &[Pace], new: Pace) {
        let mut pace = self.pace.lock();
        if !expected.contains(&pace) {
            return;
        }
        *pace = new;
        drop(pace);
        self.pace_changed.notify(usize::MAX);
    }

    /// Whether writers wait for copies.
    pub(super) fn keeps_pace(&self) -> bool {
        matches!(self.pace(), Pace::Converging | Pace::Demanded)
    }

    /// Bytes that have been copied, and bytes that are being copied or wait for that.
    pub(super) fn progress(&self) -> (u64, u64) {
        let left = self.dirty.dirty_bytes() + self.in_flight_bytes.load(Ordering::SeqCst);
        (self.copied_bytes.load(Ordering::SeqCst), left)
    }

    /// How many bytes are written to the target at once.
    pub(super) fn request_bytes(&self) -> u64 {
        match self.pace() {
            Pace::Converging => SHORT_REQUEST_BYTES,
            Pace::Free | Pace::Demanded | Pace::Over => PIECE_BYTES,
        }
    }

    /// Begins another round: its number. What an earlier one has not begun yet, since
    /// nobody waited for its end, is left to this one.
    pub(super) fn next_round(&self) -> u64 {
        self.round.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Brings a dirty range into the target, unless its round is over by then.
    pub(super) fn bring(
        self: &Arc<Self>,
        range: Range<u64>,
        round: u64,
    ) -> JoinHandle<Result<(), CopyError>> {
        let mirror = self.clone();
        spawn(async move {
            let held = mirror.spans.acquire(range.clone(), Mode::Exclusive).await;
            if mirror.pace() == Pace::Over || mirror.round.load(Ordering::SeqCst) != round {
                return Ok(());
            }
            mirror.dirty.clean(&range);
            mirror.bring_held(range, held).await
        })
    }

    /// Copies a range that is held; what cannot be copied is dirty.
    async fn bring_held(&self, range: Range<u64>, _held: RangeGuard) -> Result<(), CopyError> {
        let len_bytes = range.end - range.start;
        self.in_flight_bytes.fetch_add(len_bytes, Ordering::SeqCst);
        let copied = self.copy(range.clone()).await;
        match copied {
            Ok(()) => drop(self.copied_bytes.fetch_add(len_bytes, Ordering::SeqCst)),
            Err(_) => self.dirty.mark(range.start, len_bytes),
        }
        self.in_flight_bytes.fetch_sub(len_bytes, Ordering::SeqCst);
        copied
    }

    /// Waits until all that is being copied now has ended.
    pub(super) async fn settle(&self) {
        drop(self.spans.acquire(0..u64::MAX, Mode::Exclusive).await);
    }

    /// Makes a change of the source, and then has the target show it. What cannot be copied
    /// is dirty: whoever copies that meets the failure, and the user need not know of it.
    pub(super) fn change<T: 'static>(
        self: Arc<Self>,
        offset_bytes: u64,
        len_bytes: u64,
        begin: impl FnOnce(&dyn BlockDevice) -> Io<T> + 'static,
    ) -> Io<T> {
        Io::task(spawn(async move {
            let range = self.around(offset_bytes, len_bytes);
            let held = self.spans.acquire(range.clone(), Mode::Exclusive);
            let held = self.or_released(held).await;
            let changed = begin(&*self.source).await;
            let (Some(held), Ok(_)) = (held, &changed) else {
                self.dirty.mark(offset_bytes, len_bytes);
                return changed;
            };
            self.dirty.clean_within(&range);
            let mirror = self.clone();
            // It ends in its own time, whoever waits for it.
            let copying = spawn(async move { drop(mirror.bring_held(range, held).await) });
            if self.or_released(copying).await.is_none() {
                self.dirty.mark(offset_bytes, len_bytes);
            }
            changed
        }))
    }

    /// Waits for something, as long as writers wait for copies.
    async fn or_released<T>(&self, wait: impl Future<Output = T>) -> Option<T> {
        let released = async {
            let mut seen = self.answers.load(Ordering::SeqCst);
            let mut patience = Box::pin(sleep(PATIENCE));
            loop {
                let changed = self.pace_changed.listen();
                match self.pace() {
                    Pace::Free | Pace::Over => return,
                    Pace::Demanded => changed.await,
                    Pace::Converging => {
                        if let Either::Right(_) = select(patience.as_mut(), changed).await {
                            continue;
                        }
                        let answers = self.answers.load(Ordering::SeqCst);
                        if answers == seen {
                            self.change_pace(&[Pace::Converging], Pace::Free);
                            return;
                        }
                        seen = answers;
                        patience.as_mut().set(sleep(PATIENCE));
                    }
                }
            }
        };
        match select(pin!(wait), pin!(released)).await {
            Either::Left((value, _)) => Some(value),
            Either::Right(_) => None,
        }
    }

    /// A range in whole blocks of the target, as far as the source reaches.
    fn around(&self, offset_bytes: u64, len_bytes: u64) -> Range<u64> {
        let block_bytes = u64::from(self.target.info().request_alignment_bytes).max(1);
        let size_bytes = self.source.size_bytes();
        let end = offset_bytes.saturating_add(len_bytes).min(size_bytes);
        let start = offset_bytes.min(end) / block_bytes * block_bytes;
        start..end.next_multiple_of(block_bytes).min(size_bytes)
    }

    /// What is to be copied at an offset, and for how many bytes.
    async fn look(&self, at: u64, limit_bytes: u64) -> vellum::Result<(Content, u64)> {
        let view: Arc<dyn BlockDevice> = self.view.clone();
        match self.part {
            MirrorPart::Layers(layers) => look_above(&view, at, limit_bytes, layers).await,
            MirrorPart::All => {
                let extent = view.block_status(at, limit_bytes, u32::MAX).await?;
                let content = match extent.kind.is_zero() {
                    true => Content::Zero,
                    false => Content::Data,
                };
                Ok((content, extent.len_bytes.clamp(1, limit_bytes)))
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
            let looked = self.look(at, range.end - at).await;
            let (content, mut len_bytes) = looked.map_err(failed(Step::Status))?;
            match content {
                Content::Backing => {}
                Content::Zero => {
                    let request = ZeroRequest::default().may_unmap(self.unmap);
                    let zeroes = self.target.write_zeroes(at, len_bytes, request).await;
                    zeroes.map_err(failed(Step::Write))?;
                    self.answers.fetch_add(1, Ordering::SeqCst);
                }
                Content::Data => {
                    len_bytes = len_bytes.min(self.request_bytes());
                    let buffer = Buffer::for_read(len_bytes as usize);
                    let read = self.view.read(at, buffer).await;
                    let data = read.map_err(failed(Step::Read))?;
                    let written = self.target.write(at, data, RequestFlags::default()).await;
                    written.map_err(failed(Step::Write))?;
                    self.answers.fetch_add(1, Ordering::SeqCst);
                }
            }
            at += len_bytes;
        }
        Ok(())
    }
}
