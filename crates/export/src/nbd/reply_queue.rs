//! Replies on their way out: whatever has completed goes out in one system call.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Poll, Waker};

use vellum_io::{Buffer, Buffers};

use vellum_nbd::reply_encode::ReplyHeader;

/// Most replies in one send: two pieces each stay far below the system's limit.
const MAX_BATCH_REPLIES: usize = 128;
/// A batch is closed once it holds this many bytes, so that the memory of its
/// first reply is not held until its last one is through.
const MAX_BATCH_BYTES: usize = 512 << 10;
/// Memory for the heads of a batch.
const HEADS_BYTES: usize = 8192;

/// One reply or chunk of a reply.
#[derive(Debug)]
pub(super) struct Reply {
    /// What goes first.
    pub(super) head: ReplyHeader,
    /// What follows.
    pub(super) payload: Option<Buffer>,
    /// Set on the last chunk of a request: the payload bytes to give back to the
    /// window once it is sent.
    pub(super) releases: Option<u64>,
}

/// The queue of replies of one connection.
#[derive(Debug, Default)]
pub(super) struct ReplyQueue {
    queue: RefCell<VecDeque<Reply>>,
    /// Only the sender of the connection ever waits.
    sender: RefCell<Option<Waker>>,
    closed: Cell<bool>,
}

impl ReplyQueue {
    /// Queues a reply.
    pub(super) fn push(&self, reply: Reply) {
        self.queue.borrow_mut().push_back(reply);
        self.wake();
    }

    /// Lets [`ReplyQueue::next_batch`] end once the queue is empty.
    pub(super) fn close(&self) {
        self.closed.set(true);
        self.wake();
    }

    fn wake(&self) {
        if let Some(sender) = self.sender.take() {
            sender.wake();
        }
    }

    /// Waits for replies and moves as many as make a good batch to `batch`;
    /// `false` once the replies is closed and empty.
    pub(super) async fn next_batch(&self, batch: &mut Vec<Reply>) -> bool {
        poll_fn(|context| {
            let mut queue = self.queue.borrow_mut();
            if queue.is_empty() {
                if self.closed.get() {
                    return Poll::Ready(false);
                }
                *self.sender.borrow_mut() = Some(context.waker().clone());
                return Poll::Pending;
            }
            let mut bytes = 0;
            while batch.len() < MAX_BATCH_REPLIES && bytes < MAX_BATCH_BYTES {
                let Some(reply) = queue.pop_front() else {
                    break;
                };
                bytes += reply.payload.as_ref().map_or(0, |payload| payload.len());
                batch.push(reply);
            }
            Poll::Ready(true)
        })
        .await
    }
}

/// Memory for the heads of a batch, used over and over.
#[derive(Debug)]
pub(super) struct HeaderPool(Option<Buffer>);

impl HeaderPool {
    pub(super) fn new() -> Self {
        HeaderPool(None)
    }

    /// The pieces to send, taking the payloads out of `batch`: heads at even
    /// places, payloads at odd ones. Neighbouring heads share a piece.
    pub(super) fn gather(&mut self, batch: &mut [Reply]) -> Buffers {
        let mut heads = self.0.take().unwrap_or_else(|| Buffer::zeroed(HEADS_BYTES));
        let mut pieces = Buffers::new();
        let mut filled = 0;
        for reply in batch {
            let bytes = reply.head.as_bytes();
            heads[filled..filled + bytes.len()].copy_from_slice(bytes);
            filled += bytes.len();
            if let Some(payload) = reply.payload.take() {
                pieces.push(heads.split_to(filled));
                pieces.push(payload);
                filled = 0;
            }
        }
        if filled > 0 {
            pieces.push(heads.split_to(filled));
        }
        self.0 = Some(heads);
        pieces
    }

    /// Takes sent pieces back: the heads for the next batch, the payloads for `recycle`.
    pub(super) fn reclaim(&mut self, pieces: Buffers, mut recycle: impl FnMut(Buffer)) {
        let mut heads = Buffer::zeroed(0);
        for (place, piece) in pieces.into_iter().enumerate() {
            if place % 2 == 1 {
                recycle(piece);
                continue;
            }
            let Ok(joined) = heads.join(piece) else {
                // Not the pieces of one batch: start over with fresh memory.
                self.0 = None;
                return;
            };
            heads = joined;
        }
        self.0 = self.0.take().and_then(|rest| heads.join(rest).ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_nbd::reply_encode::ReplyTo;
    use vellum_nbd::request::Framing;

    #[test]
    fn heads_are_gathered_around_payloads_and_come_back() {
        let address = ReplyTo {
            framing: Framing::Structured,
            cookie: 1,
            offset_bytes: 0,
        };
        let reply = |payload: Option<Buffer>| {
            let head = match &payload {
                Some(data) => address.data(0, data.len() as u32, true),
                None => address.done(),
            };
            Reply {
                head,
                payload,
                releases: Some(0),
            }
        };
        let mut heads = HeaderPool::new();
        let mut memory = None;
        for _ in 0..3 {
            let data = Some(Buffer::copy_of(b"data"));
            let mut batch = [reply(None), reply(None), reply(data), reply(None)];
            let pieces = heads.gather(&mut batch);
            let lengths: Vec<_> = pieces.iter().map(|piece| piece.len()).collect();
            assert_eq!(lengths, [16 + 16 + 28, 4, 16]);
            let start = pieces[0].as_ptr();
            assert_eq!(*memory.get_or_insert(start), start, "memory is used again");
            let mut payloads = 0;
            heads.reclaim(pieces, |_| payloads += 1);
            assert_eq!(payloads, 1);
        }
    }
}
