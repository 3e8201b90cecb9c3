//! A request to stop that any thread can make and any task can wait for.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use event_listener::Event;
use futures_util::future::{Either, select};
use vellum_io::lane;

/// How long what has begun may take to end by itself once the stop is requested.
const GRACE: Duration = Duration::from_millis(500);

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

    /// What `work` gives; `None` if the stop is requested meanwhile and it does not end soon
    /// after. For what may wait for others for ever, such as opening the export of a server
    /// that does not answer, and may be dropped anywhere. Must run inside a lane.
    pub async fn or_give_up<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let patience = async {
            self.wait().await;
            lane::sleep(GRACE).await;
        };
        match select(pin!(work), pin!(patience)).await {
            Either::Left((done, _)) => Some(done),
            Either::Right(_) => None,
        }
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
