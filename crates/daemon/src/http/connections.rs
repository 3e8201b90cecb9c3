//! [`Connections`]: who is connected to a socket, and who goes when there are too many.
//!
//! Invariants:
//! - There are no more than [`MAX_CONNECTIONS`]. One more takes the place of the one that has waited
//!   longest with nothing being done for it; whoever holds connections open keeps nobody out.
//! - Answers that clients have not taken are no more than [`MAX_UNSENT_BYTES`] together, but for one of
//!   any length; whoever has left one lying longest is hung up on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use event_listener::Event;
use parking_lot::Mutex;
use tokio::task::AbortHandle;

/// Of one socket.
pub(super) const MAX_CONNECTIONS: usize = 128;
/// Of one socket, in answers.
const MAX_UNSENT_BYTES: usize = 64 << 20;

/// The connections of one socket.
#[derive(Debug, Default)]
pub(super) struct Connections {
    /// The oldest first.
    all: Mutex<Vec<Connection>>,
    changed: Event,
}

#[derive(Debug)]
struct Connection {
    state: Arc<ConnectionState>,
    task: AbortHandle,
}

/// What a connection is doing.
#[derive(Debug, Default)]
pub(super) struct ConnectionState {
    /// A request is being carried out.
    busy: AtomicBool,
    /// What its client has not taken of an answer.
    unsent_bytes: AtomicUsize,
}

impl ConnectionState {
    /// Says that a request is being carried out, until what is returned is dropped.
    pub(super) fn work(self: &Arc<Self>) -> Busy {
        self.busy.store(true, Ordering::Relaxed);
        Busy(self.clone())
    }

    /// Counts an answer that begins to be sent.
    pub(super) fn begin_answer(&self, len_bytes: usize) {
        self.unsent_bytes.store(len_bytes, Ordering::Relaxed);
    }

    /// Counts what the client has taken of it.
    pub(super) fn took(&self, len_bytes: usize) {
        self.unsent_bytes.fetch_sub(len_bytes, Ordering::Relaxed);
    }

    /// It has taken all, or never will.
    pub(super) fn end_answer(&self) {
        self.unsent_bytes.store(0, Ordering::Relaxed);
    }

    fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    fn unsent_bytes(&self) -> usize {
        self.unsent_bytes.load(Ordering::Relaxed)
    }
}

/// A request is being carried out.
#[derive(Debug)]
pub(super) struct Busy(Arc<ConnectionState>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Relaxed);
    }
}

/// A connection leaves with this.
#[derive(Debug)]
pub(super) struct Connected {
    of: Arc<Connections>,
    pub(super) state: Arc<ConnectionState>,
}

impl Drop for Connected {
    fn drop(&mut self) {
        let mut all = self.of.all.lock();
        all.retain(|one| !Arc::ptr_eq(&one.state, &self.state));
        drop(all);
        self.of.changed.notify(usize::MAX);
    }
}

impl Connections {
    /// Makes room for one more; `None`: all are at work.
    pub(super) fn admit(self: &Arc<Self>) -> Option<Connected> {
        let mut all = self.all.lock();
        if all.len() >= MAX_CONNECTIONS {
            let idle = all.iter().position(|one| !one.state.is_busy())?;
            all.remove(idle).task.abort();
        }
        Some(Connected {
            of: self.clone(),
            state: Arc::default(),
        })
    }

    /// Notes what serves a connection that was admitted.
    pub(super) fn note(&self, state: Arc<ConnectionState>, task: AbortHandle) {
        self.all.lock().push(Connection { state, task });
    }

    /// Makes room for an answer of one of them.
    pub(super) fn make_room(&self, len_bytes: usize, own: &ConnectionState) {
        let mut all = self.all.lock();
        let unsent = |all: &[Connection]| {
            all.iter()
                .map(|one| one.state.unsent_bytes())
                .sum::<usize>()
        };
        while unsent(&all) + len_bytes > MAX_UNSENT_BYTES {
            let is_slow =
                |one: &Connection| one.state.unsent_bytes() > 0 && !std::ptr::eq(&*one.state, own);
            let Some(slow) = all.iter().position(is_slow) else {
                return;
            };
            all.remove(slow).task.abort();
        }
    }

    /// Waits until all are gone.
    pub(super) async fn all_gone(&self) {
        loop {
            let changed = self.changed.listen();
            if self.all.lock().is_empty() {
                return;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connect(connections: &Arc<Connections>) -> Option<(Connected, tokio::task::JoinHandle<()>)> {
        let connected = connections.admit()?;
        let task = tokio::spawn(std::future::pending());
        connections.note(connected.state.clone(), task.abort_handle());
        Some((connected, task))
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let mut runtime = runtime;
        runtime.build().unwrap().block_on(test);
    }

    #[test]
    fn the_idle_one_that_waited_longest_makes_room() {
        run(async {
            let connections = Arc::new(Connections::default());
            let mut all: Vec<_> = (0..MAX_CONNECTIONS)
                .map(|_| connect(&connections).unwrap())
                .collect();
            let busy = all[0].0.state.work();
            let newest = connect(&connections).unwrap();
            let gone = all.remove(1);
            assert!(gone.1.await.unwrap_err().is_cancelled());
            assert!(!all[0].1.is_finished() && !newest.1.is_finished());
            let works: Vec<_> = all.iter().map(|one| one.0.state.work()).collect();
            let last = newest.0.state.work();
            assert!(connect(&connections).is_none(), "all are at work");
            drop((busy, works, last, all, newest));
            drop(gone.0);
            connections.all_gone().await;
        });
    }

    #[test]
    fn answers_that_nobody_takes_make_room_for_others() {
        run(async {
            let connections = Arc::new(Connections::default());
            let slow = connect(&connections).unwrap();
            let other = connect(&connections).unwrap();
            slow.0.state.begin_answer(MAX_UNSENT_BYTES);
            connections.make_room(1, &slow.0.state);
            assert_eq!(connections.all.lock().len(), 2, "its own is sent");
            connections.make_room(1, &other.0.state);
            assert!(slow.1.await.unwrap_err().is_cancelled());
            assert!(!other.1.is_finished());
        });
    }
}
