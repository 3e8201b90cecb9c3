//! The locks that an open file holds, and the one that a change of its length needs beside
//! them.
//!
//! Invariant: whoever changes the length of a file that it has locks on holds the lock for
//! that meanwhile, so that nobody cuts off what somebody else relies on.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::lock::{self, LockConflict, PermissionSet, Permissions};
use vellum_io::Result;
use vellum_io::lane::Descriptor;

/// The locks of one open file.
#[derive(Debug)]
pub(super) struct HeldLocks {
    descriptor: Arc<Descriptor>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// What the owner has asked for; `None`: no locks.
    wanted: Option<Permissions>,
    /// How many are changing the length.
    resizing: usize,
}

impl State {
    /// What is locked.
    fn held(&self) -> Permissions {
        match self.wanted {
            Some(wanted) if self.resizing > 0 => with_resize(wanted),
            Some(wanted) => wanted,
            None => Permissions::NONE,
        }
    }
}

fn with_resize(permissions: Permissions) -> Permissions {
    Permissions {
        used: permissions.used.with(PermissionSet::RESIZE),
        shared: permissions.shared,
    }
}

impl HeldLocks {
    /// Of a file on which these locks are held already.
    pub(super) fn new(descriptor: Arc<Descriptor>, wanted: Option<Permissions>) -> Arc<Self> {
        let state = State {
            wanted,
            resizing: 0,
        };
        Arc::new(HeldLocks {
            descriptor,
            state: Mutex::new(state),
        })
    }

    /// Exchanges the locks for others; after a failure they are as before.
    pub(super) fn change(&self, wanted: Permissions) -> Result<(), LockConflict> {
        let mut state = self.lock();
        let new = match state.resizing {
            0 => wanted,
            _ => with_resize(wanted),
        };
        self.exchange(state.held(), new)?;
        state.wanted = Some(wanted);
        Ok(())
    }

    /// What the owner has asked for; `None`: no locks.
    pub(super) fn wanted(&self) -> Option<Permissions> {
        self.lock().wanted
    }

    /// Notes locks that were taken on the descriptor otherwise.
    pub(super) fn note(&self, wanted: Permissions) {
        self.lock().wanted = Some(wanted);
    }

    /// Takes the lock of those who change the length, until the result is dropped; `None`
    /// where it is held anyway, or none are.
    pub(super) fn resize(self: &Arc<Self>) -> Result<Option<ResizeGuard>> {
        let mut state = self.lock();
        match state.wanted {
            Some(wanted) if !wanted.used.contains(PermissionSet::RESIZE) => {
                self.exchange(state.held(), with_resize(wanted))
                    .map_err(LockConflict::into_error)?;
                state.resizing += 1;
                Ok(Some(ResizeGuard(self.clone())))
            }
            _ => Ok(None),
        }
    }

    fn exchange(&self, old: Permissions, new: Permissions) -> Result<(), LockConflict> {
        lock::change(self.descriptor.raw(), self.descriptor.name(), old, new)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// The length is being changed.
#[derive(Debug)]
pub(super) struct ResizeGuard(Arc<HeldLocks>);

impl Drop for ResizeGuard {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        let held = state.held();
        state.resizing -= 1;
        // A failure leaves a byte locked that should not be: others may be refused, nothing
        // is harmed.
        let _ = self.0.exchange(held, state.held());
    }
}
