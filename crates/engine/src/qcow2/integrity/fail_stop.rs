//! [`FailStop`]: when an image accepts no more changes, and why. Metadata that contradicts
//! itself or cannot be written must not be built upon, or the damage spreads.
//!
//! Invariants:
//! - Of several reasons the first is kept, and told to all who ask later.
//! - A full disk (ENOSPC) does not stop changes when a write fails with it, but does when a
//!   barrier does. The close tries once more to write what could not be written; after a
//!   failed barrier it writes nothing (rule 11).
//! - Metadata that contradicts itself also sets the corrupt bit.

use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_io::{Error, ErrorKind, Result};

/// What QEMU answers for an image that was found to be corrupt.
const ENOMEDIUM: i32 = 123;

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
    Ended,
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

impl FailStop {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Fails if an earlier failure of the image has stopped all changes, or it is closed.
    pub(crate) fn check(&self, operation: &'static str, image_name: &str) -> Result<()> {
        if !self.shut.load(Ordering::Acquire) {
            return Ok(());
        }
        let reason = match &*self.lock() {
            State::Open => return Ok(()),
            State::Unwritten(reason) | State::Broken(reason) => reason.clone(),
            State::Ended => {
                let message = "the image is closed";
                let error = Error::new(ErrorKind::InvalidArgument, operation, message);
                return Err(error.target(image_name));
            }
        };
        let errno = match reason.kind() {
            ErrorKind::Corrupt => ENOMEDIUM,
            _ => reason.errno(),
        };
        // Room helps no more.
        Err(reason
            .of_failed_sync()
            .context(
                "write",
                "the image accepts no more writes since required metadata could not be written; \
                 close it, and check it before the next use",
            )
            .with_errno(errno)
            .target(image_name))
    }

    pub(super) fn change(&self, next: impl FnOnce(State) -> State) {
        let mut state = self.lock();
        *state = next(std::mem::take(&mut *state));
        let shut = !matches!(*state, State::Open);
        self.shut.store(shut, Ordering::Release);
    }
}
