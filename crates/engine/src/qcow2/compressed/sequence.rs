//! Requests that work side by side but take one step in the order in which they
//! were made.
//!
//! Invariants:
//! - A ticket that is dropped lets the next one pass, whatever became of
//!   its request, so nobody waits for what was abandoned.
//! - A request waits for its turn before it holds a guest range, and passes it on as soon as
//!   all of its clusters have a place, before its data is written.

use std::collections::BTreeSet;
use std::sync::Arc;

use vellum_io::sync::{Event, Mutex, MutexGuard};

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    passed: Event,
}

#[derive(Debug, Default)]
struct State {
    /// The next ticket to hand out.
    next: u64,
    /// The ticket whose turn it is.
    turn: u64,
    /// Tickets that were given up before their turn.
    gone: BTreeSet<u64>,
}

/// A place in the queue.
#[derive(Debug)]
pub(crate) struct Ticket {
    queue: Arc<Queue>,
    number: u64,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The place behind all that were handed out before.
    pub(crate) fn ticket(self: &Arc<Self>) -> Ticket {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        drop(state);
        Ticket {
            queue: self.clone(),
            number,
        }
    }
}

impl Ticket {
    /// Waits until all earlier tickets are gone.
    pub(crate) async fn turn(&self) {
        loop {
            // Listen first: one that goes between the look and the wait must count.
            let passed = self.queue.passed.listen();
            if self.queue.state().turn == self.number {
                return;
            }
            passed.await;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        state.gone.insert(self.number);
        while {
            let turn = state.turn;
            state.gone.remove(&turn)
        } {
            state.turn += 1;
        }
        drop(state);
        self.queue.passed.notify(usize::MAX);
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;

#[cfg(all(test, not(shuttle)))]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn tickets_have_their_turns_in_order_even_if_some_are_given_up() {
        let queue = Arc::new(Queue::default());
        let [first, second, third] = std::array::from_fn(|_| queue.ticket());
        assert!(first.turn().now_or_never().is_some());
        assert!(third.turn().now_or_never().is_none());
        drop(second);
        assert!(third.turn().now_or_never().is_none());
        let mut waiting = Box::pin(third.turn());
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(first);
        assert!(waiting.as_mut().now_or_never().is_some());
    }
}
