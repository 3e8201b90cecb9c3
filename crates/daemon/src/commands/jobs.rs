//! Commands that begin jobs, lead them, and describe them.

use std::rc::Rc;

use tracing::trace;
use vellum_graph::Nodes;
use vellum_graph::live::{User, inactive_child, unknown, unknown_node};
use vellum_jobs::job::{JobCommand, Status, Verb};

use crate::daemon::Daemon;
use crate::jobs::commit::{Commit, Committed};
use crate::jobs::compact::{self, Compact};
use crate::jobs::failures::{ErrorPolicies, OnError};
use crate::jobs::scrub::{self, Scrub};
use crate::jobs::stream::{Stream, Streamed};
use crate::jobs::{self, Completion, Job, JobNodes, Settings, active_commit, kinds};
use crate::qmp::{Arguments, Class, Failure, Outcome};

use super::answers::{done, no_device};
use super::layers::{CommitRange, StreamBase};

/// Takes what every job is begun with: its settings, and its speed.
pub(super) fn take_settings(
    arguments: &mut Arguments,
    kind: &'static str,
) -> Result<(Settings, i64), Failure> {
    let id = arguments.text("job-id")?.unwrap_or_default();
    let speed = arguments.number("speed")?.unwrap_or(0);
    let auto_finalize = arguments.switch("auto-finalize")?.unwrap_or(true);
    let auto_dismiss = arguments.switch("auto-dismiss")?.unwrap_or(true);
    let filter = arguments.text("filter-node-name")?;
    let settings = Settings {
        id,
        kind,
        auto_finalize,
        auto_dismiss,
        filter,
    };
    Ok((settings, speed))
}

/// Takes what a job is to do when a request fails.
pub(super) fn take_on_error(arguments: &mut Arguments, key: &str) -> Result<OnError, Failure> {
    let choices = [
        ("report", OnError::Report),
        ("ignore", OnError::Ignore),
        ("enospc", OnError::Enospc),
        ("stop", OnError::Stop),
        ("auto", OnError::Enospc),
    ];
    Ok(arguments.choice(key, &choices)?.unwrap_or_default())
}

/// What refusals of filters that are nodes begin with.
pub(super) const NO_FILTER: &str = "Could not create node";

/// Refuses a filter that cannot be called as it is to be. Nodes are held meanwhile.
pub(super) fn check_filter(nodes: &Nodes, settings: &Settings) -> Result<(), Failure> {
    match &settings.filter {
        None => Ok(()),
        Some(name) => Ok(nodes.check_new_name(name)?),
    }
}

/// Refuses an inactive node, in front of which a job's filter cannot be. Nodes are held meanwhile.
pub(super) fn check_active(
    nodes: &Nodes,
    settings: &Settings,
    (name, role): (&str, &str),
) -> Result<(), Failure> {
    if !nodes.is_inactive(name) {
        return Ok(());
    }
    let filter = settings.filter.clone();
    let filter = filter.unwrap_or_else(|| nodes.make_up_name());
    Err(inactive_child(name, role, &filter).into())
}

pub(super) fn create(
    daemon: &Daemon,
    (settings, speed): (Settings, i64),
) -> Result<Rc<Job>, Failure> {
    let id = &settings.id;
    let is_id = id.starts_with(|c: char| c.is_ascii_alphabetic())
        && id
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
    if !is_id {
        return Err(Failure::new(format!("Invalid job ID '{id}'")));
    }
    if daemon.jobs.find(id).is_some() {
        return Err(Failure::new(format!("Job ID '{id}' already in use")));
    }
    let job = daemon.jobs.create(settings, daemon.events.clone());
    match limit(&job, speed) {
        Ok(()) => Ok(job),
        Err(failure) => {
            daemon.jobs.dismiss(&job);
            Err(failure)
        }
    }
}

/// Limits the speed of a job, in bytes a second; 0 is no limit.
fn limit(job: &Job, speed: i64) -> Result<(), Failure> {
    let Ok(bytes_per_second) = u64::try_from(speed) else {
        let text = "Parameter 'speed' expects a non-negative value";
        return Err(Failure::new(text));
    };
    job.control.speed().set(bytes_per_second);
    Ok(())
}

/// Has a job begin that could be prepared; otherwise it is gone at once.
pub(super) fn begin(
    daemon: &Rc<Daemon>,
    job: Rc<Job>,
    prepared: vellum::Result<impl jobs::Work>,
) -> Outcome {
    match prepared {
        Ok(work) => {
            jobs::start(daemon.clone(), job, work);
            done()
        }
        Err(error) => {
            daemon.jobs.dismiss(&job);
            Err(error.into())
        }
    }
}

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

pub(super) fn not_in_chain(name: &str) -> Failure {
    Failure::new(format!("'{name}' is not in this backing file chain"))
}

/// Where a node, or that behind the filter of a job, stands in a chain.
pub(super) fn place_in(nodes: &Nodes, chain: &[String], name: &str) -> Result<usize, Failure> {
    if !nodes.contains(name) {
        return Err(unknown_node(name).into());
    }
    let wanted = nodes.behind_job_filter(name);
    let found = chain.iter().position(|node| *node == wanted);
    found.ok_or_else(|| not_in_chain(name))
}

/// Refuses a chain of which a layer is the backing file of another image in use too, be it below filters: what
/// that one shows must not change.
fn check_alone(nodes: &Nodes, chain: &[String]) -> Result<(), Failure> {
    for pair in chain.windows(2) {
        for overlay in nodes.images_over(&pair[1]) {
            if !chain.contains(&overlay) && nodes.is_used_by(&overlay, |_| true) {
                return Err(Failure::new(format!(
                    "Node '{}' is busy: node is used as backing hd of '{overlay}'",
                    pair[1]
                )));
            }
        }
    }
    Ok(())
}

/// Refuses a node that others stand on, or that a job works on.
pub(super) fn check_root(nodes: &Nodes, device: &str) -> Result<(), Failure> {
    check_not_compacted(nodes, device)?;
    match !nodes.overlays_of(device).is_empty() || nodes.is_used_by(device, User::is_job) {
        true => Err(Failure::new("Need a root block node")),
        false => Ok(()),
    }
}

/// Refuses a node whose file is being compacted, which a client need not know of: policies and others ask for
/// that, too.
fn check_not_compacted(nodes: &Nodes, device: &str) -> Result<(), Failure> {
    let shown = nodes.skip_filters(device);
    let compacted = |node: &str| {
        let is_it = |user: &User| matches!(user, User::Job { kind, .. } if *kind == compact::NAME);
        nodes.is_used_by(node, is_it)
    };
    let Some(node) = [device, &shown].into_iter().find(|node| compacted(node)) else {
        return Ok(());
    };
    Err(Failure::new(format!(
        "A compaction runs on node '{node}': wait for its end, or cancel it (query-jobs, job-cancel)"
    )))
}

pub(super) async fn commit(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let device = arguments.need_text("device")?;
    let settings = take_settings(&mut arguments, "commit")?;
    let range = CommitRange::take(&mut arguments)?;
    let backing_file = arguments.text("backing-file")?;
    // A protocol is never named as the format of a backing file.
    arguments.switch("backing-mask-protocol")?;
    let on_error = take_on_error(&mut arguments, "on-error")?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    let nodes = &parts.nodes;
    if !nodes.contains(&device) {
        return Err(no_device(&device));
    }
    check_root(nodes, &device)?;
    let chain: Vec<String> = nodes.shown_chain(&nodes.skip_filters(&device)).collect();
    let (top_at, base_at) = range.find(nodes, &chain)?;
    if top_at == 0 && backing_file.is_some() {
        return Err(Failure::new(
            "'backing-file' specified, but 'top' is the active layer",
        ));
    }
    check_alone(nodes, &chain[..=base_at])?;
    check_filter(nodes, &settings.0)?;
    check_active(nodes, &settings.0, (&chain[top_at], "backing"))?;
    let policies = ErrorPolicies {
        source: on_error,
        target: on_error,
    };
    if top_at == 0 {
        daemon.state.check_leading(nodes, &chain[base_at])?;
    }
    let job = create(&daemon, settings)?;
    let (stake, layers) = (JobNodes::new(nodes), chain[top_at..=base_at].to_vec());
    if top_at == 0 {
        let prepared = active_commit::prepare(stake, &job, &layers, policies).await;
        return begin(&daemon, job, prepared);
    }
    let is_image = |node: &&String| !nodes.is_filter(node);
    let overlay = chain[..top_at].iter().rev().find(is_image);
    // The device itself is no filter.
    let overlay = overlay.unwrap_or(&chain[0]).clone();
    let what = Committed {
        overlay,
        above: chain[top_at - 1].clone(),
        chain: layers,
        backing_file,
    };
    let prepared = Commit::prepare(stake, &job, what, policies).await;
    begin(&daemon, job, prepared)
}

pub(super) async fn stream(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let device = arguments.need_text("device")?;
    let settings = take_settings(&mut arguments, "stream")?;
    let base = StreamBase::take(&mut arguments)?;
    let backing_file = arguments.text("backing-file")?;
    let on_error = take_on_error(&mut arguments, "on-error")?;
    // A protocol is never named as the format of a backing file.
    arguments.switch("backing-mask-protocol")?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    let nodes = &parts.nodes;
    if !nodes.contains(&device) {
        return Err(unknown(&device).into());
    }
    let device = nodes.skip_filters(&device);
    let chain: Vec<String> = nodes.shown_chain(&device).collect();
    let base_at = base.find(nodes, &chain)?;
    let base = chain.get(base_at).cloned();
    if base.is_none() && backing_file.is_some() {
        return Err(Failure::new(
            "backing file specified, but streaming the entire chain",
        ));
    }
    nodes.check_free(&device).or_else(|error| {
        let above = !nodes.overlays_of(&device).is_empty();
        let by_job = nodes.is_used_by(&device, User::is_job);
        // An image may be streamed under others: what it shows does not change.
        if above && !by_job { Ok(()) } else { Err(error) }
    })?;
    check_filter(nodes, &settings.0)?;
    check_active(nodes, &settings.0, (&device, "file"))
        .map_err(|failure| Failure::new(format!("{NO_FILTER}: {}", failure.text)))?;
    let job = create(&daemon, settings)?;
    let what = Streamed {
        image: device,
        between: chain[1..base_at].to_vec(),
        base,
        backing_file,
        policies: ErrorPolicies {
            source: on_error,
            target: on_error,
        },
    };
    let prepared = Stream::prepare(JobNodes::new(nodes), &job, what).await;
    begin(&daemon, job, prepared)
}

pub(super) async fn compact(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let device = arguments.need_text("device")?;
    let settings = take_settings(&mut arguments, compact::NAME)?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    let nodes = &parts.nodes;
    if !nodes.contains(&device) {
        return Err(unknown(&device).into());
    }
    nodes.check_no_job(&device)?;
    // Limits and the like have no file: what they show has.
    let image = nodes.skip_filters(&device);
    nodes.check_no_job(&image)?;
    let job = create(&daemon, settings)?;
    let prepared = Compact::prepare(JobNodes::new(nodes), &job, image).await;
    begin(&daemon, job, prepared)
}

pub(super) async fn scrub(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let device = arguments.need_text("device")?;
    let settings = take_settings(&mut arguments, scrub::NAME)?;
    let repairs = arguments.switch("repair")?.unwrap_or(false);
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    let nodes = &parts.nodes;
    if !nodes.contains(&device) {
        return Err(unknown(&device).into());
    }
    nodes.check_no_job(&device)?;
    let job = create(&daemon, settings)?;
    let prepared = Scrub::prepare(JobNodes::new(nodes), &job, device, repairs).await;
    begin(&daemon, job, prepared)
}

pub(super) async fn query_jobs(daemon: Rc<Daemon>, arguments: Arguments) -> Outcome {
    arguments.finish()?;
    let jobs = daemon.jobs.list();
    Ok(jobs.iter().map(|job| job.describe()).collect())
}

pub(super) async fn query_block_jobs(daemon: Rc<Daemon>, arguments: Arguments) -> Outcome {
    arguments.finish()?;
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
    fn take(self, arguments: &mut Arguments) -> Result<String, Failure> {
        arguments.need_text(match self {
            JobKey::Id | JobKey::BlockId => "id",
            JobKey::Device => "device",
        })
    }

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

/// Applies a verb to a job.
pub(super) async fn apply_verb(
    daemon: Rc<Daemon>,
    mut arguments: Arguments,
    by: JobKey,
    verb: Verb,
) -> Outcome {
    let id = by.take(&mut arguments)?;
    let speed = match verb {
        Verb::SetSpeed => arguments.need_number("speed")?,
        _ => 0,
    };
    let force = match (by, verb) {
        (JobKey::Device, Verb::Cancel) => arguments.switch("force")?.unwrap_or(false),
        _ => true,
    };
    arguments.finish()?;
    let job = by.find(&daemon, &id)?;
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
    done()
}

/// Changes how a job works that has begun.
pub(super) async fn change(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let id = arguments.need_text("id")?;
    let kinds = ["commit", "stream", "mirror", "backup", "create", "amend"];
    let others = ["snapshot-load", "snapshot-save", "snapshot-delete"];
    let kinds: Vec<_> = kinds
        .iter()
        .chain(&others)
        .map(|kind| (*kind, *kind))
        .collect();
    let kind = arguments.need_choice("type", &kinds)?;
    let mode = match kind {
        kinds::MIRROR => Some(arguments.need_choice("copy-mode", &COPY_MODES)?),
        _ => None,
    };
    arguments.finish()?;
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
    done()
}
