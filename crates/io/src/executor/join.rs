//! [`JoinHandle`]: a task's result, for who waits for it.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

pub(super) enum Join<T> {
    /// The handle waits with this waker.
    Running(Option<Waker>),
    Done(T),
    /// The result was taken, or there is none.
    Gone,
}

/// Where a task puts its result.
pub(super) struct ResultOf<T>(Rc<RefCell<Join<T>>>);

/// The two ends of a task's result.
pub(super) fn ends<T>() -> (ResultOf<T>, JoinHandle<T>) {
    let join = Rc::new(RefCell::new(Join::Running(None)));
    (ResultOf(join.clone()), JoinHandle { join })
}

impl<T> ResultOf<T> {
    pub(super) fn set(&self, end: Join<T>) {
        let before = self.0.replace(end);
        if let Join::Running(Some(waker)) = before {
            waker.wake();
        }
    }
}

impl<T> Drop for ResultOf<T> {
    /// A task that was dropped or has panicked must not keep anybody waiting.
    fn drop(&mut self) {
        let running = matches!(*self.0.borrow(), Join::Running(_));
        if running {
            self.set(Join::Gone);
        }
    }
}

/// Waits for a task's result; dropping it lets the task run on by itself.
///
/// # Panics
/// When it is polled and there is no result: the task has panicked, or its lane ended first.
pub struct JoinHandle<T> {
    join: Rc<RefCell<Join<T>>>,
}

impl<T> JoinHandle<T> {
    /// Of a task that cannot be started any more.
    pub(crate) fn of_none() -> Self {
        JoinHandle {
            join: Rc::new(RefCell::new(Join::Gone)),
        }
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut join = self.join.borrow_mut();
        if let Join::Running(waker) = &mut *join {
            *waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        match std::mem::replace(&mut *join, Join::Gone) {
            Join::Done(value) => Poll::Ready(value),
            _ => panic!("a task without a result: it panicked, or its lane ended first"),
        }
    }
}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JoinHandle")
    }
}
