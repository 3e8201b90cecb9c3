//! [`RoomBelow`]: whether the host has room for what waits in write buffers.
//!
//! A write that is put into a buffer is acknowledged, and the copy that its cluster becomes gets
//! its room later. On a full host that copy fails, and with it every flush, though the guest was
//! told that its write is done. So writes wait only while the host has room for all copies that
//! buffers still owe, and [`MARGIN_BYTES`] besides, for what others write meanwhile. Where it has
//! not, small writes go past the buffer, and meet a full host before they are acknowledged.
//!
//! Invariants:
//! - The host is asked at most once in [`LOOK_INTERVAL`], and only by writes that would wait.
//! - What is owed counts for all images of the process: they may lie on one file system.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vellum_io::lane;

/// More than others are likely to write until the host is asked again, and what waits is written.
const MARGIN_BYTES: u64 = 256 << 20;
/// How long an answer holds.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// How long writes go past the buffer after one that found no room, whatever the host says: it
/// may not speak of quotas.
const FULL_FOR: Duration = Duration::from_secs(1);

/// What the copies of all clusters that wait in buffers take at most.
static OWED_BYTES: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Clone, Copy)]
enum Known {
    Nothing,
    /// Nobody says how much room there is.
    Untold,
    Until(Instant),
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct RoomBelow {
    /// What the copy of one cluster takes at most.
    bytes_each: u64,
    /// Clusters that wait.
    clusters: AtomicUsize,
    is_short: AtomicBool,
    known: Mutex<Known>,
}

impl RoomBelow {
    /// For clusters whose copies take so much each, with what leads to them.
    pub(super) fn new(bytes_each: u64) -> RoomBelow {
        RoomBelow {
            bytes_each,
            clusters: AtomicUsize::new(0),
            is_short: AtomicBool::new(false),
            known: Mutex::new(Known::Nothing),
        }
    }

    /// How many clusters wait.
    #[inline]
    pub(super) fn clusters(&self) -> usize {
        self.clusters.load(Ordering::Acquire)
    }

    /// One more cluster waits.
    pub(super) fn owe_one(&self) {
        self.clusters.fetch_add(1, Ordering::Release);
        OWED_BYTES.fetch_add(self.bytes_each, Ordering::Relaxed);
    }

    /// One cluster waits no more.
    pub(super) fn paid_one(&self) {
        self.clusters.fetch_sub(1, Ordering::Release);
        OWED_BYTES.fetch_sub(self.bytes_each, Ordering::Relaxed);
    }

    /// Whether writes had better not wait.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Acquire)
    }

    /// Whether the caller is to ask the host now, and to [tell](RoomBelow::note_free) what it says.
    pub(crate) fn wants_look(&self) -> bool {
        let mut known = self.known.lock();
        match *known {
            Known::Nothing => true,
            Known::Untold => false,
            Known::Until(end) => {
                let now = lane::now();
                let is_over = now >= end;
                if is_over {
                    // Others go on with the old answer meanwhile.
                    *known = Known::Until(now + LOOK_INTERVAL);
                }
                is_over
            }
        }
    }

    /// The host has so much room, or does not tell.
    pub(crate) fn note_free(&self, free_bytes: Option<u64>) {
        let wanted = OWED_BYTES
            .load(Ordering::Relaxed)
            .saturating_add(MARGIN_BYTES);
        let mut known = self.known.lock();
        *known = match free_bytes {
            None => Known::Untold,
            Some(_) => Known::Until(lane::now() + LOOK_INTERVAL),
        };
        let is_short = free_bytes.is_some_and(|free_bytes| free_bytes < wanted);
        self.is_short.store(is_short, Ordering::Release);
    }

    /// A request has found no room.
    pub(crate) fn note_full(&self) {
        let mut known = self.known.lock();
        *known = Known::Until(lane::now() + FULL_FOR);
        self.is_short.store(true, Ordering::Release);
    }
}

impl Drop for RoomBelow {
    fn drop(&mut self) {
        let owed = self.clusters() as u64 * self.bytes_each;
        OWED_BYTES.fetch_sub(owed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_other_images_owe_counts() {
        // More than the other tests of this process owe.
        const LARGE: u64 = 1 << 50;
        let (one, other) = (RoomBelow::new(LARGE), RoomBelow::new(1));
        assert!(other.wants_look());
        other.note_free(Some(LARGE));
        assert!(!other.is_short() && !other.wants_look());
        one.owe_one();
        other.note_free(Some(LARGE));
        assert!(other.is_short());
        one.paid_one();
        other.note_free(Some(LARGE));
        assert!(!other.is_short());
        one.owe_one();
        drop(one);
        other.note_free(Some(LARGE));
        assert!(!other.is_short());
        other.note_free(Some(MARGIN_BYTES - 1));
        assert!(other.is_short());
    }

    #[test]
    fn a_request_that_found_no_room_counts_for_a_while_where_nobody_tells() {
        let room = RoomBelow::new(1);
        room.note_free(None);
        assert!(!room.is_short() && !room.wants_look());
        room.note_full();
        assert!(room.is_short() && !room.wants_look());
        *room.known.lock() = Known::Until(lane::now());
        assert!(room.wants_look());
        room.note_free(None);
        assert!(!room.is_short());
    }
}
