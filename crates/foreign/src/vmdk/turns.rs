//! [`Turns`]: requests that work side by side, and take one step in the order in which they came.
//!
//! Invariant: a turn that is dropped lets the next one pass, whatever became of its request.

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::task::{Poll, Waker};

use parking_lot::Mutex;

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The number of who comes next.
    next: u64,
    /// The number of whose turn it is.
    current: u64,
    /// Numbers that are done before their turn.
    gone: BTreeSet<u64>,
    waiting: BTreeMap<u64, Waker>,
}

/// A place in the row.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    number: u64,
}

impl Turns {
    /// The place behind all that were given out before.
    pub(super) fn take(&self) -> Turn<'_> {
        let mut state = self.0.lock();
        let number = state.next;
        state.next += 1;
        Turn {
            turns: self,
            number,
        }
    }
}

impl Turn<'_> {
    /// Waits until all that came before are done.
    pub(super) async fn comes(&self) {
        poll_fn(|context| {
            let mut state = self.turns.0.lock();
            if state.current == self.number {
                return Poll::Ready(());
            }
            state.waiting.insert(self.number, context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.0.lock();
        state.waiting.remove(&self.number);
        state.gone.insert(self.number);
        while {
            let current = state.current;
            state.gone.remove(&current)
        } {
            state.current += 1;
        }
        let current = state.current;
        let waker = state.waiting.remove(&current);
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn turns_come_in_order_even_if_some_are_given_up() {
        let turns = Turns::default();
        let [first, second, third] = std::array::from_fn(|_| turns.take());
        assert!(first.comes().now_or_never().is_some());
        assert!(third.comes().now_or_never().is_none());
        drop(second);
        let mut waiting = Box::pin(third.comes());
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(first);
        assert!(waiting.as_mut().now_or_never().is_some());
    }
}
