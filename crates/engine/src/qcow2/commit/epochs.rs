//! Epoch-based reclamation of host clusters: tells when the requests that read them at some
//! moment are all over.
//!
//! A cluster that the mapping has dropped may still be read by a request that looked it up
//! before. Counting the readers of each cluster would put work on every read; instead a read
//! enters the current *epoch*. [`Epochs::advance`] begins the next, and once nobody is left in
//! the previous one, nobody reads what was dropped before that. There are two at a time.

use std::sync::Arc;

use vellum_io::sync::Event;
use vellum_io::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use vellum_storage::mutants::{self, Mutant};

/// Counts running reads by epoch.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    epoch: AtomicU64,
    running: [AtomicUsize; 2],
    /// Somebody waits for an epoch to end.
    awaited: AtomicBool,
    ended: Event,
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
        if running == 1 && self.awaited.load(Ordering::SeqCst) {
            self.ended.notify(usize::MAX);
        }
    }

    /// Begins the next epoch. The one before the current must be over: call it
    /// only when [`Epochs::previous_is_over`] is true.
    pub(crate) fn advance(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether all reads that entered before the last advance have ended.
    pub(crate) fn previous_is_over(&self) -> bool {
        let old = (self.epoch.load(Ordering::SeqCst).wrapping_add(1) & 1) as usize;
        self.running[old].load(Ordering::SeqCst) == 0 || mutants::is(Mutant::ReuseWhileRead)
    }

    /// Waits until all reads that entered before the last advance have ended. One at a
    /// time may wait, and nobody else may advance meanwhile.
    pub(crate) async fn wait_for_previous(&self) {
        self.awaited.store(true, Ordering::SeqCst);
        loop {
            let ended = self.ended.listen();
            if self.previous_is_over() {
                break;
            }
            ended.await;
        }
        self.awaited.store(false, Ordering::SeqCst);
    }

    /// As [`Epochs::wait_for_previous`], for all reads that entered before this call.
    pub(crate) async fn wait_for_all(&self) {
        self.wait_for_previous().await;
        self.advance();
        self.wait_for_previous().await;
    }
}

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
        epochs.advance();
        let after = epochs.enter();
        assert!(!epochs.previous_is_over());
        drop(before);
        assert!(epochs.previous_is_over());
        drop(after);
    }
}
