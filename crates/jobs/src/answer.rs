//! An answer from another thread.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};

use parking_lot::{Mutex, MutexGuard};

/// Gives the answer; dropped without one, it says that there is none.
#[derive(Debug)]
pub(crate) struct Sender<T>(Arc<Mutex<State<T>>>);

/// Waits for the answer.
#[derive(Debug)]
pub(crate) struct Receiver<T>(Arc<Mutex<State<T>>>);

#[derive(Debug)]
struct State<T> {
    answer: Option<T>,
    over: bool,
    waker: Option<Waker>,
}

fn lock<T>(state: &Mutex<State<T>>) -> MutexGuard<'_, State<T>> {
    state.lock()
}

/// A pair for one answer.
pub(crate) fn answer<T>() -> (Sender<T>, Receiver<T>) {
    let state = Arc::new(Mutex::new(State {
        answer: None,
        over: false,
        waker: None,
    }));
    (Sender(state.clone()), Receiver(state))
}

impl<T> Sender<T> {
    /// Gives the answer.
    pub(crate) fn send(self, value: T) {
        lock(&self.0).answer = Some(value);
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = lock(&self.0);
        state.over = true;
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Receiver<T> {
    /// The answer; `None` if nobody gives one any more.
    pub(crate) async fn wait(&mut self) -> Option<T> {
        poll_fn(|context| {
            let mut state = lock(&self.0);
            if state.over {
                return Poll::Ready(state.answer.take());
            }
            state.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_io::lane;

    #[test]
    fn answers_come_from_other_threads_or_never() {
        let (sender, mut receiver) = answer();
        let thread = std::thread::spawn(move || sender.send(7));
        assert_eq!(lane::block_on(receiver.wait()), Some(7));
        thread.join().unwrap();
        let (sender, mut receiver) = answer::<u8>();
        drop(sender);
        assert_eq!(lane::block_on(receiver.wait()), None);
    }
}
