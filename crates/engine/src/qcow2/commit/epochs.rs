//! Epoch-based reclamation of host clusters: tells when the requests that read them at some
//! moment are all over.
//!
//! A cluster that the mapping has dropped may still be read by a request that looked it up
//! before. Counting the readers of each cluster would put work on every read; instead a read
//! enters the current *epoch*. [`Epochs::advance`] begins the next, and once nobody is left in
//! the previous one, nobody reads what was dropped before that. There are two at a time.
//!
//! Anybody may wait and advance at any time, side by side: an epoch begins only once the one before the current
//! is over, so that whoever sees that another has begun knows that.

use std::sync::Arc;

use vellum_io::sync::Event;
use vellum_io::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use vellum_storage::mutants::{self, Mutant};

/// Counts running reads by epoch.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    epoch: AtomicU64,
    running: [AtomicUsize; 2],
    /// How many wait for an epoch to end.
    waiting: AtomicUsize,
    ended: Event,
}

/// Somebody who waits for an epoch to end.
struct Waiting<'a>(&'a Epochs);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Epochs {
    /// Registers a read in the current epoch; call it before the mapping is looked up.
    pub(crate) fn enter(self: &Arc<Self>) -> EpochGuard {
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let slot = (epoch & 1) as usize;
            self.running[slot].fetch_add(1, Ordering::SeqCst);
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return EpochGuard {
                    epochs: self.clone(),
                    slot,
                };
            }
            self.leave(slot);
        }
    }

    /// Also for one that has not entered after all: somebody may have seen it there.
    fn leave(&self, slot: usize) {
        let running = self.running[slot].fetch_sub(1, Ordering::SeqCst);
        if running == 1 {
            self.tell_those_who_wait();
        }
    }

    fn tell_those_who_wait(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.ended.notify(usize::MAX);
        }
    }

    /// The current epoch, if all reads that entered before it have ended.
    pub(crate) fn quiet(&self) -> Option<QuietEpoch> {
        let epoch = self.epoch.load(Ordering::SeqCst);
        let old = (epoch.wrapping_add(1) & 1) as usize;
        let is_over = self.running[old].load(Ordering::SeqCst) == 0;
        (is_over || mutants::is(Mutant::ReuseWhileRead)).then_some(QuietEpoch(epoch))
    }

    /// Begins the epoch after one that was quiet; `false` if somebody else has done so.
    pub(crate) fn advance(&self, QuietEpoch(epoch): QuietEpoch) -> bool {
        // Nobody enters the one before while this is the current one, so it is still over.
        let begun = self.epoch.compare_exchange(
            epoch,
            epoch.wrapping_add(1),
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
        self.tell_those_who_wait();
        begun.is_ok()
    }

    /// Waits until all reads that entered before the last advance have ended.
    pub(crate) async fn wait_for_previous(&self) {
        let begin = self.epoch.load(Ordering::SeqCst);
        let _waiting = self.wait();
        loop {
            let ended = self.ended.listen();
            if self.quiet().is_some() || self.epochs_since(begin) > 0 {
                return;
            }
            ended.await;
        }
    }

    /// As [`Epochs::wait_for_previous`], for all reads that entered before this call.
    pub(crate) async fn wait_for_all(&self) {
        let begin = self.epoch.load(Ordering::SeqCst);
        let _waiting = self.wait();
        loop {
            let ended = self.ended.listen();
            match (self.quiet(), self.epochs_since(begin)) {
                (_, 2..) => return,
                (Some(QuietEpoch(epoch)), 1) if epoch != begin => return,
                (Some(quiet @ QuietEpoch(epoch)), _) if epoch == begin => {
                    self.advance(quiet);
                    continue;
                }
                _ => ended.await,
            }
        }
    }

    fn wait(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        Waiting(self)
    }

    fn epochs_since(&self, begin: u64) -> u64 {
        self.epoch.load(Ordering::SeqCst).wrapping_sub(begin)
    }
}

/// An epoch before which no read is running.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QuietEpoch(u64);

/// A running read; ends when dropped.
#[derive(Debug)]
pub(crate) struct EpochGuard {
    epochs: Arc<Epochs>,
    slot: usize,
}

impl Drop for EpochGuard {
    fn drop(&mut self) {
        self.epochs.leave(self.slot);
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn only_reads_before_the_advance_count() {
        let epochs = Arc::new(Epochs::default());
        let before = epochs.enter();
        let quiet = epochs.quiet().expect("nobody has entered before");
        assert!(epochs.advance(quiet));
        assert!(!epochs.advance(quiet), "it is not the current one any more");
        let after = epochs.enter();
        assert!(epochs.quiet().is_none());
        drop(before);
        assert!(epochs.quiet().is_some());
        drop(after);
    }
}
