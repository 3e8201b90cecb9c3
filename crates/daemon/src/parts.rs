//! [`Parts`]: what there is, for one after the other, and nodes that are opened meanwhile.
//!
//! Locks are taken in this order: the parts, the turn in which the graph changes, and then those that
//! are never held while something is waited for (the table of nodes, the list of jobs, what is lost).
//!
//! Invariant: nothing is waited for under these that a server or a client may hold up for as long as it
//! likes, but for what cannot be known before: a disk that falls silent in the middle of a change. So
//! nodes are opened before they are held ([`Daemon::open_beside`](crate::Daemon::open_beside)).

use std::ops::{Deref, DerefMut};

use futures_util::lock::{Mutex, MutexGuard};
use vellum_graph::live::{Nodes, Turn};

use crate::daemon_state::DaemonState;

/// What there is, and the turn in which the graph of its nodes changes.
#[derive(Debug)]
pub struct Parts {
    state: Mutex<DaemonState>,
    nodes: Nodes,
}

impl Parts {
    pub(super) fn new(state: DaemonState) -> Parts {
        Parts {
            nodes: state.nodes.clone(),
            state: Mutex::new(state),
        }
    }

    /// Waits until nobody else has them.
    pub async fn lock(&self) -> HeldParts<'_> {
        let state = self.state.lock().await;
        let turn = self.nodes.take_turn().await;
        HeldParts { state, _turn: turn }
    }

    /// As [`Parts::lock`], if nobody else has them.
    pub fn try_lock(&self) -> Option<HeldParts<'_>> {
        let state = self.state.try_lock()?;
        let turn = self.nodes.try_take_turn()?;
        Some(HeldParts { state, _turn: turn })
    }
}

/// What there is, for whoever holds this alone.
#[derive(Debug)]
pub struct HeldParts<'a> {
    state: MutexGuard<'a, DaemonState>,
    _turn: Turn,
}

impl Deref for HeldParts<'_> {
    type Target = DaemonState;

    fn deref(&self) -> &DaemonState {
        &self.state
    }
}

impl DerefMut for HeldParts<'_> {
    fn deref_mut(&mut self) -> &mut DaemonState {
        &mut self.state
    }
}
