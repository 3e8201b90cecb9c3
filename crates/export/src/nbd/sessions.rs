//! Who uses an export, to hang up on them when it goes.
//!
//! Invariant: once the end has come, no session begins requests: whoever enters later is
//! hung up on at once.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use event_listener::Event;
use futures_util::future::{Either, select};
use parking_lot::{Mutex, MutexGuard};
use vellum_io::lane;

use super::client_handle::ClientHandle;

/// How long clients may take to fetch their last replies, and what they asked for may go on
/// once they are gone.
pub(super) const FAREWELL: Duration = Duration::from_millis(500);

/// The connections that are in their transmission phase.
#[derive(Debug, Clone, Default)]
pub(super) struct Sessions(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// A session has ended.
    ended: Event,
}

#[derive(Debug, Default)]
struct State {
    open: BTreeMap<u64, ClientHandle>,
    closing: bool,
}

/// A session; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Session {
    sessions: Sessions,
    number: u64,
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }

    pub(super) fn count(&self) -> usize {
        self.lock().open.len()
    }

    /// Begins a session; `number` is the connection's number in its server.
    pub(super) fn enter(&self, number: u64, client: ClientHandle) -> Session {
        let mut state = self.lock();
        if state.closing {
            client.hang_up(Shutdown::Both);
        }
        state.open.insert(number, client);
        Session {
            sessions: self.clone(),
            number,
        }
    }

    /// Lets no more sessions be, and waits until there are none.
    pub(super) async fn end(&self) {
        self.lock().closing = true;
        self.hang_up(Shutdown::Read);
        let farewell = lane::sleep(FAREWELL);
        if let Either::Right(_) = select(pin!(self.all_gone()), pin!(farewell)).await {
            self.hang_up(Shutdown::Both);
            self.all_gone().await;
        }
    }

    fn hang_up(&self, how: Shutdown) {
        for client in self.lock().open.values() {
            client.hang_up(how);
        }
    }

    async fn all_gone(&self) {
        while self.count() > 0 {
            let ended = self.0.ended.listen();
            if self.count() > 0 {
                ended.await;
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.sessions.lock().open.remove(&self.number);
        self.sessions.0.ended.notify(usize::MAX);
    }
}
