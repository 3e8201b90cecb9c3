//! What a file knows of its syncs: whether what they said may be believed.
//!
//! Invariants:
//! - After a sync has failed, whatever its errno, none succeeds until the file is opened anew:
//!   the kernel has dropped what it could not write, and says "all is written" the next time.
//! - The kernel tells a loss to one of those who ask, and only once. So a sync that the kernel
//!   calls good counts only when all have ended that ran beside it, and none of them failed.
//! - A flush is left out only if all that was complete before it is durable by an earlier one that
//!   began after that; the first after opening never is, for others may have left something.

use std::collections::BTreeSet;

use crate::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use crate::sync::{Event, Mutex, MutexGuard};
use crate::sys::Errno;

/// The syncs of one file, and the changes that they are for.
#[derive(Debug)]
pub(super) struct Syncs {
    /// Why the first one failed; 0: none has.
    errno: AtomicI32,
    /// Changes that are complete; what others have left in the page cache before the
    /// file was opened counts as one.
    changes: AtomicU64,
    /// As many of them as a sync has made durable.
    durable_changes: AtomicU64,
    running: Mutex<Running>,
    ended: Event,
}

/// By number, in the order in which they began.
#[derive(Debug, Default)]
struct Running {
    next: u64,
    numbers: BTreeSet<u64>,
}

impl Default for Syncs {
    fn default() -> Self {
        Syncs {
            errno: AtomicI32::new(0),
            changes: AtomicU64::new(1),
            durable_changes: AtomicU64::new(0),
            running: Mutex::default(),
            ended: Event::new(),
        }
    }
}

impl Syncs {
    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock()
    }

    /// Changes that are complete, if not all of them are known to be durable.
    pub(super) fn changes_to_sync(&self) -> Option<u64> {
        let changes = self.changes.load(Ordering::Acquire);
        let durable = changes == self.durable_changes.load(Ordering::Acquire);
        (!durable || self.check().is_err()).then_some(changes)
    }

    /// Notes that a change has ended.
    pub(super) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// Remembers why a sync has failed.
    pub(super) fn failed(&self, errno: Errno) {
        // Another one may have been the first.
        let _ = self
            .errno
            .compare_exchange(0, errno, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Fails if a sync has (rule 11).
    pub(super) fn check(&self) -> Result<(), Errno> {
        match self.errno.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => Err(errno),
        }
    }

    /// Notes that a sync is about to be asked for; returns its number for [`Syncs::end`].
    pub(super) fn begin(&self) -> u64 {
        let mut running = self.running();
        let number = running.next;
        running.next += 1;
        running.numbers.insert(number);
        number
    }

    /// Notes that the kernel is done with a sync.
    pub(super) fn end(&self, number: u64) {
        self.running().numbers.remove(&number);
        self.ended.notify(usize::MAX);
    }

    /// Waits until a sync that the kernel calls good, and that has just ended, may be
    /// believed; it covers the first `changes` ones. Fails if one that ran beside it has.
    pub(super) async fn accept(&self, changes: u64) -> Result<(), Errno> {
        let before = self.running().next;
        let all_ended = || {
            let running = self.running();
            running.numbers.first().is_none_or(|first| *first >= before)
        };
        while !all_ended() {
            let ended = self.ended.listen();
            if all_ended() {
                break;
            }
            ended.await;
        }
        self.check()?;
        self.durable_changes.fetch_max(changes, Ordering::AcqRel);
        Ok(())
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;
