//! [`Inflations`]: pieces of an image that are inflated once for all who ask for them at a time.
//!
//! What is counted is the memory that they take: beyond it pieces wait for one another.

use std::hash::Hash;
use std::sync::Arc;

use async_lock::Semaphore;
use vellum::Result;

use crate::joined::Joined;

/// What a piece inflates to.
pub(crate) type Content = Arc<Vec<u8>>;

/// The pieces that are being inflated, by what tells them apart.
#[derive(Debug)]
pub(crate) struct Inflations<K> {
    joined: Joined<K, Content>,
    room: Semaphore,
}

impl<K: Copy + Eq + Hash> Inflations<K> {
    /// At most so many at a time.
    pub(crate) fn new(most: usize) -> Inflations<K> {
        Inflations {
            joined: Joined::default(),
            room: Semaphore::new(most.max(1)),
        }
    }

    /// The content of a piece, for which `inflate` is awaited unless somebody inflates it already.
    pub(crate) async fn join(
        &self,
        piece: K,
        inflate: impl Future<Output = Result<Content>>,
    ) -> Result<Content> {
        let inflate = async {
            let _room = self.room.acquire().await;
            inflate.await
        };
        self.joined.join(piece, inflate).await
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
            assert!(inflations.joined.is_idle());
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
