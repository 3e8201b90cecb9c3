//! [`Reply`]: where the result of a simulated request arrives.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::{Mutex, MutexGuard};
use vellum_io::Result;

#[derive(Debug)]
struct Slot<T> {
    result: Option<Result<T>>,
    waker: Option<Waker>,
}

/// Where the result of a request arrives.
#[derive(Debug)]
pub(crate) struct Reply<T>(Arc<Mutex<Slot<T>>>);

impl<T> Clone for Reply<T> {
    fn clone(&self) -> Self {
        Reply(self.0.clone())
    }
}

impl<T> Reply<T> {
    pub(crate) fn new() -> Self {
        Reply(Arc::new(Mutex::new(Slot {
            result: None,
            waker: None,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Slot<T>> {
        self.0.lock()
    }

    pub(crate) fn send(&self, result: Result<T>) {
        let mut slot = self.lock();
        slot.result = Some(result);
        if let Some(waker) = slot.waker.take() {
            waker.wake();
        }
    }

    pub(crate) fn take(&self) -> Option<Result<T>> {
        self.lock().result.take()
    }
}

impl<T> Future for Reply<T> {
    type Output = Result<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        let mut slot = self.lock();
        match slot.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                slot.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
