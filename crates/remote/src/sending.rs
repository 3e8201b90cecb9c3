//! Requests with bodies that take their time: a server is silent where nothing moves, not where much
//! has to go over a slow line. The client itself counts from the beginning of a request.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

/// A server may be silent so many times as long as one that is only asked: what the operating
/// system has taken has to go out, too, before it can answer.
pub(crate) const SILENCES: u32 = 3;
/// What goes at once, so that it is seen whether something moves.
const PIECE_BYTES: usize = 64 << 10;

/// When something of a body was taken the last time.
#[derive(Debug, Clone)]
pub(crate) struct Moved(Arc<Mutex<Instant>>);

impl Moved {
    /// It begins now.
    pub(crate) fn new() -> Self {
        Moved(Arc::new(Mutex::new(Instant::now())))
    }

    fn note(&self) {
        *self.0.lock() = Instant::now();
    }

    /// Waits for the answer; none if nothing has moved for so long.
    pub(crate) async fn answer<T>(
        &self,
        silence: Duration,
        answer: impl Future<Output = T>,
    ) -> Option<T> {
        let mut answer = pin!(answer);
        loop {
            let until = *self.0.lock() + silence;
            match timeout_at(until, answer.as_mut()).await {
                Ok(answer) => return Some(answer),
                Err(_) if *self.0.lock() + silence > Instant::now() => {}
                Err(_) => return None,
            }
        }
    }
}

/// A body that goes in small pieces, each of which is noted.
pub(crate) struct Watched<B> {
    body: B,
    rest: Bytes,
    moved: Moved,
}

impl<B> Watched<B> {
    pub(crate) fn new(body: B, moved: Moved) -> Self {
        Watched {
            body,
            rest: Bytes::new(),
            moved,
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Watched<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        self.moved.note();
        while self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
                ended => return Poll::Ready(ended),
            }
        }
        let len = self.rest.len().min(PIECE_BYTES);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(len)))))
    }

    fn size_hint(&self) -> SizeHint {
        let behind = self.body.size_hint();
        match behind.exact() {
            Some(len) => SizeHint::with_exact(len + self.rest.len() as u64),
            None => behind,
        }
    }
}
