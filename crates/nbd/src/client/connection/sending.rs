//! Sending: one of those who have something to send sends for all.

use super::{Connection, Notification, Sending};
use crate::proto;
use vellum_io::sync::atomic::Ordering;
use vellum_io::{Buffer, Buffers, lane};

/// A batch to send is closed once it holds so many bytes, or pieces.
const MAX_BATCH_BYTES: usize = 1 << 20;
const MAX_BATCH_PIECES: usize = 256;

/// One who sends for all; dropped halfway, it ends the connection.
struct Sender<'a> {
    connection: &'a Connection,
    done: bool,
}

impl Drop for Sender<'_> {
    fn drop(&mut self) {
        if !self.done {
            let mut state = self.connection.lock();
            state.sending = false;
            let running = state.waiting.values_mut();
            for waiting in running.filter(|waiting| waiting.sending == Sending::Running) {
                waiting.sending = Sending::Done;
            }
            drop(state);
            self.connection.fail();
        }
    }
}

impl Connection {
    /// Sends what is to be sent, unless somebody does that already.
    pub(super) async fn send_queued(&self) {
        {
            let mut state = self.lock();
            if state.sending || state.outbox.is_empty() {
                return;
            }
            state.sending = true;
        }
        let mut sender = Sender {
            connection: self,
            done: false,
        };
        // Requests that others make at this moment go along.
        lane::yield_now().await;
        let mut batch = Vec::new();
        while let Some(pieces) = self.next_batch(&mut batch) {
            let (pieces, result) = self.channel.send(pieces).await;
            self.transfers.fetch_add(1, Ordering::Relaxed);
            self.give_back(&mut batch, pieces);
            if result.is_err() {
                self.fail();
            }
        }
        sender.done = true;
    }

    /// The next pieces to send, and how many belong to each request; `None` when
    /// there are none, and the caller sends no longer.
    fn next_batch(&self, batch: &mut Vec<(u64, usize)>) -> Option<Buffers> {
        let mut state = self.lock();
        let state = &mut *state;
        if state.broken || state.outbox.is_empty() {
            state.sending = false;
            return None;
        }
        let mut heads = Vec::new();
        let mut payloads = Vec::new();
        let (mut bytes, mut count) = (0, 0);
        while bytes < MAX_BATCH_BYTES && count < MAX_BATCH_PIECES {
            let Some(outgoing) = state.outbox.pop_front() else {
                break;
            };
            let mut payload = Buffers::new();
            if let Some(waiting) = state.waiting.get_mut(&outgoing.cookie) {
                waiting.sending = Sending::Running;
                if waiting.command == proto::CMD_WRITE {
                    payload = waiting.buffers.take().unwrap_or_default();
                }
            }
            bytes += payload.iter().map(|piece| piece.len()).sum::<usize>();
            count += 1 + payload.len();
            batch.push((outgoing.cookie, payload.len()));
            heads.push(outgoing.header);
            payloads.push(payload);
        }
        Some(gather(&heads, payloads))
    }

    /// Gives the payloads that were sent back to their requests.
    fn give_back(&self, batch: &mut Vec<(u64, usize)>, pieces: Buffers) {
        let mut pieces = pieces.into_iter();
        let mut settled = Vec::new();
        let mut state = self.lock();
        let broken = state.broken;
        for (cookie, count) in batch.drain(..) {
            pieces.next();
            let payload: Buffers = pieces.by_ref().take(count).collect();
            if let Some(waiting) = state.waiting.get_mut(&cookie) {
                waiting.sending = Sending::Done;
                if waiting.command == proto::CMD_WRITE && payload.len() == count {
                    waiting.buffers = Some(payload);
                }
                // Whoever met the end of the connection waits only for its buffers.
                let waker = waiting.waker.take_if(|_| broken);
                settled.extend(waker.map(Notification::Wake));
            }
            match state.complete(cookie) {
                Notification::Nothing => {}
                ended => settled.push(ended),
            }
        }
        drop(state);
        settled.into_iter().for_each(|one| self.announce(one));
    }
}

/// Headers and payloads in turns, the headers in one block of memory.
fn gather(heads: &[Vec<u8>], payloads: Vec<Buffers>) -> Buffers {
    let mut block = Buffer::copy_of(&heads.concat());
    let mut pieces = Buffers::new();
    for (head, payload) in heads.iter().zip(payloads) {
        pieces.push(block.split_to(head.len()));
        pieces.extend(payload);
    }
    pieces
}
