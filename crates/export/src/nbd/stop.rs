//! A request to stop that any thread can make and any task can wait for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_listener::Event;

/// Asks a server to stop; clones ask the same server.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    requested: AtomicBool,
    event: Event,
}

impl Stop {
    /// A new one, not requested.
    pub fn new() -> Self {
        Self::default()
    }

    /// Requests the stop. Requesting it again changes nothing.
    pub fn request(&self) {
        self.0.requested.store(true, Ordering::SeqCst);
        self.0.event.notify(usize::MAX);
    }

    /// Whether it was requested.
    pub fn is_requested(&self) -> bool {
        self.0.requested.load(Ordering::SeqCst)
    }

    /// Waits until it is requested.
    pub async fn wait(&self) {
        while !self.is_requested() {
            let listener = self.0.event.listen();
            if !self.is_requested() {
                listener.await;
            }
        }
    }
}
