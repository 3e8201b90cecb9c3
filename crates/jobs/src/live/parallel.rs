//! Pieces of a job that run side by side, at the speed and as long as its controls say.

use std::ops::Range;
use std::pin::pin;

use futures_util::future::select;
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::job::{JobCommand, JobControl};
use crate::rate::RateLimit;

/// Bytes of a piece at most.
pub(super) const PIECE_BYTES: u64 = 1 << 20;

/// How a copy ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyOutcome {
    /// All of it was copied.
    All,
    /// It was given up, as it was told to.
    GivenUp,
}

/// What a job finds when it looks for something to do.
pub(super) enum NextPiece {
    /// A piece, in bytes of its device.
    Piece(Range<u64>),
    /// Nothing there; it has to look further on.
    Nothing,
    /// The end.
    End,
}

/// Looks for pieces and begins them, up to `parallel` at once. All that were begun have
/// ended on return; the first failure is told.
pub(super) async fn run<E, F>(
    parallel: usize,
    control: &JobControl,
    mut look: impl AsyncFnMut() -> Result<NextPiece, E>,
    mut begin: impl FnMut(Range<u64>) -> F,
) -> Result<CopyOutcome, E>
where
    F: Future<Output = Result<(), E>>,
{
    let mut rate = RateLimit::new(control.speed().clone());
    let mut running = FuturesUnordered::new();
    let mut result = Ok(CopyOutcome::All);
    loop {
        control
            .wait_until(|command| command != JobCommand::Pause)
            .await;
        if control.command() == JobCommand::Cancel {
            result = Ok(CopyOutcome::GivenUp);
            break;
        }
        let range = match look().await {
            Ok(NextPiece::Piece(range)) => range,
            Ok(NextPiece::Nothing) => continue,
            Ok(NextPiece::End) => break,
            Err(error) => {
                result = Err(error);
                break;
            }
        };
        let wait = pin!(rate.wait_for(range.end - range.start));
        select(
            wait,
            pin!(control.wait_until(|command| command == JobCommand::Cancel)),
        )
        .await;
        if control.command() == JobCommand::Cancel {
            // The piece was not due yet.
            result = Ok(CopyOutcome::GivenUp);
            break;
        }
        running.push(begin(range));
        if running.len() >= parallel.max(1)
            && let Some(Err(error)) = running.next().await
        {
            result = Err(error);
            break;
        }
    }
    while let Some(ended) = running.next().await {
        if let (Err(error), Ok(_)) = (ended, &result) {
            result = Err(error);
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use vellum_io::lane::block_on;

    use super::*;

    #[test]
    fn no_piece_is_begun_early_because_the_job_is_cancelled() {
        block_on(async {
            let control = JobControl::new();
            control.speed().set(1);
            let begun = std::cell::Cell::new(0);
            let look = async || Ok::<_, ()>(NextPiece::Piece(0..1 << 20));
            let begin = |_| {
                begun.set(begun.get() + 1);
                async { Ok(()) }
            };
            let mut copy = pin!(run(1, &control, look, begin));
            assert_eq!(copy.as_mut().now_or_never(), None);
            control.set(JobCommand::Cancel);
            assert_eq!(copy.await, Ok(CopyOutcome::GivenUp));
            assert_eq!(begun.get(), 1);
        });
    }
}
