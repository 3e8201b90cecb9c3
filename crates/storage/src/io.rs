//! [`Io`]: the future of one request, without a box on the common path.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::Result;
use crate::executor::JoinHandle;

/// A started request. It runs whether or not it is polled; dropping it abandons
/// the result, not the request. (A [`Io::boxed`] request is the exception: it is
/// a plain future and makes progress only while polled.)
///
/// Bound to the thread that made it.
#[must_use = "the result of a request says whether it worked"]
pub struct Io<T>(Repr<T>);

enum Repr<T> {
    Ready(Option<Result<T>>),
    Task(JoinHandle<Result<T>>),
    Boxed(Pin<Box<dyn Future<Output = Result<T>>>>),
}

impl<T> Io<T> {
    /// A request that is complete already.
    pub fn ready(result: Result<T>) -> Self {
        Io(Repr::Ready(Some(result)))
    }

    /// A request run by a task of the current executor.
    pub fn task(handle: JoinHandle<Result<T>>) -> Self {
        Io(Repr::Task(handle))
    }

    /// A request that is a future: it advances only while polled.
    pub fn boxed(future: impl Future<Output = Result<T>> + 'static) -> Self {
        Io(Repr::Boxed(Box::pin(future)))
    }

    /// Whether the result is there without waiting.
    pub fn is_ready(&self) -> bool {
        matches!(self.0, Repr::Ready(_))
    }
}

impl<T> Unpin for Io<T> {}

impl<T> Future for Io<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        match &mut self.0 {
            Repr::Ready(result) => {
                Poll::Ready(result.take().expect("a completed Io was polled again"))
            }
            Repr::Task(handle) => Pin::new(handle).poll(context),
            Repr::Boxed(future) => future.as_mut().poll(context),
        }
    }
}

impl<T> fmt::Debug for Io<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Repr::Ready(_) => "Io(ready)",
            Repr::Task(_) => "Io(task)",
            Repr::Boxed(_) => "Io(boxed)",
        })
    }
}
