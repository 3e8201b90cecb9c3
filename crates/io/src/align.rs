//! Requests that are not aligned as direct I/O wants them: they go through an
//! aligned copy, and a write that ends inside a block first reads the rest of it.
//!
//! Invariant: from the moment at which such a write reads a block until it has written it,
//! nothing else changes that block ([`RangeLocks`]). Requests that change whole blocks run
//! side by side, also where they overlap: they bring nothing old back.

use std::ops::Range;
use std::sync::Arc;

use crate::buffer::total_len;
use crate::range_lock::{Mode, RangeGuard, RangeLock};
use crate::shared_memory::SharedBuffer;
use crate::sync::Event;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::{Buffer, Buffers};

/// What direct I/O on a file wants; all 1 for buffered I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    /// Of offsets and lengths, in bytes; a power of two.
    pub request_bytes: u32,
    /// Of memory, in bytes; a power of two.
    pub memory_bytes: u32,
}

impl Alignment {
    /// No wishes.
    pub const NONE: Alignment = Alignment {
        request_bytes: 1,
        memory_bytes: 1,
    };

    /// Whether a range may go to the kernel as it is.
    pub fn fits_range(self, offset_bytes: u64, len_bytes: u64) -> bool {
        (offset_bytes | len_bytes) & u64::from(self.request_bytes - 1) == 0
    }

    /// Whether a request may go to the kernel as it is.
    pub fn fits(self, offset_bytes: u64, buffers: &[Buffer]) -> bool {
        if self == Self::NONE {
            return true;
        }
        let memory_mask = self.memory_bytes as usize - 1;
        self.fits_range(offset_bytes, 0)
            && buffers.iter().all(|buffer| {
                self.fits_range(0, buffer.len() as u64)
                    && buffer.as_ptr() as usize & memory_mask == 0
            })
    }

    /// As [`Alignment::fits`], of memory that others change.
    pub fn fits_shared(self, offset_bytes: u64, buffers: &[SharedBuffer]) -> bool {
        if self == Self::NONE {
            return true;
        }
        let memory_mask = self.memory_bytes as usize - 1;
        self.fits_range(offset_bytes, 0)
            && buffers.iter().all(|buffer| {
                self.fits_range(0, buffer.len() as u64) && buffer.address() & memory_mask == 0
            })
    }

    /// The smallest aligned range around a range.
    pub fn around(self, offset_bytes: u64, len_bytes: u64) -> Range<u64> {
        let unit = u64::from(self.request_bytes);
        let end = offset_bytes + len_bytes;
        offset_bytes & !(unit - 1)..end.next_multiple_of(unit)
    }

    /// The largest aligned range inside a range; it may be empty.
    pub fn inside(self, offset_bytes: u64, len_bytes: u64) -> Range<u64> {
        let unit = u64::from(self.request_bytes);
        let end = (offset_bytes + len_bytes) & !(unit - 1);
        let start = offset_bytes.next_multiple_of(unit);
        start..end.max(start)
    }
}

/// Copies `source` from `skip_bytes` on into `buffers`.
pub fn scatter(source: &[u8], buffers: &mut Buffers) {
    let mut at = 0;
    for buffer in buffers {
        let end = at + buffer.len();
        buffer.copy_from_slice(&source[at..end]);
        at = end;
    }
}

/// Copies all of `buffers` into `target`.
pub fn gather(buffers: &[Buffer], target: &mut [u8]) {
    debug_assert_eq!(total_len(buffers), target.len() as u64);
    let mut at = 0;
    for buffer in buffers {
        target[at..at + buffer.len()].copy_from_slice(buffer);
        at += buffer.len();
    }
}

/// Who changes which ranges of one file: requests that read, change and write blocks hold them
/// alone; those that change whole blocks pass together.
///
/// A [`RangeLock`] with a way past it: while nobody holds anything alone, to pass costs two atomic
/// additions and no lock. Whoever comes to hold something first waits until all have ended that
/// began so.
#[derive(Debug, Default)]
pub struct RangeLocks {
    ranges: Arc<RangeLock>,
    /// How many hold a range alone, or wait for that.
    exclusive: AtomicUsize,
    /// How many pass that nobody knows the ranges of: they began while `exclusive` was 0.
    untracked: AtomicUsize,
    untracked_ended: Event,
}

/// A range that is held alone.
#[derive(Debug)]
pub struct ExclusiveGuard<'a> {
    _range: RangeGuard,
    _announced: Announced<'a>,
}

/// One that holds a range alone, or waits for that: whoever passes says where.
#[derive(Debug)]
struct Announced<'a>(&'a RangeLocks);

/// The leave to change whole blocks beside others who do.
#[derive(Debug)]
pub struct SharedGuard {
    _held: Held,
}

#[derive(Debug)]
#[expect(dead_code, reason = "held until it is dropped")]
enum Held {
    Range(RangeGuard),
    Untracked(Untracked),
}

#[derive(Debug)]
struct Untracked(Arc<RangeLocks>);

/// What a request that changes a range holds.
#[derive(Debug)]
pub enum WriteGuard<'a> {
    /// Whole blocks.
    Passing(SharedGuard),
    /// Blocks of which a part stays as it is.
    Alone(ExclusiveGuard<'a>),
    /// There are no blocks.
    Nothing,
}

impl RangeLocks {
    /// Waits until nobody else changes any part of `range`, and holds it.
    pub async fn lock_exclusive(&self, range: Range<u64>) -> ExclusiveGuard<'_> {
        self.exclusive.fetch_add(1, Ordering::SeqCst);
        let announced = Announced(self);
        let range = self.ranges.acquire(range, Mode::Exclusive).await;
        let any_untracked = || self.untracked.load(Ordering::SeqCst) > 0;
        while any_untracked() {
            // Listen first: an end between the question and the wait must count.
            let ended = self.untracked_ended.listen();
            if any_untracked() {
                ended.await;
            }
        }
        ExclusiveGuard {
            _range: range,
            _announced: announced,
        }
    }

    /// The leave to change whole blocks, if nobody holds anything alone.
    pub fn try_lock_shared(self: &Arc<Self>) -> Option<SharedGuard> {
        self.untracked.fetch_add(1, Ordering::SeqCst);
        let passing = Held::Untracked(Untracked(self.clone()));
        (self.exclusive.load(Ordering::SeqCst) == 0).then_some(SharedGuard { _held: passing })
    }

    /// Waits until nobody holds any part of `range`, which is made of whole blocks, alone.
    pub async fn lock_shared(self: &Arc<Self>, range: Range<u64>) -> SharedGuard {
        match self.try_lock_shared() {
            Some(passing) => passing,
            None => SharedGuard {
                _held: Held::Range(self.ranges.acquire(range, Mode::Shared).await),
            },
        }
    }

    /// What a change of a range needs where blocks are as `alignment` says. Blocks of which a part
    /// stays as it is are held with the pages that they lie in: where a file ends inside of one, it is
    /// written through the page cache.
    pub async fn lock_for_write(
        self: &Arc<Self>,
        alignment: Alignment,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> WriteGuard<'_> {
        if alignment.request_bytes == 1 {
            return WriteGuard::Nothing;
        }
        let around = alignment.around(offset_bytes, len_bytes);
        match alignment.fits_range(offset_bytes, len_bytes) {
            true => WriteGuard::Passing(self.lock_shared(around).await),
            false => {
                let page_bytes = rustix::param::page_size() as u64;
                let pages = around.start / page_bytes * page_bytes
                    ..around
                        .end
                        .checked_next_multiple_of(page_bytes)
                        .unwrap_or(u64::MAX);
                WriteGuard::Alone(self.lock_exclusive(pages).await)
            }
        }
    }
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        self.0.exclusive.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Untracked {
    fn drop(&mut self) {
        self.0.untracked.fetch_sub(1, Ordering::SeqCst);
        if self.0.exclusive.load(Ordering::SeqCst) > 0 {
            self.0.untracked_ended.notify(usize::MAX);
        }
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;

#[cfg(all(test, not(shuttle)))]
mod tests;
