//! Commands that lead jobs and describe them.

use std::rc::Rc;

use tracing::trace;
use vellum_jobs::job::{JobCommand, Status, Verb};

use crate::daemon::Daemon;
use crate::jobs::{Completion, Job, kinds};
use crate::qmp::{Arguments, Class, Failure, Outcome};

use super::jobs::limit;
use super::request::Request;

/// What users of a node do about its mirror.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyMode {
    Background,
    WriteBlocking,
}

pub(super) const COPY_MODES: [(&str, CopyMode); 2] = [
    ("background", CopyMode::Background),
    ("write-blocking", CopyMode::WriteBlocking),
];

pub(super) async fn query_jobs(daemon: Rc<Daemon>, (): ()) -> Outcome {
    let jobs = daemon.jobs.list();
    Ok(jobs.iter().map(|job| job.describe()).collect())
}

pub(super) async fn query_block_jobs(daemon: Rc<Daemon>, (): ()) -> Outcome {
    let jobs = daemon.jobs.list().into_iter();
    let jobs = jobs.filter(|job| job.is_block_job());
    Ok(jobs.map(|job| job.describe_block_job()).collect())
}

/// How a command names its job: that of a block by `device` or by `id`, or any by `id`.
#[derive(Clone, Copy)]
pub(super) enum JobKey {
    Id,
    BlockId,
    Device,
}

impl JobKey {
    fn find(self, daemon: &Daemon, id: &str) -> Result<Rc<Job>, Failure> {
        let found = daemon.jobs.find(id);
        match self {
            JobKey::Id => found.ok_or_else(|| Failure::new("Job not found")),
            JobKey::BlockId | JobKey::Device => {
                let found = found.filter(|job| job.is_block_job());
                let text = || format!("Block job '{id}' not found");
                found.ok_or_else(|| Failure::of(Class::DeviceNotActive, text()))
            }
        }
    }
}

fn check(job: &Job, verb: Verb) -> Result<(), Failure> {
    trace!(
        name: "job_apply_verb",
        job = job.settings.id,
        state = job.status().name(),
        verb = verb.name()
    );
    match job.status().accepts(verb) {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "Job '{}' in state '{}' cannot accept command verb '{}'",
            job.settings.id,
            job.status().name(),
            verb.name()
        ))),
    }
}

/// A verb for a job.
pub(crate) struct JobVerb {
    key: JobKey,
    id: String,
    verb: Verb,
    /// Of [`Verb::SetSpeed`].
    speed: i64,
    /// Whether a job that is ready is cancelled, too.
    force: bool,
}

impl JobVerb {
    /// The same as `job-VERB` with an `id`.
    pub(crate) fn new(id: String, verb: Verb) -> JobVerb {
        JobVerb {
            key: JobKey::Id,
            id,
            verb,
            speed: 0,
            force: true,
        }
    }

    pub(super) fn take(
        mut arguments: Arguments,
        key: JobKey,
        verb: Verb,
    ) -> Result<JobVerb, Failure> {
        let id = arguments.need_text(match key {
            JobKey::Id | JobKey::BlockId => "id",
            JobKey::Device => "device",
        })?;
        let mut request = JobVerb {
            key,
            ..JobVerb::new(id, verb)
        };
        if verb == Verb::SetSpeed {
            request.speed = arguments.need_number("speed")?;
        }
        if let (JobKey::Device, Verb::Cancel) = (key, verb) {
            request.force = arguments.switch("force")?.unwrap_or(false);
        }
        arguments.finish().map(|()| request)
    }
}

/// Applies a verb to a job.
pub(crate) async fn apply(daemon: Rc<Daemon>, request: JobVerb) -> Result<(), Failure> {
    let JobVerb {
        key,
        id,
        verb,
        speed,
        force,
    } = request;
    let job = key.find(&daemon, &id)?;
    check(&job, verb)?;
    match verb {
        Verb::Cancel if !force && job.is_paused() => {
            return Err(Failure::new(format!(
                "The block job for device '{id}' is currently paused"
            )));
        }
        Verb::Cancel if !force && job.status() == Status::Ready => {
            job.note_unwanted();
            job.complete(Completion::Apart);
        }
        Verb::Cancel => {
            job.note_unwanted();
            job.cancel();
        }
        Verb::Pause if job.control.command() == JobCommand::Pause => {
            return Err(Failure::new("Job is already paused"));
        }
        Verb::Pause => job.pause(),
        Verb::Resume if job.control.command() != JobCommand::Pause => {
            return Err(Failure::new("Can't resume a job that was not paused"));
        }
        Verb::Resume => job.resume(),
        Verb::Complete => job.complete(Completion::InForce),
        Verb::Finalize => job.finalize(),
        Verb::Dismiss => daemon.jobs.dismiss(&job),
        Verb::SetSpeed => limit(&job, speed)?,
        // Another command says what to change.
        Verb::Change => {}
    }
    Ok(())
}

/// `block-job-change`: of a mirror, what users do about it from now on.
pub(super) struct JobChange {
    id: String,
    mode: Option<CopyMode>,
}

impl Request for JobChange {
    fn read(arguments: &mut Arguments) -> Result<JobChange, Failure> {
        let id = arguments.need_text("id")?;
        let kinds = ["commit", "stream", "mirror", "backup", "create", "amend"];
        let others = ["snapshot-load", "snapshot-save", "snapshot-delete"];
        let kinds: Vec<_> = kinds
            .iter()
            .chain(&others)
            .map(|kind| (*kind, *kind))
            .collect();
        let mode = match arguments.need_choice("type", &kinds)? {
            kinds::MIRROR => Some(arguments.need_choice("copy-mode", &COPY_MODES)?),
            _ => None,
        };
        Ok(JobChange { id, mode })
    }
}

/// Changes how a job works that has begun.
pub(super) async fn change(daemon: Rc<Daemon>, request: JobChange) -> Result<(), Failure> {
    let JobChange { id, mode } = request;
    let job = JobKey::BlockId.find(&daemon, &id)?;
    check(&job, Verb::Change)?;
    if job.settings.kind != kinds::MIRROR {
        return Err(Failure::new("Job type does not support change"));
    }
    let is_blocking = job.is_write_blocking();
    match mode {
        Some(CopyMode::WriteBlocking) => job.block_writes(),
        _ if is_blocking => {
            let text = "Change to copy mode 'background' is not implemented";
            return Err(Failure::new(text));
        }
        _ => {}
    }
    Ok(())
}
