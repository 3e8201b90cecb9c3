//! [`Inflations`]: pieces of an image that are inflated once for all who ask for them at a time.
//!
//! Invariants:
//! - Whoever asks for a piece that somebody inflates gets what that one gets. If that one gives up or
//!   fails, the next one tries.
//! - No lock is held while a piece is read and inflated. What is counted is the memory that it takes: beyond
//!   it pieces wait for one another.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Weak};

use async_lock::{OnceCell, Semaphore};
use parking_lot::Mutex;
use vellum::Result;

/// What a piece inflates to.
pub(crate) type Content = Arc<Vec<u8>>;

/// The pieces that are being inflated, by what tells them apart.
#[derive(Debug)]
pub(crate) struct Inflations<K> {
    running: Mutex<HashMap<K, Weak<OnceCell<Content>>>>,
    room: Semaphore,
}

impl<K: Copy + Eq + Hash> Inflations<K> {
    /// At most so many at a time.
    pub(crate) fn new(most: usize) -> Inflations<K> {
        Inflations {
            running: Mutex::default(),
            room: Semaphore::new(most.max(1)),
        }
    }

    /// The content of a piece, for which `inflate` is awaited unless somebody inflates it already.
    pub(crate) async fn join(
        &self,
        piece: K,
        inflate: impl Future<Output = Result<Content>>,
    ) -> Result<Content> {
        let cell = self.cell(piece);
        let content = cell.get_or_try_init(async || {
            let _room = self.room.acquire().await;
            inflate.await
        });
        let content = content.await.cloned();
        drop(cell);
        self.running
            .lock()
            .retain(|_, cell| cell.strong_count() > 0);
        content
    }

    fn cell(&self, piece: K) -> Arc<OnceCell<Content>> {
        let mut running = self.running.lock();
        if let Some(cell) = running.get(&piece).and_then(Weak::upgrade) {
            return cell;
        }
        let cell = Arc::new(OnceCell::new());
        running.insert(piece, Arc::downgrade(&cell));
        cell
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::task::Poll;

    use futures_util::future::{join, join_all, pending};
    use futures_util::{FutureExt, poll};
    use vellum::io::lane;
    use vellum::{Error, ErrorKind};

    use super::*;

    #[test]
    fn one_inflates_for_all_who_wait() {
        lane::block_on(async {
            let inflations = Inflations::new(4);
            let count = Cell::new(0);
            let inflate = |piece: u8| {
                let count = &count;
                async move {
                    count.set(count.get() + 1);
                    let mut asked = false;
                    poll_fn(|context| {
                        context.waker().wake_by_ref();
                        match std::mem::replace(&mut asked, true) {
                            true => Poll::Ready(()),
                            false => Poll::Pending,
                        }
                    })
                    .await;
                    Ok(Arc::new(vec![piece]))
                }
            };
            let readers = (0..50).map(|at| inflations.join(at % 2, inflate(at % 2)));
            let mut all = Box::pin(join_all(readers));
            assert!(poll!(&mut all).is_pending());
            assert_eq!(count.get(), 2);
            for (at, content) in all.await.into_iter().enumerate() {
                assert_eq!(content.unwrap()[..], [at as u8 % 2]);
            }
            assert_eq!(count.get(), 2);
            assert!(inflations.running.lock().is_empty());
        });
    }

    #[test]
    fn who_gives_up_or_fails_lets_the_next_one_try() {
        lane::block_on(async {
            let inflations = Inflations::new(1);
            let mut first = Box::pin(inflations.join(1, pending()));
            assert!(poll!(&mut first).is_pending());
            let second = async { Err(Error::new(ErrorKind::Corrupt, "read", "no")) };
            let second = inflations.join(1, second);
            let third = inflations.join(1, async { Ok(Arc::new(vec![3])) });
            let mut others = Box::pin(join(second, third));
            assert!(poll!(&mut others).is_pending());
            drop(first);
            let (second, third) = others.await;
            assert_eq!(second.unwrap_err().kind(), ErrorKind::Corrupt);
            assert_eq!(third.unwrap()[..], [3]);
        });
    }

    #[test]
    fn pieces_wait_for_room() {
        lane::block_on(async {
            let inflations = Inflations::new(1);
            let mut first = Box::pin(inflations.join(1, pending()));
            assert!(poll!(&mut first).is_pending());
            let other = inflations.join(2, async { Ok(Arc::new(vec![2])) });
            let mut other = Box::pin(other);
            assert!((&mut other).now_or_never().is_none());
            drop(first);
            assert_eq!(other.await.unwrap()[..], [2]);
        });
    }
}
