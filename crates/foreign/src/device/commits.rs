//! [`Commits`]: the state of the commits of a device, one at a time.

use std::sync::atomic::{AtomicBool, AtomicU64};

use async_lock::Mutex;

/// Who writes tables, one at a time. `C`: what a layout gives out to be written.
#[derive(Debug)]
pub(super) struct Commits<C> {
    /// What a commit has taken and had no room for, to be written by the next one. The data that it leads to
    /// is durable.
    pub(super) unwritten: Mutex<Option<C>>,
    /// The last commit had no room.
    pub(super) lacks_room: AtomicBool,
    /// How many commits were begun: one that was begun after a flush was asked for serves that one, too.
    pub(super) begun: AtomicU64,
    /// How many have ended well, as `begun` counts.
    pub(super) ended: AtomicU64,
    /// `Layout::begin_changes` has ended.
    pub(super) changing: AtomicBool,
    pub(super) first: Mutex<()>,
}

impl<C> Default for Commits<C> {
    fn default() -> Self {
        Commits {
            unwritten: Mutex::new(None),
            lacks_room: AtomicBool::default(),
            begun: AtomicU64::default(),
            ended: AtomicU64::default(),
            changing: AtomicBool::default(),
            first: Mutex::default(),
        }
    }
}
