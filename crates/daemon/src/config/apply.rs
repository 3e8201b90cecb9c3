//! [`InForce`]: the parts that are in force, and how others come into force.
//!
//! Requests are carried out by the functions of QMP's commands: what was changed by clients since is met as
//! they would meet it. An export that is made anew shows what it showed before, which may be an overlay
//! that a client has put over its disk.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tracing::trace;
use vellum_graph::live::User;
use vellum_graph::{Nodes, throttle_groups};
use vellum_io::error::io_text;
use vellum_io::lane;
use vellum_options::Options;

use crate::chains::{self, Policy};
use crate::commands::exports::{self, ExportRemoval};
use crate::commands::objects::{self, NewObject};
use crate::commands::{change, nodes, reopen};
use crate::daemon::Daemon;
use crate::export::Removal;
use crate::qmp::{Arguments, Failure};
use crate::state::shows_the_same;

use super::parts::{Part, PartKey, PartKind, Parts};
use super::place::Mistake;
use super::plan::{Request, Step, plan};

/// So long is an export waited for that ends.
const EXPORT_PATIENCE: Duration = Duration::from_secs(30);

/// The parts that are in force.
#[derive(Debug, Default)]
pub struct InForce {
    parts: Parts,
}

/// What a change of all parts has come to.
#[derive(Debug, Default)]
pub struct Applied {
    /// How many requests were carried out.
    pub carried_out: usize,
    /// What is as it was, and why.
    pub mistakes: Vec<Mistake>,
}

impl InForce {
    /// The parts.
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Brings other parts into force, which the file at `path` describes. Exports of disks that
    /// `remembered` names show the node there instead. Gives up between two requests when the daemon
    /// ends.
    pub async fn become_as(
        &mut self,
        daemon: &Rc<Daemon>,
        wanted: &Parts,
        path: &Path,
        remembered: &BTreeMap<String, String>,
    ) -> Applied {
        self.forget_gone(daemon).await;
        let mut steps = plan(&self.parts, wanted);
        let refused = refuse_early(daemon, &mut steps);
        let mut remembered = remembered.clone();
        let send = async |request: &Request| {
            refuse_to_lose(daemon, request)?;
            send(daemon, request, &remembered).await?;
            if let Request::Make(Part { key, .. }) = request
                && key.kind == PartKind::Disk
            {
                // What is made anew is what the file says.
                remembered.remove(&key.name);
            }
            Ok(())
        };
        let mut done = follow(&mut self.parts, steps, send, || daemon.stop.is_requested()).await;
        done.failures.splice(0..0, refused);
        self.parts.move_to(wanted);
        trace!(
            name: "config_applied",
            file = %path.display(),
            requests = done.carried_out,
            mistakes = done.failures.len()
        );
        let mistake = |(step, text): (Step, String)| Mistake {
            path: path.to_owned(),
            place: step.place,
            text: format!("{}: {text}", step.request.key()),
        };
        Applied {
            carried_out: done.carried_out,
            mistakes: done.failures.into_iter().map(mistake).collect(),
        }
    }

    /// Forgets parts that a client has taken away.
    async fn forget_gone(&mut self, daemon: &Rc<Daemon>) {
        let state = daemon.parts.lock().await;
        let exports = state.exports.list(&state.nodes);
        let is_there = |key: &PartKey| match key.kind {
            PartKind::Secret | PartKind::Throttle => state.object_type(&key.name).is_some(),
            PartKind::Server => state.server.is_some(),
            PartKind::Disk => state.nodes.contains(&key.name),
            PartKind::Chain => daemon.chains.contains(&key.name),
            PartKind::Export => exports.iter().any(|one| one.id == key.name),
        };
        let keys = self.parts.keys().cloned();
        let gone: Vec<PartKey> = keys.filter(|key| !is_there(key)).collect();
        for key in gone {
            self.parts.remove(&key);
        }
    }
}

/// What steps have come to.
#[derive(Debug, Default)]
pub(super) struct Followed {
    pub(super) carried_out: usize,
    /// The steps that failed, and why.
    pub(super) failures: Vec<(Step, String)>,
}

/// Carries steps out, by `send`, until `is_over`. The steps of a change of which one fails are
/// undone; `parts` are those in force at any time.
pub(super) async fn follow(
    parts: &mut Parts,
    steps: Vec<Step>,
    mut send: impl AsyncFnMut(&Request) -> Result<(), Failure>,
    is_over: impl Fn() -> bool,
) -> Followed {
    let mut followed = Followed::default();
    let mut failed: BTreeSet<usize> = BTreeSet::new();
    let mut done: Vec<Step> = Vec::new();
    for step in steps {
        if is_over() {
            break;
        }
        if failed.contains(&step.change) {
            continue;
        }
        let change = step.change;
        // What a step needs that cannot be was told already.
        if is_possible(parts, &step.request) {
            match send(&step.request).await {
                Ok(()) => {
                    followed.carried_out += 1;
                    note(parts, &step.request);
                    done.push(step);
                    continue;
                }
                Err(failure) => followed.failures.push((step, failure.text)),
            }
        }
        let undone = with_those_above(change, &done);
        failed.extend(&undone);
        let (back, stays): (Vec<Step>, Vec<Step>) = done
            .into_iter()
            .partition(|step| undone.contains(&step.change));
        done = stays;
        for step in back.into_iter().rev() {
            match send(&step.undo).await {
                Ok(()) => note(parts, &step.undo),
                Err(failure) => {
                    let text = format!("cannot be had back: {}", failure.text);
                    followed.failures.push((step, text));
                }
            }
        }
    }
    followed
}

/// A change, and those that have put something on what it has made.
fn with_those_above(change: usize, done: &[Step]) -> BTreeSet<usize> {
    let mut all = BTreeSet::from([change]);
    loop {
        let made = done.iter().filter_map(|step| match &step.undo {
            Request::Remove(key) if all.contains(&step.change) => Some(key),
            _ => None,
        });
        let made: BTreeSet<&PartKey> = made.collect();
        let stands = |step: &&Step| match &step.request {
            Request::Make(part) | Request::Change(part) => {
                part.needs.iter().any(|key| made.contains(key))
            }
            Request::Remove(_) => false,
        };
        let above: Vec<usize> = done.iter().filter(stands).map(|step| step.change).collect();
        let count = all.len();
        all.extend(above);
        if all.len() == count {
            return all;
        }
    }
}

fn note(parts: &mut Parts, done: &Request) {
    match done {
        Request::Make(part) | Request::Change(part) => parts.put(part.clone()),
        Request::Remove(key) => parts.remove(key),
    }
}

/// Whether what a part stands on is there, or nobody stands on one that is to go; why not was told
/// already.
fn is_possible(parts: &Parts, request: &Request) -> bool {
    match request {
        Request::Make(part) | Request::Change(part) => {
            part.needs.iter().all(|key| parts.get(key).is_some())
        }
        Request::Remove(key) => !parts.is_needed(key),
    }
}

/// Takes out the changes of which a step is refused for sure: nobody is hung up on for them.
fn refuse_early(daemon: &Daemon, steps: &mut Vec<Step>) -> Vec<(Step, String)> {
    let refused = steps.iter().filter_map(|step| {
        let lost = refuse_to_lose(daemon, &step.request);
        let refused = lost.and_then(|()| refuse_beside_jobs(daemon, &step.request));
        let text = refused.err().map(|failure| failure.text);
        Some((step.clone(), text.or_else(|| missing_file(&step.request))?))
    });
    let refused: Vec<(Step, String)> = refused.collect();
    let changes: BTreeSet<usize> = refused.iter().map(|(step, _)| step.change).collect();
    steps.retain(|step| !changes.contains(&step.change));
    refused
}

/// Why a disk cannot be made: a file is not there.
fn missing_file(request: &Request) -> Option<String> {
    fn first(node: &Map<String, Value>) -> Option<String> {
        let text = |key: &str| node.get(key).and_then(Value::as_str);
        if let (Some("file"), Some(path)) = (text("driver"), text("filename")) {
            let error = std::fs::metadata(path).err()?;
            return Some(format!("Could not open '{path}': {}", io_text(&error)));
        }
        node.values().filter_map(Value::as_object).find_map(first)
    }
    match request {
        Request::Make(part) if part.key.kind == PartKind::Disk => first(&part.arguments),
        _ => None,
    }
}

/// Refuses to take a disk away that clients have led users from: what would be made in its place
/// lacks all that was written since.
fn refuse_to_lose(daemon: &Daemon, request: &Request) -> Result<(), Failure> {
    let Request::Remove(PartKey {
        kind: PartKind::Disk,
        name,
    }) = request
    else {
        return Ok(());
    };
    // Of a filter the file describes the image, too: an overlay was put between them otherwise.
    match led_to(daemon, name).or_else(|| daemon.nodes.file_of_others(name)) {
        None => Ok(()),
        Some(node) => Err(Failure::new(format!(
            "clients have led its users to '{node}': it cannot be made anew or taken away before they \
             have been led back"
        ))),
    }
}

/// Refuses to take a disk away, or to open it anew, while a job works on it.
fn refuse_beside_jobs(daemon: &Daemon, request: &Request) -> Result<(), Failure> {
    let nodes = &daemon.nodes;
    match request {
        Request::Remove(key) if key.kind == PartKind::Disk => {
            Ok(nodes.check_no_job_within(&key.name)?)
        }
        Request::Change(part) if part.key.kind == PartKind::Disk => {
            let mut described = described_nodes(&part.arguments).into_iter();
            Ok(described.try_for_each(|name| nodes.check_not_watched(name))?)
        }
        _ => Ok(()),
    }
}

/// The names of the nodes that options describe, those below one among them.
fn described_nodes(options: &Map<String, Value>) -> Vec<&str> {
    let below = options.values().filter_map(Value::as_object);
    let mut names: Vec<&str> = below.flat_map(described_nodes).collect();
    names.extend(options.get("node-name").and_then(Value::as_str));
    names
}

/// Where clients have led the users of a disk, unless another image has its name by now.
fn led_to(daemon: &Daemon, name: &str) -> Option<String> {
    let to = daemon.nodes.led_to(name)?;
    let was = daemon.nodes.described_before(name);
    let mut now = daemon.nodes.descriptions(None).into_iter();
    let now = now.find(|(node, _)| node == name);
    match (was, now) {
        (Some(Value::Object(was)), Some((_, Value::Object(now))))
            if !shows_the_same(&was, &now) =>
        {
            daemon.nodes.take_step(name);
            None
        }
        _ => Some(to),
    }
}

/// Has the daemon do what is asked for, as if a client had asked for the same.
async fn send(
    daemon: &Rc<Daemon>,
    request: &Request,
    remembered: &BTreeMap<String, String>,
) -> Result<(), Failure> {
    let command = async {
        match request {
            Request::Make(part) => make(daemon.clone(), part, remembered).await,
            Request::Change(part) => become_like(daemon.clone(), part).await,
            Request::Remove(key) => remove(daemon.clone(), key).await,
        }
    };
    change(daemon, request.command(), command).await?;
    if let Request::Remove(key) = request
        && key.kind == PartKind::Export
    {
        wait_for_end(daemon, &key.name).await?;
    }
    Ok(())
}

async fn make(
    daemon: Rc<Daemon>,
    part: &Part,
    remembered: &BTreeMap<String, String>,
) -> Result<(), Failure> {
    let arguments = Arguments::new(part.arguments.clone());
    match part.key.kind {
        PartKind::Secret | PartKind::Throttle => {
            objects::add(daemon, NewObject::of_file(arguments.into_options()?)).await
        }
        PartKind::Server => {
            exports::nbd_server_start(daemon, exports::take_server(arguments)?).await
        }
        PartKind::Disk => nodes::add_disk(daemon, arguments.into_options()?).await,
        PartKind::Chain => chains::set(daemon, chains::take(arguments)?).await,
        PartKind::Export => {
            let mut options = arguments.into_options()?;
            if let Some(disk) = options.get_text("node-name") {
                // Clients may lead users of a disk also while it has no exports.
                let instead = remembered
                    .get(disk)
                    .cloned()
                    .or_else(|| led_to(&daemon, disk));
                if let Some(node) = instead {
                    options.set_text("node-name", node);
                }
            }
            exports::add(daemon, options).await
        }
    }
}

async fn become_like(daemon: Rc<Daemon>, part: &Part) -> Result<(), Failure> {
    if part.key.kind == PartKind::Throttle {
        let limits = Value::Object(all_limits(part));
        throttle_groups::set(&part.key.name, throttle_groups::LIMITS, limits)?;
        return Ok(());
    }
    let mut node = part.arguments.clone();
    {
        let state = daemon.parts.lock().await;
        name_backing(&state.nodes, &mut node);
        keep_read_only(&state.nodes, &mut node);
    }
    reopen::reopen(daemon, vec![Options::from_object(node)?]).await
}

/// The limits of a group; those that the file does not say are the defaults.
pub(super) fn all_limits(part: &Part) -> Map<String, Value> {
    let given = part.arguments.get("limits").and_then(Value::as_object);
    let names = throttle_groups::limit_names().into_iter();
    let all = names.map(|name| {
        let given = given.and_then(|given| given.get(&name)).cloned();
        let value = given.unwrap_or_else(|| json!(throttle_groups::default_of(&name)));
        (name, value)
    });
    all.collect()
}

async fn remove(daemon: Rc<Daemon>, key: &PartKey) -> Result<(), Failure> {
    let name = key.name.clone();
    match key.kind {
        PartKind::Secret | PartKind::Throttle => objects::del(daemon, name).await,
        PartKind::Server => exports::nbd_server_stop(daemon, ()).await,
        PartKind::Disk => nodes::del(daemon, name).await,
        PartKind::Chain => chains::set(daemon, (name, Policy::default())).await,
        PartKind::Export => {
            let removal = Removal::Hard;
            exports::del(daemon, ExportRemoval { id: name, removal }).await
        }
    }
}

/// Says what a node stands on by its backing file, and those below it: a node that is opened anew
/// must be told, and only the image knows.
fn name_backing(nodes: &Nodes, members: &mut Map<String, Value>) {
    let name = members.get("node-name").and_then(Value::as_str);
    if let Some(backing) = name.and_then(|name| nodes.backing_of(name))
        && !members.contains_key("backing")
    {
        members.insert("backing".to_owned(), Value::from(backing));
    }
    if let Some(below) = members.get_mut("file").and_then(Value::as_object_mut) {
        name_backing(nodes, below);
    }
}

/// A base that an overlay was put over is only read from then on.
fn keep_read_only(nodes: &Nodes, node: &mut Map<String, Value>) {
    let name = node.get("node-name").and_then(Value::as_str);
    let name = name.unwrap_or_default();
    let has_overlay = nodes.is_used_by(name, |user| matches!(user, User::Node(_)));
    let is_read_only = nodes
        .device(name)
        .is_ok_and(|device| device.info().read_only);
    if has_overlay && is_read_only {
        node.insert("read-only".to_owned(), Value::Bool(true));
    }
}

/// Waits until what clients of an export have begun is complete: its node is free then.
async fn wait_for_end(daemon: &Rc<Daemon>, id: &str) -> Result<(), Failure> {
    let ended = daemon.parts.lock().await.exports.ended(id);
    let patience = std::pin::pin!(lane::sleep(EXPORT_PATIENCE));
    match futures_util::future::select(std::pin::pin!(ended), patience).await {
        futures_util::future::Either::Left(_) => Ok(()),
        futures_util::future::Either::Right(_) => Err(Failure::new(format!(
            "requests of its clients have not ended after {} s",
            EXPORT_PATIENCE.as_secs()
        ))),
    }
}
