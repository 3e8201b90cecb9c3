//! How much of a client's work may be in flight at once.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};

use vellum_nbd::proto;

use crate::accounting::Accounting;
use crate::fair_depth::StreamDepth;

/// Most requests of one connection in flight.
const MAX_REQUESTS: usize = 128;
/// Most payload bytes of one connection in flight; one request always fits. More
/// than this makes no disk faster, and a client's appetite is our memory.
const MAX_BYTES: u64 = proto::MAX_PAYLOAD_BYTES / 2;

/// Counts requests from their header to the moment their last reply is sent.
/// A client that does not read its replies therefore stops being read.
#[derive(Debug)]
pub(super) struct InFlightLimit {
    requests: StreamDepth,
    bytes: Cell<u64>,
    /// Only the reader of the connection ever waits.
    waiter: RefCell<Option<Waker>>,
}

impl InFlightLimit {
    /// The limit of a connection to an export.
    pub(super) fn new(export: &Arc<Accounting>) -> Self {
        InFlightLimit {
            requests: StreamDepth::new(export),
            bytes: Cell::new(0),
            waiter: RefCell::new(None),
        }
    }

    /// The requests in flight.
    pub(super) fn depth(&self) -> &StreamDepth {
        &self.requests
    }

    fn has_room(&self, bytes: u64) -> bool {
        let requests = self.requests.get();
        let fits = requests < MAX_REQUESTS && self.bytes.get() + bytes <= MAX_BYTES;
        requests == 0 || fits && self.requests.has_room()
    }

    /// Waits for space for a request with `bytes` bytes of payload and takes it.
    pub(super) async fn enter(&self, bytes: u64) {
        if !self.has_room(bytes) {
            self.wait_until(|| self.has_room(bytes)).await;
        }
        self.requests.enter();
        self.bytes.set(self.bytes.get() + bytes);
    }

    /// Gives back what a request took; returns whether nothing is in flight now.
    pub(super) fn leave(&self, bytes: u64) -> bool {
        self.requests.leave();
        self.bytes.set(self.bytes.get() - bytes);
        if let Some(waiter) = self.waiter.take() {
            waiter.wake();
        }
        self.is_idle()
    }

    /// Whether nothing is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.requests.get() == 0
    }

    /// Waits until nothing is in flight.
    pub(super) async fn drained(&self) {
        self.wait_until(|| self.is_idle()).await;
    }

    async fn wait_until(&self, condition: impl Fn() -> bool) {
        poll_fn(|context| {
            if condition() {
                return Poll::Ready(());
            }
            *self.waiter.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::Context;

    #[test]
    fn a_full_window_waits_and_a_big_request_fits_alone() {
        let window = InFlightLimit::new(&Arc::default());
        let mut context = Context::from_waker(Waker::noop());
        assert!(
            pin!(window.enter(10 * MAX_BYTES))
                .poll(&mut context)
                .is_ready()
        );
        let mut second = pin!(window.enter(1));
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(window.leave(10 * MAX_BYTES));
        assert!(second.poll(&mut context).is_ready());
        for _ in 1..MAX_REQUESTS {
            assert!(pin!(window.enter(1)).poll(&mut context).is_ready());
        }
        assert!(pin!(window.enter(1)).poll(&mut context).is_pending());
    }
}
