//! Turns: pieces of work that run at once but take one step in order.
//!
//! Unlike the engine's queue for compressed writes, which lets the next one pass whatever
//! becomes of a request, a piece that fails here passes no turn on: what lies behind it in
//! the order is not begun.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Lets holders of ascending tickets pass one by one.
#[derive(Debug, Default)]
pub struct Sequencer {
    next: Cell<u64>,
    waiting: RefCell<Vec<Waker>>,
}

impl Sequencer {
    /// Waits until all tickets below `ticket` have passed.
    pub async fn wait(&self, ticket: u64) {
        poll_fn(|context| {
            if self.next.get() >= ticket {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Lets the holder of the next ticket pass.
    pub fn pass(&self) {
        self.next.set(self.next.get() + 1);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }
}
