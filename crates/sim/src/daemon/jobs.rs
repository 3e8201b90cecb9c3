//! Jobs that a monitor waits for: how they end, and what a backup must hold then.

use std::rc::Rc;

use serde_json::{Value, json};

use super::guest_disk::{ExpectedFile, GuestDisk};
use super::setup::{Setup, kind_of};
use crate::failure::Failure;

/// The events that tell of the end of a job.
pub(super) const OVER: &[&str] = &["BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED"];

/// How a job has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Done,
    Cancelled,
    Failed,
}

/// Waits for the end of a job, which is cancelled now and then.
pub(super) async fn end_of_job(setup: &Setup, job: &str) -> End {
    if setup.draw(|rng| rng.chance(1, 6)) {
        setup.pause().await;
        // It may be over.
        let _ = setup.ask("job-cancel", json!({"id": job})).await;
    }
    end_of(setup, job).await
}

/// Waits for the end of a job.
pub(super) async fn end_of(setup: &Setup, job: &str) -> End {
    judge(setup, job, &setup.heard.wait(OVER, job).await)
}

pub(super) fn judge(setup: &Setup, job: &str, event: &Value) -> End {
    let end = match (event["event"].as_str(), event["data"]["error"].as_str()) {
        (Some("BLOCK_JOB_CANCELLED"), _) => End::Cancelled,
        (_, None) => End::Done,
        (_, Some(error)) => {
            if !setup.faulty {
                let message = format!("job {job}: {error}");
                setup.fail(Failure::new(kind_of(error), message));
            }
            End::Failed
        }
    };
    setup.note(format!("job {job}: {end:?}"));
    end
}

/// Has a command begin a backup, waits for its end, closes the target, and notes what that
/// must hold.
pub(super) async fn back_up(
    setup: &Setup,
    disk: &GuestDisk,
    (job, target): (&str, &str),
    command: &str,
    arguments: Value,
) -> End {
    let begun = disk.model.borrow_mut().begin_watch();
    let started = setup.demand(command, arguments).await;
    let moment = Rc::new(disk.model.borrow().clone());
    let end = match started {
        true => end_of_job(setup, job).await,
        false => End::Failed,
    };
    let arguments = json!({"node-name": target});
    // A target that the command has opened it closes too.
    if command != "drive-backup" && !setup.demand("blockdev-del", arguments).await {
        return End::Failed;
    }
    if end == End::Done {
        disk.kept.borrow_mut().push(ExpectedFile {
            file: target.to_owned(),
            stands_on: Vec::new(),
            model: moment,
            begun,
            what: "a backup",
        });
    }
    end
}
