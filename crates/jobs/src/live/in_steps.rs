//! Work that is done step by step, at the speed and as long as its controls say.

use std::pin::pin;

use futures_util::future::select;
use vellum_io::lane::yield_now;

use super::parallel::CopyOutcome;
use crate::job::{JobCommand, JobControl};
use crate::rate::RateLimit;

/// Takes one step after the other, until there is none or the job is cancelled; between two of
/// them it may be paused. `step` tells how many bytes it has read or written; `None`: there was
/// nothing left to do.
///
/// # Errors
/// The first of a step.
pub async fn in_steps<E>(
    control: &JobControl,
    mut step: impl AsyncFnMut() -> Result<Option<u64>, E>,
) -> Result<CopyOutcome, E> {
    let mut rate = RateLimit::new(control.speed().clone());
    loop {
        control
            .wait_until(|command| command != JobCommand::Pause)
            .await;
        if control.command() == JobCommand::Cancel {
            return Ok(CopyOutcome::GivenUp);
        }
        let Some(len_bytes) = step().await? else {
            return Ok(CopyOutcome::All);
        };
        let cancelled = control.wait_until(|command| command == JobCommand::Cancel);
        select(pin!(rate.spend(len_bytes)), pin!(cancelled)).await;
        // Steps that need not wait for anything must not keep others from their turn.
        yield_now().await;
    }
}
