//! [`RangeQueue`]: ranges of a device, each held by one at a time.
//!
//! Invariant: of those who want overlapping ranges the first to come is the first to go, so
//! nobody waits for more than those who were there before.

use std::ops::Range;
use std::sync::Arc;

use event_listener::Event;
use parking_lot::{Mutex, MutexGuard};

/// Ranges that are held or wanted.
#[derive(Debug, Default)]
pub(super) struct RangeQueue {
    state: Mutex<State>,
    freed: Event,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// In the order in which they came, each with its number.
    spans: Vec<(u64, Range<u64>)>,
}

/// A range that is held, or waited for, until this is dropped.
#[derive(Debug)]
pub(super) struct QueuedRange {
    spans: Arc<RangeQueue>,
    number: u64,
}

impl State {
    fn is_first(&self, number: u64) -> bool {
        let Some(at) = self.spans.iter().position(|span| span.0 == number) else {
            return true;
        };
        let own = &self.spans[at].1;
        let before = self.spans[..at].iter();
        !before
            .map(|(_, other)| other)
            .any(|other| other.start < own.end && own.start < other.end)
    }
}

impl RangeQueue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Holds a range until the result is dropped.
    pub(super) async fn lock_range(self: &Arc<Self>, range: Range<u64>) -> QueuedRange {
        let span = {
            let mut state = self.lock();
            let number = state.next;
            state.next += 1;
            state.spans.push((number, range));
            QueuedRange {
                spans: self.clone(),
                number,
            }
        };
        loop {
            let freed = self.freed.listen();
            if self.lock().is_first(span.number) {
                return span;
            }
            freed.await;
        }
    }
}

impl Drop for QueuedRange {
    fn drop(&mut self) {
        let mut state = self.spans.lock();
        state.spans.retain(|span| span.0 != self.number);
        drop(state);
        self.spans.freed.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use vellum_io::lane::block_on;

    use super::*;

    #[test]
    fn who_came_first_goes_first_and_who_gives_up_is_in_nobodys_way() {
        block_on(async {
            let spans = Arc::<RangeQueue>::default();
            let first = spans.lock_range(0..10).await;
            let mut second = Box::pin(spans.lock_range(5..20));
            assert!(second.as_mut().now_or_never().is_none());
            let mut third = Box::pin(spans.lock_range(15..30));
            assert!(
                third.as_mut().now_or_never().is_none(),
                "not past the second"
            );
            assert!(spans.lock_range(10..15).now_or_never().is_none());
            let _beside = spans.lock_range(40..50).await;
            drop(second);
            let third = third.now_or_never().expect("its turn");
            drop(first);
            drop(third);
            assert!(spans.lock_range(0..30).now_or_never().is_some());
        });
    }
}
