//! What a monitor has to say to its client, until that takes it.
//!
//! Invariant: what waits is bounded. Beyond some bytes the next request is not carried out before
//! the client has read; a client that takes no events while more and more of them come is given up.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use event_listener::Event;
use serde_json::Value;

use crate::qmp;

/// A client that leaves more bytes than this behind does not listen.
const MAX_WAITING_BYTES: usize = 4 << 20;

/// A client may leave so many bytes behind and go on asking, as scripts do that look at some of the
/// answers only.
const MAX_AHEAD_BYTES: usize = 1 << 20;

/// Texts on their way to a client.
#[derive(Debug)]
pub(super) struct Outbox {
    pretty: bool,
    texts: RefCell<VecDeque<String>>,
    waiting_bytes: Cell<usize>,
    /// Nothing more is sent.
    given_up: Cell<bool>,
    /// No more will be put in.
    complete: Cell<bool>,
    changed: Event,
}

impl Outbox {
    pub(super) fn new(pretty: bool) -> Self {
        Outbox {
            pretty,
            texts: RefCell::default(),
            waiting_bytes: Cell::default(),
            given_up: Cell::default(),
            complete: Cell::default(),
            changed: Event::new(),
        }
    }

    /// Puts an answer in, however long.
    pub(super) fn answer(&self, message: &Value) {
        if !self.given_up.get() {
            self.put(qmp::text(message, self.pretty));
        }
    }

    /// Puts an answer in that is a line already.
    pub(super) fn answer_line(&self, line: String) {
        if !self.given_up.get() {
            self.put(line);
        }
    }

    /// Whether values are written over several lines.
    pub(super) fn is_pretty(&self) -> bool {
        self.pretty
    }

    /// Puts an event in.
    pub(super) fn push(&self, message: &Value) {
        if self.given_up.get() {
            return;
        }
        let text = qmp::text(message, self.pretty);
        let waiting_bytes = self.waiting_bytes.get() + text.len();
        if waiting_bytes > MAX_WAITING_BYTES && !self.texts.borrow().is_empty() {
            return self.give_up();
        }
        self.put(text);
    }

    fn put(&self, text: String) {
        self.waiting_bytes
            .set(self.waiting_bytes.get() + text.len());
        self.texts.borrow_mut().push_back(text);
        self.changed.notify(usize::MAX);
    }

    /// Takes the next text out; `None` when there will be none.
    pub(super) async fn next(&self) -> Option<String> {
        loop {
            let changed = self.changed.listen();
            if self.given_up.get() {
                return None;
            }
            if let Some(text) = self.texts.borrow_mut().pop_front() {
                return Some(text);
            }
            if self.complete.get() {
                return None;
            }
            changed.await;
        }
    }

    /// Notes that a text has been sent.
    pub(super) fn sent(&self, len_bytes: usize) {
        self.waiting_bytes
            .set(self.waiting_bytes.get().saturating_sub(len_bytes));
        self.changed.notify(usize::MAX);
    }

    /// Waits until everything is sent, or nothing will be.
    pub(super) async fn drained(&self) {
        self.at_most(0).await;
    }

    /// Waits until the client has read enough to ask for more.
    pub(super) async fn caught_up(&self) {
        self.at_most(MAX_AHEAD_BYTES).await;
    }

    async fn at_most(&self, len_bytes: usize) {
        loop {
            let changed = self.changed.listen();
            if self.given_up.get() || self.waiting_bytes.get() <= len_bytes {
                return;
            }
            changed.await;
        }
    }

    /// Lets what waits be sent, and no more.
    pub(super) fn complete(&self) {
        self.complete.set(true);
        self.changed.notify(usize::MAX);
    }

    /// Gives the client up.
    pub(super) fn give_up(&self) {
        self.given_up.set(true);
        self.texts.borrow_mut().clear();
        self.changed.notify(usize::MAX);
    }

    /// Waits until the client is given up.
    pub(super) async fn lost(&self) {
        loop {
            let changed = self.changed.listen();
            if self.given_up.get() {
                return;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use serde_json::json;
    use vellum_io::lane;

    use super::*;

    #[test]
    fn a_client_that_does_not_listen_is_given_up() {
        let outbox = Outbox::new(false);
        let long = json!("x".repeat(1 << 20));
        for _ in 0..3 {
            outbox.push(&long);
        }
        assert!(lane::block_on(outbox.next()).is_some());
        outbox.sent(1 << 20);
        for _ in 0..3 {
            outbox.push(&long);
        }
        assert!(lane::block_on(outbox.next()).is_none());
        lane::block_on(outbox.lost());
    }

    #[test]
    fn a_client_may_leave_some_answers_behind_and_a_long_one() {
        let outbox = Outbox::new(false);
        let part = json!("x".repeat(MAX_AHEAD_BYTES / 4));
        for _ in 0..3 {
            outbox.answer(&part);
            lane::block_on(outbox.caught_up());
        }
        outbox.answer(&json!("x".repeat(2 * MAX_WAITING_BYTES)));
        assert_eq!(outbox.caught_up().now_or_never(), None, "that is too much");
        for _ in 0..3 {
            let sent = lane::block_on(outbox.next()).expect("nobody was given up");
            outbox.sent(sent.len());
        }
        assert_eq!(outbox.caught_up().now_or_never(), None);
        let sent = lane::block_on(outbox.next()).expect("the long one");
        outbox.sent(sent.len());
        lane::block_on(outbox.drained());
    }
}
