//! What a state file says, and how it comes back.
//!
//! What a command line or a configuration names is made by these, and not a second time: a node, an
//! object or an export of that name stays as it is. What a configuration had made and names no more is
//! not brought back.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde_json::{Map, Value, json};

use super::described::{
    below, bottom_up, cannot_stand, image_below, place, shows_the_same, stands_on,
};
use super::members;
use crate::Nodes;
use crate::daemon::commands::object_type;
use crate::daemon::config::{PartKey, PartKind, Parts};
use crate::daemon::{Daemon, DaemonState, Failure, carry_out, message};
use crate::nodes::NewNode;
use crate::options::Options;
use crate::qmp::Arguments;

/// What a state file says.
#[derive(Debug, Clone, Default)]
pub struct SavedState {
    objects: Vec<Map<String, Value>>,
    server: Option<Map<String, Value>>,
    pub(super) nodes: Vec<Map<String, Value>>,
    pub(super) exports: Vec<SavedExport>,
    pub(super) jobs: Vec<SavedJob>,
    /// What chains may be.
    pub(super) chains: Vec<Map<String, Value>>,
    /// What jobs for these leave behind.
    pub(super) chains_left: Vec<Map<String, Value>>,
    /// From which nodes users were led, and to which.
    pub(super) led: Map<String, Value>,
    /// The parts that a configuration had made, and the nodes that they were to have.
    pub(super) config: Map<String, Value>,
    /// Where the file is, whatever links lead there.
    place: PathBuf,
    /// Keeps other daemons away from the file.
    _lock: Option<Rc<File>>,
}

#[derive(Debug, Clone)]
pub(super) struct SavedExport {
    pub(super) id: String,
    pub(super) options: Map<String, Value>,
    /// The node that it showed.
    pub(super) node: String,
}

impl SavedExport {
    /// Makes it.
    pub(super) async fn add_to(&self, state: &mut DaemonState) -> Result<(), Failure> {
        let mut options = Options::from_object(self.options.clone())?;
        if options.get_text("type") == Some("nbd")
            && options.get_text("name").is_none()
            && let Some(node) = options.get_text("node-name").map(str::to_owned)
        {
            // Clients know it by the node that it was made for.
            options.set_text("name", node);
        }
        options.set_text("node-name", &*self.node);
        let added = state.add_saved_export(options).await;
        added.map_err(|Failure(why)| {
            message(format!("cannot bring the export '{}' back: {why}", self.id))
        })
    }
}

#[derive(Debug, Clone)]
pub(super) struct SavedJob {
    pub(super) id: String,
    pub(super) command: String,
    pub(super) arguments: Map<String, Value>,
    /// It waits for somebody who has it go on.
    pub(super) is_paused: bool,
    /// It was begun at one moment with others.
    pub(super) is_one_of_several: bool,
}

fn objects_of(content: &mut Value, key: &str) -> Result<Vec<Map<String, Value>>, String> {
    let wrong = || format!("'{key}' is no list of objects");
    match content[key].take() {
        Value::Null => Ok(Vec::new()),
        Value::Array(items) => {
            let objects = items.into_iter().map(|item| match item {
                Value::Object(members) => Ok(members),
                _ => Err(wrong()),
            });
            objects.collect()
        }
        _ => Err(wrong()),
    }
}

pub(super) fn text(object: &Map<String, Value>, key: &str) -> Result<String, String> {
    let found = object.get(key).and_then(Value::as_str).map(str::to_owned);
    found.ok_or_else(|| format!("'{key}' is missing"))
}

/// The nodes that exports of some disks showed instead of these; `config` is what these were made from.
pub(super) fn shown_instead(
    exports: &[SavedExport],
    config: &Map<String, Value>,
    wanted: &Parts,
) -> BTreeMap<String, String> {
    let instead = exports.iter().filter_map(|export| {
        let key = PartKey::new(PartKind::Export, &*export.id);
        let disk = wanted.get(&key)?.arguments.get("node-name")?.as_str()?;
        let made_for = config.get(&key.to_string())?.as_str()?;
        let is_other = disk == made_for && export.node != disk;
        is_other.then(|| (disk.to_owned(), export.node.clone()))
    });
    instead.collect()
}

impl SavedState {
    pub(super) fn of(mut content: Value) -> Result<SavedState, String> {
        let objects = objects_of(&mut content, "objects")?;
        let nodes = objects_of(&mut content, "nodes")?;
        let mut exports = Vec::new();
        for mut export in objects_of(&mut content, "exports")? {
            let options = members(
                export
                    .get_mut("options")
                    .map(Value::take)
                    .unwrap_or_default(),
            );
            exports.push(SavedExport {
                id: text(&options, "id")?,
                node: text(&export, "node")?,
                options,
            });
        }
        let mut jobs = Vec::new();
        for mut job in objects_of(&mut content, "jobs")? {
            let arguments = members(
                job.get_mut("arguments")
                    .map(Value::take)
                    .unwrap_or_default(),
            );
            let job = SavedJob {
                id: text(&arguments, "job-id")?,
                command: text(&job, "command")?,
                arguments,
                is_paused: job.get("paused") == Some(&Value::Bool(true)),
                is_one_of_several: job.get("of-several") == Some(&Value::Bool(true)),
            };
            jobs.push(job.onto_known(&nodes));
        }
        let chains = objects_of(&mut content, "chains")?;
        let chains_left = objects_of(&mut content, "chains-left")?;
        let config = members(content["config"].take());
        let led = members(content["led"].take());
        Ok(SavedState {
            objects,
            server: match content["server"].take() {
                Value::Object(members) => Some(members),
                _ => None,
            },
            nodes,
            exports,
            jobs,
            chains,
            chains_left,
            led,
            config,
            place: PathBuf::new(),
            _lock: None,
        })
    }

    /// With its place, and the lock of that.
    pub(super) fn at(self, place: PathBuf, lock: File) -> SavedState {
        SavedState {
            place,
            _lock: Some(Rc::new(lock)),
            ..self
        }
    }

    pub(super) fn place(&self) -> &Path {
        &self.place
    }

    /// Whether a part was made at run time, and is not wanted by a configuration now.
    pub(super) fn is_own(&self, kind: PartKind, name: &str, wanted: &Parts) -> bool {
        let key = PartKey::new(kind, name);
        !self.config.contains_key(&key.to_string()) && wanted.get(&key).is_none()
    }

    /// Why a node cannot come back under its name: a configuration has given that to a disk with another
    /// image, which whoever used the node would be shown.
    fn name_is_taken(
        &self,
        node: &Map<String, Value>,
        wanted: &Parts,
        nodes: &Nodes,
    ) -> Option<String> {
        let name = node.get("node-name")?.as_str()?;
        let key = PartKey::new(PartKind::Disk, name);
        if wanted.get(&key).is_none() || self.config.contains_key(&key.to_string()) {
            return None;
        }
        let leads_here = |step: &Value| step.get("to").unwrap_or(step).as_str() == Some(name);
        let stands_here = |above: &Map<String, Value>| below(above) == Some(name);
        let is_used = self.led.values().any(leads_here)
            || self.exports.iter().any(|export| export.node == name)
            || self.nodes.iter().any(stands_here);
        let mut now = nodes.descriptions(None).into_iter();
        let (_, now) = now.find(|(one, _)| is_used && one == name)?;
        let is_same = shows_the_same(node, now.as_object()?);
        (!is_same).then(|| {
            format!(
                "'{name}' is another disk than the node that clients have made under that name and that is \
                 in use: call the disk otherwise, or move the state file away"
            )
        })
    }

    /// Whether the image that a node stands on now is the one that has that name in the file.
    fn is_the_same_image(&self, name: &str, now: &BTreeMap<String, Value>) -> bool {
        let same = || {
            let node = now.get(name)?.as_object()?;
            let image = below(node)?;
            let is = match node.get("file")? {
                Value::Object(described) => described,
                _ => now.get(image)?.as_object()?,
            };
            let named = |node: &&Map<String, Value>| {
                node.get("node-name").and_then(Value::as_str) == Some(image)
            };
            // A job may have taken it out, which closed it.
            let led = || self.led.get(image)?.get("was")?.as_object();
            let was = self.nodes.iter().find(named).or_else(led)?;
            Some(place(was) == place(is))
        };
        same().unwrap_or(false)
    }

    /// Whether a node is there only for a job that writes to it.
    fn is_target_only(&self, name: &str) -> bool {
        let is_name = |value: Option<&Value>| value.and_then(Value::as_str) == Some(name);
        let mut jobs = self.jobs.iter().map(|job| &job.arguments);
        jobs.any(|arguments| is_name(arguments.get("target")))
            && !self.exports.iter().any(|export| export.node == name)
            && !self.nodes.iter().any(|node| is_name(node.get("backing")))
    }
}

/// Refuses nodes that do not show what they did before, but for those that are withheld.
pub(super) fn check_same(
    before: &[Map<String, Value>],
    withheld: &BTreeSet<String>,
    nodes: &Nodes,
) -> Result<(), Failure> {
    let now: BTreeMap<String, Value> = nodes.descriptions(None).into_iter().collect();
    let backings = before.iter().filter_map(|node| node.get("backing"));
    let under_overlays: BTreeSet<&str> = backings.filter_map(Value::as_str).collect();
    let named = before
        .iter()
        .map(|node| Some((node.get("node-name")?.as_str()?, node)));
    let all_before: BTreeMap<&str, &Map<String, Value>> = named.flatten().collect();
    let find_before = |name: &str| all_before.get(name).copied();
    let find_now = |name: &str| now.get(name)?.as_object();
    for before in before {
        let name = text(before, "node-name").map_err(message)?;
        let Some(Value::Object(now)) = now.get(&name) else {
            continue;
        };
        let (was, is) = (below(before), below(now));
        // Limits may come and go.
        let is_same =
            || place(image_below(before, find_before)) == place(image_below(now, find_now));
        if was != is && !withheld.contains(&name) && !is_same() {
            let shown = |below: Option<&str>| below.unwrap_or("nothing").to_owned();
            return Err(message(format!(
                "'{name}' stood on '{}' and would stand on '{}', which lacks what was written since: have \
                 it described so again, or move the state file away",
                shown(was),
                shown(is)
            )));
        }
        if under_overlays.contains(&*name) && place(before) != place(now) {
            return Err(message(format!(
                "an overlay stands on '{name}', which is another image than it was: have it \
                 described as it was, or move the state file away"
            )));
        }
    }
    Ok(())
}

impl Daemon {
    /// Brings objects back, and the NBD server, unless `wanted` has them.
    ///
    /// # Errors
    /// For the first that cannot be made.
    pub async fn restore_objects(&self, saved: &SavedState, wanted: &Parts) -> Result<(), Failure> {
        let mut state = self.parts.lock().await;
        for object in &saved.objects {
            let id = text(object, "id").map_err(message)?;
            let own = [PartKind::Secret, PartKind::Throttle];
            let is_own = own.iter().all(|kind| saved.is_own(*kind, &id, wanted));
            if is_own && object_type(&state, &id).is_none() {
                state.add_object(Options::from_object(object.clone())?)?;
                let object = Value::Object(object.clone());
                self.state.objects.borrow_mut().insert(id, object);
            }
        }
        if let Some(server) = &saved.server
            && saved.is_own(PartKind::Server, "", wanted)
            && state.server.is_none()
        {
            state.add_server(Options::from_object(server.clone())?)?;
        }
        Ok(())
    }

    /// Brings nodes back that `wanted` has not. Those of `wanted` on which one of them stands are only
    /// read, as they were before. What cannot be had stays in the file, if `keeps_lost`, and is told.
    ///
    /// # Errors
    /// Otherwise for the first that cannot be opened; says which.
    pub async fn restore_nodes(
        &self,
        saved: &SavedState,
        wanted: &Parts,
        keeps_lost: bool,
    ) -> Result<Vec<String>, Failure> {
        let nodes = &self.nodes;
        let served = saved.exports.iter().map(|export| export.node.clone());
        let served: BTreeSet<String> = served.collect();
        let (mut lost, mut told) = (BTreeSet::new(), Vec::new());
        if keeps_lost {
            // What a configuration wants it tells itself.
            let names = saved
                .nodes
                .iter()
                .filter_map(|node| text(node, "node-name").ok());
            let is_wanted =
                |name: &String| wanted.get(&PartKey::new(PartKind::Disk, &**name)).is_some();
            lost.extend(names.filter(|name| is_wanted(name) && !nodes.contains(name)));
        }
        for node in bottom_up(&saved.nodes) {
            let name = text(node, "node-name").map_err(message)?;
            if lost.contains(&name) {
                continue;
            }
            let gone = stands_on(node, &lost).map(|gone| cannot_stand(&name, gone));
            let is_there = nodes.contains(&name);
            if !saved.is_own(PartKind::Disk, &name, wanted) || is_there {
                let taken = saved.name_is_taken(node, wanted, nodes);
                if let Some(text) = taken.clone().filter(|_| !keeps_lost) {
                    return Err(message(text));
                }
                if let Some(text) = gone.filter(|_| is_there).or(taken) {
                    // It is another disk so.
                    told.push(text);
                    lost.insert(name);
                }
                continue;
            }
            let below = node.get("backing").and_then(Value::as_str);
            let added = match gone {
                Some(text) => Err(text),
                None => {
                    let options = Options::from_object(node.clone())?;
                    let opened = nodes.open_restored(options).await;
                    let opened = opened.map_err(|error| {
                        let why = crate::error_text(&error);
                        format!("cannot bring the node '{name}' back: {why}")
                    });
                    let _parts = self.parts.lock().await;
                    opened.map(NewNode::show)
                }
            };
            if let Err(text) = added {
                if saved.is_target_only(&name) {
                    // Its job tells that it is gone.
                    continue;
                }
                if !keeps_lost {
                    return Err(message(text));
                }
                told.push(text);
                lost.insert(name);
                continue;
            }
            // One that is served was written to, whatever stands on it, and so was the image below limits.
            let below = below.filter(|below| !saved.is_own(PartKind::Disk, below, wanted));
            if let Some(below) = below.filter(|below| !nodes.stands_on_any(below, &served)) {
                let _parts = self.parts.lock().await;
                nodes.stop_writing(below).await;
            }
        }
        self.note_lost(saved, &lost);
        Ok(told)
    }

    /// Has limits of disks that others than the state have made stand on overlays as they did, and refuses
    /// nodes that do not show what they showed: users were led to a target, or what stands on them now
    /// would stand on another file.
    ///
    /// # Errors
    /// For the first such node; says what it was.
    pub async fn check_restored(&self, saved: &SavedState) -> Result<(), Failure> {
        let state = self.parts.lock().await;
        let now: BTreeMap<String, Value> = state.nodes.descriptions(None).into_iter().collect();
        for before in &saved.nodes {
            // An overlay that was put between a disk's limits and its image, or a mirror's target.
            if let (Some(name), Some(was)) = (before.get("node-name"), below(before))
                && let Some(name) = name.as_str()
            {
                let is_same = saved.is_the_same_image(name, &now);
                state.nodes.lead_filter(name, was, is_same).await?;
            }
        }
        let withheld = self.state.lost.lock().withheld(&state.nodes);
        check_same(&saved.nodes, &withheld, &state.nodes)
    }

    /// Notes where users of disks were led, whom the file shows the same.
    pub fn restore_leads(&self, saved: &SavedState, wanted: &Parts) {
        let shown = shown_instead(&saved.exports, &saved.config, wanted);
        let lost = self.state.lost.lock().names();
        self.nodes.restore_leads(saved.led.clone(), shown, &lost);
    }

    /// Brings exports back that `wanted` has not.
    ///
    /// # Errors
    /// For the first that cannot be made; says which.
    pub async fn restore_exports(&self, saved: &SavedState, wanted: &Parts) -> Result<(), Failure> {
        let mut state = self.parts.lock().await;
        let lost_views = saved.lost_views();
        for export in &saved.exports {
            let id = &export.id;
            let is_there = state.exports.accounting(id).is_some();
            let is_lost = self.state.lost.lock().has_export(id);
            if is_there || is_lost || !saved.is_own(PartKind::Export, id, wanted) {
                continue;
            }
            if state.nodes.stands_on_any(&export.node, &lost_views) {
                // Its job tells why it is over.
                continue;
            }
            export.add_to(&mut state).await?;
        }
        Ok(())
    }

    /// Brings the policies of chains back that `wanted` does not say.
    ///
    /// # Errors
    /// For the first whose disk is gone; says which.
    pub async fn restore_chains(
        self: &Rc<Self>,
        saved: &SavedState,
        wanted: &Parts,
    ) -> Result<(), Failure> {
        for policy in &saved.chains {
            let name = text(policy, "node-name").map_err(message)?;
            let is_lost = self.state.lost.lock().has_chain(&name);
            let is_own = saved.is_own(PartKind::Chain, &name, wanted);
            if !is_lost && is_own && !self.chains.contains(&name) {
                self.set_saved_chain(policy).await?;
            }
        }
        saved
            .chains_left
            .iter()
            .for_each(|left| self.chains.take_left(left));
        Ok(())
    }

    /// Sets a chain's policy as it was.
    pub(super) async fn set_saved_chain(
        self: &Rc<Self>,
        policy: &Map<String, Value>,
    ) -> Result<(), Failure> {
        let name = text(policy, "node-name").map_err(message)?;
        let arguments = Arguments::new(policy.clone());
        let set = carry_out(self, "x-vellum-set-chain-policy", arguments).await;
        let set = set.map_err(|failure| {
            let why = failure.text;
            message(format!(
                "cannot bring the chain policy of '{name}' back: {why}"
            ))
        });
        set.map(drop)
    }

    /// Begins jobs anew. One that cannot be begun is an event, which the first client hears, and a
    /// line.
    pub async fn restore_jobs(self: &Rc<Self>, saved: &SavedState) -> Vec<String> {
        let mut failures = Vec::new();
        for job in &saved.jobs {
            let is_lost = self.state.lost.lock().has_job(&job.id);
            if !is_lost {
                failures.extend(self.begin_saved(job).await);
            }
        }
        failures
    }

    /// Begins a job anew; says why not where it cannot be.
    pub(super) async fn begin_saved(self: &Rc<Self>, job: &SavedJob) -> Option<String> {
        let SavedJob { id, command, .. } = job;
        let known = super::JOBS.iter().find(|known| **known == command.as_str());
        let begun = match (known, job.anew(&self.nodes)) {
            (Some(command), Ok(arguments)) => {
                let begun = carry_out(self, command, Arguments::new(arguments.clone())).await;
                begun.map(|_| arguments).map_err(|failure| failure.text)
            }
            (Some(_), Err(why)) => Err(why),
            (None, _) => Err(format!("'{command}' begins no job")),
        };
        match begun {
            Ok(arguments) => {
                let value = Value::Object(arguments);
                let command = known.copied().unwrap_or_default();
                self.state.note(&self.nodes, command, &value);
                if job.is_paused
                    && let Some(job) = self.jobs.find(id)
                {
                    // It has not had its first turn yet.
                    job.pause();
                }
                None
            }
            Err(why) => {
                let kind = command.rsplit('-').next().unwrap_or_default();
                let data = json!({
                    "type": kind, "device": id, "len": 0, "offset": 0, "speed": 0, "error": why,
                });
                self.events.emit_for_first("BLOCK_JOB_COMPLETED", data);
                Some(format!("the job '{id}' cannot be begun anew: {why}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_state_is_refused() {
        for wrong in [
            json!({"objects": 3}),
            json!({"nodes": ["a"]}),
            json!({"exports": [{"node": "a"}]}),
            json!({"exports": [{"options": {"id": "a"}}]}),
            json!({"jobs": [{"command": "block-stream", "arguments": {}}]}),
            json!({"jobs": [{"arguments": {"job-id": "j"}}]}),
        ] {
            assert!(SavedState::of(wrong.clone()).is_err(), "{wrong}");
        }
        for right in [
            json!({}),
            json!({"server": null, "config": {"disk 'a'": "a"}}),
        ] {
            assert!(SavedState::of(right).is_ok());
        }
    }
}
