//! [`Turns`]: requests that work side by side but take one step in the order in which they began.
//!
//! Invariant: a turn that is dropped lets the next one pass, whatever became of its request, so
//! none waits for a request that was abandoned.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};

use crate::sync::Mutex;

/// See the module's head.
#[derive(Debug, Default)]
pub struct Turns(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The number of the turn at the front.
    current: u64,
    /// Turns that have not passed; the one at the front is held.
    places: VecDeque<Place>,
}

#[derive(Debug)]
enum Place {
    /// Not dropped; the waker is that of a request that waits.
    Held(Option<Waker>),
    Dropped,
}

/// A place in the order, until this is dropped.
#[derive(Debug)]
pub struct Turn {
    turns: Arc<Turns>,
    number: u64,
}

impl Turns {
    /// Takes the place behind all that were taken before.
    pub fn take(self: &Arc<Self>) -> Turn {
        let mut state = self.0.lock();
        let number = state.current + state.places.len() as u64;
        state.places.push_back(Place::Held(None));
        Turn {
            turns: self.clone(),
            number,
        }
    }
}

impl State {
    fn place(&mut self, number: u64) -> &mut Place {
        &mut self.places[(number - self.current) as usize]
    }
}

impl Turn {
    /// How many turns were taken before this one.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Waits until all turns that were taken before are dropped.
    pub async fn wait(&self) {
        poll_fn(|context| {
            let mut state = self.turns.0.lock();
            if state.current == self.number {
                return Poll::Ready(());
            }
            *state.place(self.number) = Place::Held(Some(context.waker().clone()));
            Poll::Pending
        })
        .await;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.turns.0.lock();
        *state.place(self.number) = Place::Dropped;
        while let Some(Place::Dropped) = state.places.front() {
            state.places.pop_front();
            state.current += 1;
        }
        let next = match state.places.front_mut() {
            Some(Place::Held(waker)) => waker.take(),
            _ => None,
        };
        drop(state);
        if let Some(waker) = next {
            waker.wake();
        }
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;

#[cfg(all(test, not(shuttle)))]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn turns_come_in_order_even_if_some_are_dropped_before() {
        let turns = Arc::new(Turns::default());
        let [first, second, third] = std::array::from_fn(|_| turns.take());
        assert!(first.wait().now_or_never().is_some());
        assert!(third.wait().now_or_never().is_none());
        drop(second);
        assert!(third.wait().now_or_never().is_none());
        let mut waiting = Box::pin(third.wait());
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(first);
        assert!(waiting.as_mut().now_or_never().is_some());
        assert_eq!((third.number(), turns.take().number()), (2, 3));
    }
}
