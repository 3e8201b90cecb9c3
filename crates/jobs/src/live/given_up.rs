//! What a job that is given up waits for: a moment for what it has begun, and no longer.
//!
//! Invariant: a request that is on its way goes on to its end, and the device that it uses is in
//! use until then.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use vellum::nodes::{Link, absent};
use vellum_io::lane::sleep;

use super::parallel::CopyOutcome;
use crate::job::{JobCommand, JobControl};

/// So long does a job that is given up wait for what it has begun.
pub(super) const GRACE: Duration = Duration::from_millis(300);

async fn given_up(control: &JobControl) {
    control
        .wait_until(|command| command == JobCommand::Cancel)
        .await;
}

/// Waits for something unless the job is given up. What was begun goes on.
pub(super) async fn or_given_up<T>(
    control: &JobControl,
    work: impl Future<Output = T>,
) -> Option<T> {
    match select(pin!(work), pin!(given_up(control))).await {
        Either::Left((done, _)) => Some(done),
        Either::Right(_) => None,
    }
}

/// Waits for a copy to end, and no longer than a moment once the job is given up. What was begun
/// goes on.
pub(super) async fn with_grace<E>(
    control: &JobControl,
    copy: impl Future<Output = Result<CopyOutcome, E>>,
) -> Result<CopyOutcome, E> {
    let out_of_patience = async {
        given_up(control).await;
        sleep(GRACE).await;
    };
    match select(pin!(copy), pin!(out_of_patience)).await {
        Either::Left((copied, _)) => copied,
        Either::Right(_) => Ok(CopyOutcome::GivenUp),
    }
}

/// Waits a moment for something, and no longer. What was begun goes on.
pub(super) async fn in_a_moment<T>(work: impl Future<Output = T>) -> Option<T> {
    match select(pin!(work), pin!(sleep(GRACE))).await {
        Either::Left((done, _)) => Some(done),
        Either::Right(_) => None,
    }
}

/// Has no request go through a link any more, once those on their way have ended.
pub(super) async fn cut_off(link: &Link) {
    let drained = link.drain().await;
    drained.set(absent(link));
}

/// Cuts a job off from what it has copied between: from the source in any case, and from the target
/// if what is on its way there ends within a moment. Whether it has; otherwise [`cut_off`] waits
/// for it.
pub(super) async fn leave(source: &Link, target: &Link) -> bool {
    cut_off(source).await;
    matches!(
        select(pin!(cut_off(target)), pin!(sleep(GRACE))).await,
        Either::Left(_)
    )
}
