//! How a job runs: its work, the wait for its group and for a word, its result in force, its end.

use std::pin::pin;
use std::rc::Rc;

use futures_util::future::{Either, select};
use serde_json::json;
use tracing::trace;
use vellum_io::spawn;
use vellum_jobs::job::Status;
use vellum_jobs::live::CopyOutcome;
use vellum_options::error_text;

use crate::daemon::Daemon;
use crate::qmp;

use super::job::{Job, Work};

/// Has a job do its work, in the background.
pub(crate) fn start(daemon: Rc<Daemon>, job: Rc<Job>, work: impl Work) {
    job.enter(Status::Running);
    drop(spawn(lead(daemon, job, work)));
}

/// Leads a job to its end.
pub(super) async fn lead(daemon: Rc<Daemon>, job: Rc<Job>, mut work: impl Work) {
    let watch = pin!(job.watch(daemon.estimates.get()));
    let mut outcome = match select(pin!(work.run(&job)), watch).await {
        Either::Left((outcome, _)) => outcome,
        Either::Right((never, _)) => match never {},
    };
    if matches!(outcome, Ok(CopyOutcome::All)) {
        outcome = finalize(&daemon, &job, &mut work).await;
    }
    if !matches!(outcome, Ok(CopyOutcome::All)) {
        job.cancel_group();
        job.enter(Status::Aborting);
    }
    let parts = daemon.parts.lock().await;
    job.unfollow();
    work.leave().await;
    job.bitmap.take();
    drop(parts);
    let is_over = matches!(outcome, Ok(CopyOutcome::All)) || job.is_unwanted.get();
    daemon.record_end(&job.settings.id, is_over).await;
    let mut described = job.describe_as_event();
    match &outcome {
        Ok(_) => trace!(name: "job_completed", job = job.settings.id),
        Err(error) => trace!(name: "job_completed", job = job.settings.id, error = %error),
    }
    let event = match outcome {
        Ok(CopyOutcome::All) => "BLOCK_JOB_COMPLETED",
        Ok(CopyOutcome::GivenUp) => {
            job.error.replace(Some("Operation canceled".to_owned()));
            "BLOCK_JOB_CANCELLED"
        }
        Err(error) => {
            let text = qmp::without_hints(&error_text(&error)).to_owned();
            described["error"] = json!(text);
            job.error.replace(Some(text));
            "BLOCK_JOB_COMPLETED"
        }
    };
    if job.is_block_job() {
        job.events.emit(event, described);
    }
    job.enter(Status::Concluded);
    if job.settings.auto_dismiss {
        daemon.jobs.dismiss(&job);
    }
}

/// Waits until the result may be put in force, and does that.
pub(super) async fn finalize(
    daemon: &Daemon,
    job: &Job,
    work: &mut impl Work,
) -> vellum::Result<CopyOutcome> {
    job.enter(Status::Waiting);
    job.wait_for_group().await;
    if job.is_cancelled() {
        return Ok(CopyOutcome::GivenUp);
    }
    job.enter(Status::Pending);
    if !job.settings.auto_finalize {
        let data = json!({"type": job.settings.kind, "id": job.settings.id});
        job.events.emit("BLOCK_JOB_PENDING", data);
    }
    if job.waits_for_word() {
        job.until(|job| job.finalized.get() || job.is_cancelled())
            .await;
    }
    match select(pin!(work.draw_near()), pin!(job.until(Job::is_cancelled))).await {
        Either::Left((near, _)) => near?,
        Either::Right(_) => return Ok(CopyOutcome::GivenUp),
    }
    let _parts = daemon.parts.lock().await;
    if !job.decide() {
        return Ok(CopyOutcome::GivenUp);
    }
    match work.conclude(job).await {
        Err(_) if job.is_cancelled() => Ok(CopyOutcome::GivenUp),
        concluded => concluded.map(|()| CopyOutcome::All),
    }
}
