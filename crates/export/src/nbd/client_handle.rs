//! A client, as those see it who hang up on it.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_io::lane::net::Stream;

/// A connection that can be ended from any thread; clones are the same one.
#[derive(Debug, Clone)]
pub(super) struct ClientHandle {
    stream: Stream,
    hung_up: Arc<AtomicBool>,
}

impl ClientHandle {
    pub(super) fn new(stream: Stream) -> Self {
        ClientHandle {
            stream,
            hung_up: Arc::default(),
        }
    }

    /// Ends one direction or both. Nothing more is begun for the client.
    pub(super) fn hang_up(&self, how: Shutdown) {
        self.hung_up.store(true, Ordering::Release);
        // It may have gone by itself.
        let _ = self.stream.shutdown(how);
    }

    /// Whether either side has hung up.
    pub(super) fn is_gone(&self) -> bool {
        self.is_hung_up() || self.stream.has_peer_left()
    }

    /// Whether the server has hung up.
    pub(super) fn is_hung_up(&self) -> bool {
        self.hung_up.load(Ordering::Acquire)
    }
}
