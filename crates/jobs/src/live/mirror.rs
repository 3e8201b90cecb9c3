//! [`Mirror`]: brings what was written to a device into a layer below it.
//!
//! Invariants:
//! - A range is copied while it is held, and called clean before the copy looks at it. So
//!   of two copies of one range none runs into the other, and what is written meanwhile is
//!   called dirty afterwards.
//! - Who keeps pace writes to the device first, and copies from there: the target never
//!   shows bytes that the device does not hide.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum::nodes::Link;
use vellum::{BlockDevice, Buffer, Io, RequestFlags, ZeroRequest};
use vellum_io::{JoinHandle, spawn};

use super::dirty::DirtyMap;
use super::parallel::PIECE_BYTES;
use super::range_queue::RangeQueue;
use crate::copy::{CopyError, Step};
use crate::scan::Content;
use crate::scope::look_above;

/// A device, and the layer below it that is to become like it.
#[derive(Debug)]
pub(super) struct Mirror {
    source: Arc<dyn BlockDevice>,
    target: Arc<Link>,
    /// How many layers of the source are above the target.
    layers: u32,
    dirty: Arc<DirtyMap>,
    /// Ranges that are being copied, or written and then copied.
    spans: Arc<RangeQueue>,
    /// Writers wait until what they wrote is in the target.
    keeps_pace: AtomicBool,
}

impl Mirror {
    /// Nothing is copied yet, and what is written is only noted.
    pub(super) fn new(
        source: Arc<dyn BlockDevice>,
        target: Arc<Link>,
        layers: u32,
        dirty: Arc<DirtyMap>,
    ) -> Arc<Mirror> {
        Arc::new(Mirror {
            source,
            target,
            layers,
            dirty,
            spans: Arc::default(),
            keeps_pace: AtomicBool::new(false),
        })
    }

    /// Has writers wait, from now on, until what they wrote is in the target; or no more.
    pub(super) fn keep_pace(&self, on: bool) {
        self.keeps_pace.store(on, Ordering::SeqCst);
    }

    /// Whether writers wait for copies.
    pub(super) fn keeps_pace(&self) -> bool {
        self.keeps_pace.load(Ordering::SeqCst)
    }

    /// Brings a dirty range into the target.
    pub(super) fn bring(self: &Arc<Self>, range: Range<u64>) -> JoinHandle<Result<(), CopyError>> {
        let mirror = self.clone();
        spawn(async move {
            let _held = mirror.spans.lock_range(range.clone()).await;
            mirror.dirty.clean(&range);
            let copied = mirror.copy(range.clone()).await;
            if copied.is_err() {
                mirror.dirty.mark(range.start, range.end - range.start);
            }
            copied
        })
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
            let _held = self.spans.lock_range(range.clone()).await;
            let changed = begin(&*self.source).await;
            if changed.is_err() || self.copy(range).await.is_err() {
                self.dirty.mark(offset_bytes, len_bytes);
            }
            changed
        }))
    }

    /// A range in whole blocks of the target, as far as the source reaches.
    fn around(&self, offset_bytes: u64, len_bytes: u64) -> Range<u64> {
        let block_bytes = u64::from(self.target.info().request_alignment_bytes).max(1);
        let size_bytes = self.source.size_bytes();
        let end = offset_bytes.saturating_add(len_bytes).min(size_bytes);
        let start = offset_bytes.min(end) / block_bytes * block_bytes;
        start..end.next_multiple_of(block_bytes).min(size_bytes)
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
            let looked = look_above(&self.source, at, range.end - at, self.layers).await;
            let (content, mut len_bytes) = looked.map_err(failed(Step::Status))?;
            match content {
                Content::Backing => {}
                Content::Zero => {
                    let request = ZeroRequest::default().may_unmap(true);
                    let zeroes = self.target.write_zeroes(at, len_bytes, request).await;
                    zeroes.map_err(failed(Step::Write))?;
                }
                Content::Data => {
                    len_bytes = len_bytes.min(PIECE_BYTES);
                    let buffer = Buffer::for_read(len_bytes as usize);
                    let read = self.source.read(at, buffer).await;
                    let data = read.map_err(failed(Step::Read))?;
                    let written = self.target.write(at, data, RequestFlags::default()).await;
                    written.map_err(failed(Step::Write))?;
                }
            }
            at += len_bytes;
        }
        Ok(())
    }
}
