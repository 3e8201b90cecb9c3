//! What a state file says and cannot be had: with `on-error = "report"` the others are served, and this
//! is kept for the next reload, or the next start.
//!
//! Invariants:
//! - What is lost stays in the file as it was, until it is back or something else has its name.
//! - No export shows a disk on which a lost node stands, or whose users were led to one, unless it did
//!   before: what was written since would be missing.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use serde_json::{Map, Value, json};

use super::restore::{
    SavedExport, SavedJob, SavedState, bottom_up, check_same, place, references_of,
};
use crate::Nodes;
use crate::daemon::Daemon;
use crate::daemon::config::{PartKey, PartKind, Parts};
use crate::options::Options;

/// What is lost.
#[derive(Debug, Default)]
pub(super) struct Lost {
    /// The nodes, each after those that it names.
    nodes: Vec<Map<String, Value>>,
    /// What they stood on, as it was.
    below: Vec<Map<String, Value>>,
    /// The exports that showed them.
    exports: Vec<SavedExport>,
    /// The jobs that worked with them.
    jobs: Vec<SavedJob>,
    /// What a configuration had made of that.
    config: Map<String, Value>,
    /// What each export showed.
    shown: BTreeMap<String, String>,
}

fn name_of(node: &Map<String, Value>) -> &str {
    let name = node.get("node-name").and_then(Value::as_str);
    name.unwrap_or_default()
}

impl Lost {
    /// What of a state goes with nodes that are lost.
    pub(super) fn of(saved: &SavedState, names: &BTreeSet<String>) -> Lost {
        let exports = saved
            .exports
            .iter()
            .filter(|export| names.contains(&export.node));
        let exports: Vec<SavedExport> = exports.cloned().collect();
        let nodes = bottom_up(&saved.nodes).into_iter();
        let keys = exports
            .iter()
            .map(|export| PartKey::new(PartKind::Export, &*export.id));
        let keys = keys.chain(
            names
                .iter()
                .map(|name| PartKey::new(PartKind::Disk, &**name)),
        );
        let config = keys.filter_map(|key| {
            let key = key.to_string();
            let made_for = saved.config.get(&key)?.clone();
            Some((key, made_for))
        });
        let works_with = |job: &&SavedJob| {
            let mut texts = job.arguments.values().filter_map(Value::as_str);
            texts.any(|text| names.contains(text))
        };
        let shown = saved.exports.iter();
        let nodes: Vec<_> = nodes
            .filter(|node| names.contains(name_of(node)))
            .cloned()
            .collect();
        let mut found = BTreeSet::new();
        nodes
            .iter()
            .for_each(|node| references_of(node, &mut found));
        let is_below = |node: &&Map<String, Value>| found.contains(name_of(node));
        Lost {
            below: saved.nodes.iter().filter(is_below).cloned().collect(),
            config: config.collect(),
            jobs: saved.jobs.iter().filter(works_with).cloned().collect(),
            shown: shown
                .map(|export| (export.id.clone(), export.node.clone()))
                .collect(),
            exports,
            nodes,
        }
    }

    /// Forgets nodes that are back, and what they stood on unless others do that are not.
    fn forget(&mut self, back: &BTreeSet<String>) {
        self.nodes.retain(|node| !back.contains(name_of(node)));
        let mut found = BTreeSet::new();
        self.nodes
            .iter()
            .for_each(|node| references_of(node, &mut found));
        let below = std::mem::take(&mut self.below).into_iter();
        self.below = below.filter(|node| found.contains(name_of(node))).collect();
    }

    pub(super) fn has_export(&self, id: &str) -> bool {
        self.exports.iter().any(|export| export.id == id)
    }

    pub(super) fn has_job(&self, id: &str) -> bool {
        self.jobs.iter().any(|job| job.id == id)
    }

    /// Adds the nodes to what a file is to say of those that there are.
    pub(super) fn add_nodes(&self, described: &mut Value, nodes: &Nodes) {
        let Some(all) = described.as_array_mut() else {
            return;
        };
        // What is another image now is not what those stood on that are lost.
        for node in all.iter_mut().filter_map(Value::as_object_mut) {
            let mut below = self.below.iter();
            if let Some(before) = below.find(|before| name_of(before) == name_of(node))
                && place(before) != place(node)
            {
                *node = before.clone();
            }
        }
        {
            let lost = self
                .nodes
                .iter()
                .filter(|node| !nodes.contains(name_of(node)));
            all.extend(lost.cloned().map(Value::Object));
        }
    }

    /// Adds the rest to what a file is to say.
    pub(super) fn add_others(&self, content: &mut Value) {
        let ids = |list: &Value, part: &str, key: &str| -> BTreeSet<String> {
            let all = list.as_array().into_iter().flatten();
            let id = |one: &Value| one[part][key].as_str().map(str::to_owned);
            all.filter_map(id).collect()
        };
        let known = ids(&content["exports"], "options", "id");
        if let Some(exports) = content["exports"].as_array_mut() {
            let lost = self
                .exports
                .iter()
                .filter(|export| !known.contains(&export.id));
            exports.extend(lost.map(SavedExport::to_json));
        }
        let known = ids(&content["jobs"], "arguments", "job-id");
        if let Some(jobs) = content["jobs"].as_array_mut() {
            let lost = self.jobs.iter().filter(|job| !known.contains(&job.id));
            jobs.extend(lost.map(SavedJob::to_json));
        }
        if let Some(config) = content["config"].as_object_mut() {
            for (key, made_for) in &self.config {
                config
                    .entry(key.clone())
                    .or_insert_with(|| made_for.clone());
            }
        }
    }

    /// The nodes that exports of some disks showed instead of these.
    fn shown_instead(&self, wanted: &Parts) -> BTreeMap<String, String> {
        let instead = self.exports.iter().filter_map(|export| {
            let key = PartKey::new(PartKind::Export, &*export.id);
            let disk = wanted.get(&key)?.arguments.get("node-name")?.as_str()?;
            let made_for = self.config.get(&key.to_string())?.as_str()?;
            let is_other = disk == made_for && export.node != disk;
            is_other.then(|| (disk.to_owned(), export.node.clone()))
        });
        instead.collect()
    }

    /// The exports of a configuration that would show what lacks something.
    fn refused(&self, wanted: &Parts) -> Vec<(PartKey, String)> {
        let mut below = BTreeSet::new();
        self.nodes
            .iter()
            .for_each(|node| references_of(node, &mut below));
        let instead = match self.nodes.is_empty() {
            true => BTreeMap::new(),
            false => self.shown_instead(wanted),
        };
        let keys = wanted.keys().filter(|key| key.kind == PartKind::Export);
        let refused = keys.filter_map(|key| {
            let disk = wanted.get(key)?.arguments.get("node-name")?.as_str()?;
            let is_lost = below.contains(disk) || instead.contains_key(disk);
            let did_show = self.shown.get(&key.name).is_some_and(|node| node == disk);
            (is_lost && !did_show).then(|| (key.clone(), disk.to_owned()))
        });
        refused.collect()
    }
}

impl Daemon {
    /// Whether something of the state file could not be brought back.
    pub fn has_lost(&self) -> bool {
        let lost = self.state.lost.lock();
        !lost.nodes.is_empty() || !lost.exports.is_empty()
    }

    /// The nodes that exports of some disks showed instead of these, and that were lost.
    pub fn shown_before_loss(&self, wanted: &Parts) -> BTreeMap<String, String> {
        self.state.lost.lock().shown_instead(wanted)
    }

    /// Leaves out the exports that would show a disk without what was written to a node that is lost,
    /// and says of each why.
    pub fn leave_out_lost(&self, wanted: &mut Parts) -> Vec<String> {
        let refused = self.state.lost.lock().refused(wanted);
        let told = refused.into_iter().map(|(key, disk)| {
            wanted.remove(&key);
            format!(
                "{key}: not served, since what was written to an overlay or a copy of '{disk}' would be missing, \
                 which cannot be opened"
            )
        });
        told.collect()
    }

    /// Tries once more to bring back what was lost, but for what `wanted` has; says what is lost still.
    pub async fn retry_lost(self: &Rc<Self>, wanted: &Parts) -> Vec<String> {
        let (mut told, back) = self.retry_lost_nodes(wanted).await;
        let jobs: Vec<SavedJob> = {
            let mut lost = self.state.lost.lock();
            lost.forget(&back);
            let names: BTreeSet<String> = lost
                .nodes
                .iter()
                .map(|node| name_of(node).to_owned())
                .collect();
            let is_lost = |job: &SavedJob| {
                let mut texts = job.arguments.values().filter_map(Value::as_str);
                texts.any(|text| names.contains(text))
            };
            let (kept, free) = std::mem::take(&mut lost.jobs)
                .into_iter()
                .partition(is_lost);
            lost.jobs = kept;
            free
        };
        for job in &jobs {
            told.extend(self.begin_saved(job).await);
        }
        told
    }

    /// Tries the nodes, and the exports that no configuration has; which nodes are back.
    async fn retry_lost_nodes(&self, wanted: &Parts) -> (Vec<String>, BTreeSet<String>) {
        let (nodes, exports, below) = {
            let lost = self.state.lost.lock();
            (lost.nodes.clone(), lost.exports.clone(), lost.below.clone())
        };
        let (mut told, mut back) = (Vec::new(), BTreeSet::new());
        let mut state = self.parts.lock().await;
        let all: Vec<_> = nodes.iter().chain(&below).cloned().collect();
        if let Err(failure) = check_same(&all, &state.nodes) {
            return (vec![failure.0], back);
        }
        for node in &nodes {
            let name = name_of(node);
            let is_wanted = wanted.get(&PartKey::new(PartKind::Disk, name)).is_some();
            if is_wanted || state.nodes.contains(name) {
                if state.nodes.contains(name) {
                    back.insert(name.to_owned());
                }
                continue;
            }
            let added = match Options::from_object(node.clone()) {
                Ok(options) => state.nodes.add(options).await,
                Err(error) => Err(error),
            };
            match added {
                Ok(()) => drop(back.insert(name.to_owned())),
                Err(error) => {
                    let why = crate::error_text(&error);
                    told.push(format!("cannot bring the node '{name}' back: {why}"));
                }
            }
        }
        for export in exports {
            let is_wanted = wanted
                .get(&PartKey::new(PartKind::Export, &*export.id))
                .is_some();
            if is_wanted
                || !back.contains(&export.node)
                || state.exports.accounting(&export.id).is_some()
            {
                continue;
            }
            if let Err(failure) = export.add_to(&mut state).await {
                told.push(failure.0);
            }
        }
        let is_there = |export: &SavedExport| state.exports.accounting(&export.id).is_some();
        self.state
            .lost
            .lock()
            .exports
            .retain(|export| !is_there(export));
        (told, back)
    }

    /// Notes that nodes of a state cannot be had.
    pub(super) fn note_lost(&self, saved: &SavedState, names: &BTreeSet<String>) {
        if !names.is_empty() {
            *self.state.lost.lock() = Lost::of(saved, names);
        }
    }
}

impl SavedExport {
    fn to_json(&self) -> Value {
        json!({"options": self.options, "node": self.node})
    }
}

impl SavedJob {
    fn to_json(&self) -> Value {
        let mut job = json!({"command": self.command, "arguments": self.arguments});
        if self.is_paused {
            job["paused"] = json!(true);
        }
        job
    }
}
