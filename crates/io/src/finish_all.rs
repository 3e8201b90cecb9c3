//! Requests side by side, all of which end.
//!
//! To drop a request does not stop it: it goes on in its lane, and a write lands whenever the
//! storage likes. Whoever leaves at the first error and gives back what the others write to
//! has them land in what comes there next. So the usual short cuts (`try_join!`,
//! `try_for_each`, `try_collect` and their like) are refused by clippy, and this stands here.

use std::future::Future;
use std::pin::pin;

use futures_util::stream::{self, StreamExt};

/// Runs futures side by side, at most `most` at a time, and gives what they give in their
/// order.
///
/// # Errors
/// The first one, once all have ended that were begun; after it no more are begun.
pub async fn finish_all<T, E, F>(
    most: usize,
    futures: impl IntoIterator<Item = F>,
) -> Result<Vec<T>, E>
where
    F: Future<Output = Result<T, E>>,
{
    let failed = std::cell::Cell::new(false);
    let futures = futures.into_iter().take_while(|_| !failed.get());
    let running = stream::iter(futures).buffered(most.max(1));
    let mut running = pin!(running.inspect(|ended| failed.set(failed.get() || ended.is_err())));
    let mut done = Ok(Vec::new());
    while let Some(ended) = running.next().await {
        match (&mut done, ended) {
            (Ok(done), Ok(value)) => done.push(value),
            (Ok(_), Err(error)) => done = Err(error),
            (Err(_), _) => {}
        }
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::{block_on, yield_now};

    #[test]
    fn what_they_give_comes_in_their_order() {
        let gives = |number: u32| async move {
            for _ in number..4 {
                yield_now().await;
            }
            Ok::<_, ()>(number)
        };
        let given = block_on(finish_all(3, (0..5).map(gives)));
        assert_eq!(given, Ok(vec![0, 1, 2, 3, 4]));
    }
}
