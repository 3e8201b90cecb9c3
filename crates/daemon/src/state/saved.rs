//! [`SavedState`]: what a state file says, taken apart.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde_json::{Map, Value};
use vellum_graph::Nodes;
use vellum_options::Options;

use crate::config::{PartKey, PartKind, Parts};
use crate::daemon_state::DaemonState;
use crate::failure::{Failure, message};

use super::described::{below, image_below, members, place};

/// What a state file says.
#[derive(Debug, Clone, Default)]
pub struct SavedState {
    pub(super) objects: Vec<Map<String, Value>>,
    pub(super) server: Option<Map<String, Value>>,
    pub(super) nodes: Vec<Map<String, Value>>,
    pub(super) exports: Vec<SavedExport>,
    pub(crate) jobs: Vec<SavedJob>,
    /// What chains may be.
    pub(crate) chains: Vec<Map<String, Value>>,
    /// What jobs for these leave behind.
    pub(crate) chains_left: Vec<Map<String, Value>>,
    /// From which nodes users were led, and to which.
    pub(crate) led: Map<String, Value>,
    /// The parts that a configuration had made, and the nodes that they were to have.
    pub(super) config: Map<String, Value>,
    /// Where the file is, whatever links lead there.
    pub(super) place: PathBuf,
    /// Keeps other daemons away from the file.
    _lock: Option<Rc<File>>,
}

#[derive(Debug, Clone)]
pub(crate) struct SavedExport {
    pub(crate) id: String,
    pub(crate) options: Map<String, Value>,
    /// The node that it showed.
    pub(crate) node: String,
}

impl SavedExport {
    /// Makes it.
    pub(crate) async fn add_to(&self, state: &mut DaemonState) -> Result<(), Failure> {
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
pub(crate) struct SavedJob {
    pub(crate) id: String,
    pub(crate) command: String,
    pub(crate) arguments: Map<String, Value>,
    /// It waits for somebody who has it go on.
    pub(crate) is_paused: bool,
    /// It was begun at one moment with others.
    pub(crate) is_one_of_several: bool,
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

pub(crate) fn text(object: &Map<String, Value>, key: &str) -> Result<String, String> {
    let found = object.get(key).and_then(Value::as_str).map(str::to_owned);
    found.ok_or_else(|| format!("'{key}' is missing"))
}

/// The nodes that exports of some disks showed instead of these; `config` is what these were made from.
pub(crate) fn shown_instead(
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
    pub(crate) fn of(mut content: Value) -> Result<SavedState, String> {
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
    pub(crate) fn at(self, place: PathBuf, lock: File) -> SavedState {
        SavedState {
            place,
            _lock: Some(Rc::new(lock)),
            ..self
        }
    }

    pub(crate) fn place(&self) -> &Path {
        &self.place
    }

    /// Whether the image that a node stands on now is the one that has that name in the file.
    pub(super) fn is_the_same_image(&self, name: &str, now: &BTreeMap<String, Value>) -> bool {
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
    pub(super) fn is_target_only(&self, name: &str) -> bool {
        let is_name = |value: Option<&Value>| value.and_then(Value::as_str) == Some(name);
        let mut jobs = self.jobs.iter().map(|job| &job.arguments);
        jobs.any(|arguments| is_name(arguments.get("target")))
            && !self.exports.iter().any(|export| export.node == name)
            && !self.nodes.iter().any(|node| is_name(node.get("backing")))
    }
}

/// Refuses nodes that do not show what they did before, but for those that are withheld.
pub(crate) fn check_same(
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

#[cfg(test)]
mod tests {
    use serde_json::json;

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
