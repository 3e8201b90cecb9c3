//! [`FailStop`]: when an image accepts no more changes, and why. Metadata that contradicts
//! itself or cannot be written must not be built upon, or the damage spreads.
//!
//! Invariants:
//! - Of several reasons the first is kept, and told to all who ask later.
//! - A full disk (ENOSPC) does not stop changes when a write fails with it, but does when a
//!   barrier does. The close tries once more to write what could not be written; after a
//!   failed barrier it writes nothing (rule 11).
//! - Metadata that contradicts itself also sets the corrupt bit.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use vellum_io::Error;

/// Whether an image accepts changes, and why not.
#[derive(Debug, Default)]
pub(super) enum State {
    #[default]
    Open,
    /// Metadata could not be written, all of which is still in memory: nothing else is
    /// wrong.
    Unwritten(Error),
    /// Memory and disk may differ.
    Broken(Error),
    /// The image was closed.
    Ended(Error),
}

/// Why the image accepts no changes any more, if so.
#[derive(Debug, Default)]
pub(crate) struct FailStop {
    state: Mutex<State>,
    /// The state is not [`State::Open`]: every request looks.
    shut: AtomicBool,
    /// Users know that the image is damaged, and goes on being used all the same.
    pub(super) said: AtomicBool,
}

impl State {
    pub(super) fn reason(&self) -> Option<&Error> {
        match self {
            State::Open => None,
            State::Unwritten(reason) | State::Broken(reason) | State::Ended(reason) => Some(reason),
        }
    }
}

impl FailStop {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn is_shut(&self) -> bool {
        self.shut.load(Ordering::Acquire)
    }

    pub(super) fn change(&self, next: impl FnOnce(State) -> State) {
        let mut state = self.lock();
        *state = next(std::mem::take(&mut *state));
        let shut = !matches!(*state, State::Open);
        self.shut.store(shut, Ordering::Release);
    }
}
