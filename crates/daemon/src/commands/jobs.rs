//! Commands that begin jobs.

use std::rc::Rc;

use vellum_graph::Nodes;
use vellum_graph::live::{User, inactive_child, unknown, unknown_node};

use crate::daemon::Daemon;
use crate::jobs::commit::{Commit, Committed};
use crate::jobs::compact::{self, Compact};
use crate::jobs::failures::{ErrorPolicies, OnError};
use crate::jobs::scrub::{self, Scrub};
use crate::jobs::stream::{Stream, Streamed};
use crate::jobs::{self, Job, JobNodes, Settings, active_commit};
use crate::qmp::{Arguments, Failure};

use super::answers::no_device;
use super::layers::{CommitRange, StreamBase};
use super::request::request;

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

/// Takes what a job with a source and a target is to do when a request fails.
pub(super) fn take_policies(arguments: &mut Arguments) -> Result<ErrorPolicies, Failure> {
    Ok(ErrorPolicies {
        source: take_on_error(arguments, "on-source-error")?,
        target: take_on_error(arguments, "on-target-error")?,
    })
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
pub(super) fn limit(job: &Job, speed: i64) -> Result<(), Failure> {
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
) -> Result<(), Failure> {
    match prepared {
        Ok(work) => {
            jobs::start(daemon.clone(), job, work);
            Ok(())
        }
        Err(error) => {
            daemon.jobs.dismiss(&job);
            Err(error.into())
        }
    }
}

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

fn take_backing_file(arguments: &mut Arguments) -> Result<Option<String>, Failure> {
    // A protocol is never named as the format of a backing file.
    arguments.switch("backing-mask-protocol")?;
    arguments.text("backing-file")
}

request! {
    /// `block-commit`.
    pub(super) CommitRequest {
        device: String = |a| a.need_text("device"),
        settings: (Settings, i64) = |a| take_settings(a, "commit"),
        range: CommitRange = CommitRange::read,
        backing_file: Option<String> = take_backing_file,
        on_error: OnError = |a| take_on_error(a, "on-error"),
    }
}

pub(super) async fn commit(daemon: Rc<Daemon>, request: CommitRequest) -> Result<(), Failure> {
    let CommitRequest {
        device,
        settings,
        range,
        backing_file,
        on_error,
    } = request;
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

request! {
    /// `block-stream`.
    pub(super) StreamRequest {
        device: String = |a| a.need_text("device"),
        settings: (Settings, i64) = |a| take_settings(a, "stream"),
        base: StreamBase = StreamBase::take,
        backing_file: Option<String> = take_backing_file,
        on_error: OnError = |a| take_on_error(a, "on-error"),
    }
}

pub(super) async fn stream(daemon: Rc<Daemon>, request: StreamRequest) -> Result<(), Failure> {
    let StreamRequest {
        device,
        settings,
        base,
        backing_file,
        on_error,
    } = request;
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

request! {
    /// `x-vellum-compact`.
    pub(super) CompactRequest {
        device: String = |a| a.need_text("device"),
        settings: (Settings, i64) = |a| take_settings(a, compact::NAME),
    }
}

pub(super) async fn compact(daemon: Rc<Daemon>, request: CompactRequest) -> Result<(), Failure> {
    let CompactRequest { device, settings } = request;
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

request! {
    /// `x-vellum-scrub`.
    pub(super) ScrubRequest {
        device: String = |a| a.need_text("device"),
        settings: (Settings, i64) = |a| take_settings(a, scrub::NAME),
        repairs: bool = |a| a.is_on("repair"),
    }
}

pub(super) async fn scrub(daemon: Rc<Daemon>, request: ScrubRequest) -> Result<(), Failure> {
    let ScrubRequest {
        device,
        settings,
        repairs,
    } = request;
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
