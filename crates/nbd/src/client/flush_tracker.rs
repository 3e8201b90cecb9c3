//! What was written through which connection, and whether a flush may be said to cover it.
//!
//! A server that ends takes with it what it has not made durable, and the one that comes after
//! it knows nothing of that: its flush says nothing about it. So it is known of each connection
//! whether writes were answered on it that no flush covers yet.
//!
//! A flush through one connection covers what was written through all of them as long as one
//! server has them all (`CAN_MULTI_CONN`). It has, if the flushed connection existed before
//! something was asked and answered on the other one: a server ends before another one begins
//! in its place. Otherwise the other one must be flushed too, and is gone with its writes if
//! that finds nobody there.
//!
//! Invariants:
//! - Writes that may be lost fail the flush that should have covered them, and every later one
//!   until the export is opened anew. So does a flush that the server has failed.
//! - A connection that is lost without such writes makes nothing fail.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

use super::connection::Connection;
use vellum_io::Error;
use vellum_storage::mutants::{self, Mutant};

/// A connection, and what was written through it.
#[derive(Debug)]
pub(super) struct ConnectionWrites {
    pub(super) connection: Arc<Connection>,
    /// Its number among all that were made.
    born: u64,
    /// The newest connection that existed before something was asked that this one answered.
    heard: AtomicU64,
    /// Changes that were answered, and as many of them as are flushed.
    written: AtomicU64,
    flushed: AtomicU64,
}

impl ConnectionWrites {
    fn has_unflushed(&self) -> bool {
        self.written.load(Ordering::SeqCst) != self.flushed.load(Ordering::SeqCst)
    }

    /// Whether a flush through it covers what was written through one that had heard so much.
    fn covers(&self, heard: u64) -> bool {
        self.born <= heard && !self.connection.is_broken()
    }
}

/// A connection that is gone with writes that were not flushed.
#[derive(Debug, Clone, Copy)]
struct LostConnection {
    number: u64,
    heard: u64,
}

/// The account of all connections to an export.
#[derive(Debug, Default)]
pub(super) struct FlushTracker {
    /// The number of the newest connection.
    newest: AtomicU64,
    gone: Mutex<LostConnections>,
    failed: OnceLock<Error>,
}

#[derive(Debug, Default)]
struct LostConnections {
    next: u64,
    list: Vec<LostConnection>,
}

/// What one flush has to cover.
#[derive(Debug)]
pub(super) struct FlushScope {
    /// Through which it goes, in this order.
    pub(super) through: Vec<Arc<ConnectionWrites>>,
    /// Writes are not covered by any of these.
    pub(super) lost: bool,
    connections: Vec<(Arc<ConnectionWrites>, u64)>,
    gone: u64,
}

impl FlushTracker {
    fn gone(&self) -> MutexGuard<'_, LostConnections> {
        self.gone.lock()
    }

    /// A connection that was just made.
    pub(super) fn track(&self, connection: Arc<Connection>) -> Arc<ConnectionWrites> {
        Arc::new(ConnectionWrites {
            connection,
            born: self.newest.fetch_add(1, Ordering::SeqCst) + 1,
            heard: AtomicU64::new(0),
            written: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
        })
    }

    /// What [`FlushTracker::note_change`] wants to know, from before a request is sent.
    pub(super) fn newest(&self) -> u64 {
        self.newest.load(Ordering::SeqCst)
    }

    /// Notes that a change was answered, which was asked when `newest` was so.
    pub(super) fn note_change(&self, tracked: &ConnectionWrites, newest: u64) {
        if tracked.heard.load(Ordering::Relaxed) < newest {
            tracked.heard.fetch_max(newest, Ordering::SeqCst);
        }
        tracked.written.fetch_add(1, Ordering::SeqCst);
        // Whoever has looked at it since it broke may have found nothing there.
        if tracked.connection.is_broken() {
            self.note_end(tracked);
        }
    }

    /// Notes that a connection is gone, before it leaves its slot.
    pub(super) fn note_end(&self, tracked: &ConnectionWrites) {
        if !tracked.has_unflushed() {
            return;
        }
        let mut gone = self.gone();
        let number = gone.next;
        gone.next += 1;
        gone.list.push(LostConnection {
            number,
            heard: tracked.heard.load(Ordering::SeqCst),
        });
    }

    /// Why no flush succeeds any more, if so.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.failed.get().cloned().map_or(Ok(()), Err)
    }

    /// Remembers why a flush has failed.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.failed.get_or_init(|| error).clone()
    }

    /// What a flush through `first` has to cover, of the connections in use.
    pub(super) fn due(
        &self,
        first: Arc<ConnectionWrites>,
        connections: Vec<Arc<ConnectionWrites>>,
    ) -> FlushScope {
        let gone = self.gone().list.clone();
        let mut due = FlushScope {
            through: vec![first],
            lost: false,
            connections: Vec::new(),
            gone: gone.last().map_or(0, |last| last.number + 1),
        };
        for one in gone {
            due.cover(one.heard, None, &connections);
        }
        for tracked in &connections {
            let written = tracked.written.load(Ordering::SeqCst);
            if written != tracked.flushed.load(Ordering::SeqCst) {
                if !mutants::is(Mutant::FlushOneConnection) {
                    due.cover(
                        tracked.heard.load(Ordering::SeqCst),
                        Some(tracked),
                        &connections,
                    );
                }
                due.connections.push((tracked.clone(), written));
            }
        }
        due
    }

    /// The flush that was due has succeeded, or what it does not cover is given up.
    pub(super) fn complete(&self, due: FlushScope) {
        for (tracked, written) in due.connections {
            tracked.flushed.fetch_max(written, Ordering::SeqCst);
        }
        self.gone().list.retain(|gone| gone.number >= due.gone);
    }
}

impl FlushScope {
    /// Has the flush cover what was written through a connection that had `heard` so much:
    /// one of `connections`, if it is still there.
    fn cover(
        &mut self,
        heard: u64,
        own: Option<&Arc<ConnectionWrites>>,
        connections: &[Arc<ConnectionWrites>],
    ) {
        let is_own =
            |tracked: &Arc<ConnectionWrites>| own.is_some_and(|own| Arc::ptr_eq(own, tracked));
        let covers = |tracked: &&Arc<ConnectionWrites>| {
            !tracked.connection.is_broken() && is_own(tracked) || tracked.covers(heard)
        };
        if self.through.iter().any(|tracked| covers(&tracked)) {
            return;
        }
        match own
            .filter(covers)
            .or_else(|| connections.iter().find(covers))
        {
            Some(tracked) => self.through.push(tracked.clone()),
            None => self.lost = true,
        }
    }
}
