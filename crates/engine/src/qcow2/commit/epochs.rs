//! Tells when the requests that read host clusters at some moment are all gone.
//!
//! A cluster that the mapping has dropped may still be read by a request that
//! looked it up before. Counting readers per cluster would put work on every
//! read; instead readers are counted in two generations. [`Readers::turn`] opens
//! a new generation, and when the old one is empty, nobody reads what was dropped
//! before the turn.

use std::sync::Arc;

use vellum_storage::mutants::{self, Mutant};
use vellum_storage::sync::Event;
use vellum_storage::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Counts running reads by generation.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    generation: AtomicU64,
    running: [AtomicUsize; 2],
    /// Somebody waits for a generation to end.
    awaited: AtomicBool,
    ended: Event,
}

impl Readers {
    /// Registers a read; must be called before the mapping is looked up.
    pub(crate) fn enter(self: &Arc<Self>) -> Reading {
        loop {
            let generation = self.generation.load(Ordering::SeqCst);
            let slot = (generation & 1) as usize;
            self.running[slot].fetch_add(1, Ordering::SeqCst);
            if self.generation.load(Ordering::SeqCst) == generation {
                return Reading {
                    readers: self.clone(),
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

    /// Opens a new generation. The one before the last must be empty: call it
    /// only when [`Readers::old_are_gone`] is true.
    pub(crate) fn turn(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether all reads that entered before the last turn have ended.
    pub(crate) fn old_are_gone(&self) -> bool {
        let old = (self.generation.load(Ordering::SeqCst).wrapping_add(1) & 1) as usize;
        self.running[old].load(Ordering::SeqCst) == 0 || mutants::is(Mutant::ReuseWhileRead)
    }

    /// Waits until all reads that entered before the last turn have ended. One at a
    /// time may wait, and nobody else may open a generation meanwhile.
    pub(crate) async fn old_gone(&self) {
        self.awaited.store(true, Ordering::SeqCst);
        loop {
            let ended = self.ended.listen();
            if self.old_are_gone() {
                break;
            }
            ended.await;
        }
        self.awaited.store(false, Ordering::SeqCst);
    }

    /// As [`Readers::old_gone`], for all reads that entered before this call.
    pub(crate) async fn all_gone(&self) {
        self.old_gone().await;
        self.turn();
        self.old_gone().await;
    }
}

/// A running read; ends when dropped.
#[derive(Debug)]
pub(crate) struct Reading {
    readers: Arc<Readers>,
    slot: usize,
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.readers.leave(self.slot);
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn only_reads_before_the_turn_count() {
        let readers = Arc::new(Readers::default());
        let before = readers.enter();
        readers.turn();
        let after = readers.enter();
        assert!(!readers.old_are_gone());
        drop(before);
        assert!(readers.old_are_gone());
        drop(after);
    }
}
