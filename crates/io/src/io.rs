//! [`Io`]: the future of one request, without a box on the common path.
//!
//! A request that others may wait for (it loads, writes back or locks more than it needs) is made
//! with [`Io::start`]: it ends whether or not its future is polled (rule 10).

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use crate::executor::JoinHandle;
use crate::lane::{self, RequestFuture};
use crate::{Buffer, Buffers, Result};

/// A started request. It runs whether or not it is polled; dropping it abandons
/// the result, not the request. (A [`Io::boxed`] request is the exception: it is
/// a plain future and makes progress only while polled.)
///
/// Bound to the thread that made it.
#[must_use = "the result of a request says whether it worked"]
pub struct Io<T>(Repr<T>);

enum Repr<T> {
    Direct(Source<T>),
    /// A storage request whose buffers become the result; see [`Io::map_buffers`].
    Mapped(Source<Buffers>, fn(Buffers) -> T),
}

/// Where a result comes from.
enum Source<T> {
    Ready(Option<Result<T>>),
    Task(JoinHandle<Result<T>>),
    Lane(RequestFuture<T>),
    Boxed(Pin<Box<dyn Future<Output = Result<T>>>>),
}

impl<T> Io<T> {
    /// A request that is complete already.
    pub fn ready(result: Result<T>) -> Self {
        Io(Repr::Direct(Source::Ready(Some(result))))
    }

    /// A request run by a task of the current executor.
    pub fn task(handle: JoinHandle<Result<T>>) -> Self {
        Io(Repr::Direct(Source::Task(handle)))
    }

    /// A request in a slot of the thread's lane.
    pub(crate) fn lane(request: RequestFuture<T>) -> Self {
        Io(Repr::Direct(Source::Lane(request)))
    }

    /// A request that is a future: begun at once, and run to its end by a task of the
    /// current executor, or of the thread's lane, if it has to wait. For what others may wait
    /// for.
    ///
    /// # Panics
    /// As [`lane::spawn`], if it has to wait.
    pub fn start(future: impl Future<Output = Result<T>> + 'static) -> Self
    where
        T: 'static,
    {
        let mut future = Box::pin(future);
        // Rule 10: whoever drops the result does not stop the request.
        // Whom that would wake does not matter: a new task is polled anyway.
        match future
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(result) => Io::ready(result),
            Poll::Pending => Io::task(lane::spawn(future)),
        }
    }

    /// A request that is a future: it advances only while polled, so it must hold
    /// nothing that others wait for.
    pub fn boxed(future: impl Future<Output = Result<T>> + 'static) -> Self {
        Io(Repr::Direct(Source::Boxed(Box::pin(future))))
    }

    /// Whether the result is there without waiting.
    pub fn is_ready(&self) -> bool {
        match &self.0 {
            Repr::Direct(source) => source.is_ready(),
            Repr::Mapped(source, _) => source.is_ready(),
        }
    }
}

impl Io<Buffers> {
    /// The same request with its buffers turned into another result: no task and
    /// no box, so that a device on top of a storage costs nothing a request.
    pub fn map_buffers<T: 'static>(self, map: fn(Buffers) -> T) -> Io<T> {
        match self.0 {
            Repr::Direct(source) => Io(Repr::Mapped(source, map)),
            Repr::Mapped(..) => Io::boxed(async move { self.await.map(map) }),
        }
    }

    /// The same request, of which the single buffer is the result.
    pub fn into_single(self) -> Io<Buffer> {
        self.map_buffers(Buffer::join_all)
    }
}

impl<T> Source<T> {
    fn is_ready(&self) -> bool {
        matches!(self, Source::Ready(_))
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<T>> {
        match self {
            Source::Ready(result) => {
                Poll::Ready(result.take().expect("a completed Io was polled again"))
            }
            Source::Task(handle) => Pin::new(handle).poll(context),
            Source::Lane(request) => Pin::new(request).poll(context),
            Source::Boxed(future) => future.as_mut().poll(context),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Source::Ready(_) => "Io(ready)",
            Source::Task(_) => "Io(task)",
            Source::Lane(_) => "Io(lane)",
            Source::Boxed(_) => "Io(boxed)",
        }
    }
}

impl<T> Unpin for Io<T> {}

impl<T> Future for Io<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        match &mut self.0 {
            Repr::Direct(source) => source.poll(context),
            Repr::Mapped(source, map) => source.poll(context).map_ok(*map),
        }
    }
}

impl<T> fmt::Debug for Io<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            Repr::Direct(source) => source.name(),
            Repr::Mapped(source, _) => source.name(),
        })
    }
}
