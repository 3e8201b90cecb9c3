//! What a state file says and cannot be had: with `on-error = "report"` the others are served, and this
//! is kept for the next reload, or the next start.
//!
//! Invariants:
//! - What is lost stays in the file as it was, until it is back or something else has its name.
//! - No export shows a disk on which a lost node stands, or whose users were led to one, unless it did
//!   before: what was written since would be missing. That holds for the filters that stood on such a node, and
//!   for what stands on them: where a configuration has made them on another node, they are *withheld*.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use serde_json::{Map, Value, json};

use super::described::{below, bottom_up, cannot_stand, place, references_of, stands_on};
use super::restore::{SavedExport, SavedJob, SavedState, check_same, shown_instead};
use crate::Nodes;
use crate::daemon::config::{PartKey, PartKind, Parts};
use crate::daemon::{Daemon, Failure};
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
    /// The policies of their chains, and what jobs for these leave behind.
    chains: Chains,
    chains_left: Chains,
    /// What a configuration had made of that.
    config: Map<String, Value>,
    /// What each export showed.
    shown: BTreeMap<String, String>,
}

/// What a file says of chains.
type Chains = Vec<Map<String, Value>>;

fn name_of(node: &Map<String, Value>) -> &str {
    let name = node.get("node-name").and_then(Value::as_str);
    name.unwrap_or_default()
}

/// Some chains, and those lost ones that are not among them.
fn with_lost(mut known: Value, lost: &Chains) -> Value {
    if let Some(all) = known.as_array_mut() {
        for one in lost {
            if !all.iter().any(|known| known["node-name"] == name_of(one)) {
                all.push(Value::Object(one.clone()));
            }
        }
    }
    known
}

/// Whether a description has a node of a name in it.
fn describes(described: &Value, name: &str) -> bool {
    match described {
        Value::Object(members) => {
            name_of(members) == name || members.values().any(|member| describes(member, name))
        }
        Value::Array(items) => items.iter().any(|item| describes(item, name)),
        _ => false,
    }
}

impl Lost {
    /// Whether nothing is.
    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
            && self.below.is_empty()
            && self.exports.is_empty()
            && self.jobs.is_empty()
            && self.config.is_empty()
    }

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
        let of_these = |all: &[Map<String, Value>]| -> Vec<_> {
            let all = all.iter().filter(|one| names.contains(name_of(one)));
            all.cloned().collect()
        };
        Lost {
            chains: of_these(&saved.chains),
            chains_left: of_these(&saved.chains_left),
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

    /// What is kept of the chains of some nodes, which is kept no longer.
    fn take_chains_of(&mut self, back: &BTreeSet<String>) -> (Chains, Chains) {
        let take = |all: &mut Chains| {
            let is_back = |one: &Map<String, Value>| back.contains(name_of(one));
            let (free, kept) = std::mem::take(all).into_iter().partition(is_back);
            *all = kept;
            free
        };
        (take(&mut self.chains), take(&mut self.chains_left))
    }

    pub(super) fn has_export(&self, id: &str) -> bool {
        self.exports.iter().any(|export| export.id == id)
    }

    pub(super) fn has_chain(&self, name: &str) -> bool {
        self.chains.iter().any(|policy| name_of(policy) == name)
    }

    pub(super) fn names(&self) -> BTreeSet<String> {
        let names = self.nodes.iter().map(name_of);
        names.map(str::to_owned).collect()
    }

    /// Those that do not show what they did, whether they are there or not: what they stood on is lost, or
    /// they stand on another node.
    pub(super) fn withheld(&self, nodes: &Nodes) -> BTreeSet<String> {
        let names = self.names();
        let is_other = |node: &&Map<String, Value>| {
            let name = name_of(node);
            let was = below(node);
            stands_on(node, &names).is_some()
                || nodes.contains(name) && was.is_some() && nodes.named_file(name).as_deref() != was
        };
        let withheld = self.nodes.iter().filter(is_other);
        withheld.map(|node| name_of(node).to_owned()).collect()
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
        // Nor what a filter stands on now that it is led back from there.
        let withheld = self.withheld(nodes);
        let is_as_it_is = |name: &str| nodes.contains(name) && !withheld.contains(name);
        all.retain(|node| {
            !node["node-name"]
                .as_str()
                .is_some_and(|it| withheld.contains(it))
        });
        let lost = self.nodes.iter().filter(|node| !is_as_it_is(name_of(node)));
        all.extend(lost.cloned().map(Value::Object));
        // It may have been described with that filter.
        let below = self.below.iter();
        for before in below.filter(|before| nodes.contains(name_of(before))) {
            if !all.iter().any(|node| describes(node, name_of(before))) {
                all.push(Value::Object(before.clone()));
            }
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

    /// The chains that a file is to tell of, with those that are kept.
    pub(super) fn with_chains(&self, known: Value) -> Value {
        with_lost(known, &self.chains)
    }

    /// The same of those that are left alone.
    pub(super) fn with_chains_left(&self, known: Value) -> Value {
        with_lost(known, &self.chains_left)
    }

    /// The exports of a configuration that would show what lacks something.
    fn refused(&self, wanted: &Parts, nodes: &Nodes) -> Vec<(PartKey, String)> {
        let withheld = self.withheld(nodes);
        let mut below = BTreeSet::new();
        self.nodes
            .iter()
            .for_each(|node| references_of(node, &mut below));
        let instead = match self.nodes.is_empty() {
            true => BTreeMap::new(),
            false => shown_instead(&self.exports, &self.config, wanted),
        };
        let keys = wanted.keys().filter(|key| key.kind == PartKind::Export);
        let refused = keys.filter_map(|key| {
            let disk = wanted.get(key)?.arguments.get("node-name")?.as_str()?;
            let is_lost = below.contains(disk) || instead.contains_key(disk);
            let did_show = self.shown.get(&key.name).is_some_and(|node| node == disk);
            let is_withheld = nodes.stands_on_any(disk, &withheld);
            (is_withheld || is_lost && !did_show).then(|| (key.clone(), disk.to_owned()))
        });
        refused.collect()
    }
}

/// Adds a node that is lost, or leads it to where it stood, if `check` does not mind: others may have
/// changed something while it was opened.
async fn bring_back(
    daemon: &Daemon,
    node: &Map<String, Value>,
    check: impl Fn() -> Result<(), Failure>,
) -> Result<(), String> {
    let (name, nodes) = (name_of(node), &daemon.nodes);
    let failed = |error: vellum::Error| {
        let why = crate::error_text(&error);
        format!("cannot bring the node '{name}' back: {why}")
    };
    if !nodes.contains(name) {
        let options = Options::from_object(node.clone()).map_err(failed)?;
        let new = nodes.open_restored(options).await.map_err(failed)?;
        let _parts = daemon.parts.lock().await;
        if let Err(failure) = check() {
            let _ = new.discard().await;
            return Err(failure.0);
        }
        let shown = daemon.show(new).await;
        return shown.map_err(|failure| failure.text);
    }
    let _parts = daemon.parts.lock().await;
    let Some(was) = below(node) else {
        return Ok(());
    };
    if nodes.named_file(name).as_deref() != Some(was) {
        // Nobody was shown another disk meanwhile.
        nodes.lead_filter(name, was, true).await.map_err(failed)?;
    }
    match nodes.named_file(name) {
        Some(is) if is == was => Ok(()),
        is => Err(format!(
            "cannot bring the node '{name}' back: it stood on '{was}' and stands on '{}'; have it described \
             as it was, or remove it and reload",
            is.as_deref().unwrap_or("another one")
        )),
    }
}

impl Daemon {
    /// Why a node is not to be shown to anybody: it would lack what was written to one that is lost.
    pub(in crate::daemon) fn withheld(&self, name: &str) -> Option<String> {
        let withheld = self.state.lost.lock().withheld(&self.nodes);
        self.nodes.stands_on_any(name, &withheld).then(|| {
            format!(
                "'{name}' would lack what was written to a node that cannot be opened, and that the state file \
                 has: put that back and reload, or move the state file away and restart"
            )
        })
    }

    /// Whether something of the state file could not be brought back.
    pub fn has_lost(&self) -> bool {
        let lost = self.state.lost.lock();
        !lost.nodes.is_empty() || !lost.exports.is_empty()
    }

    /// The nodes that exports of some disks showed instead of these, and that were lost.
    pub fn shown_before_loss(&self, wanted: &Parts) -> BTreeMap<String, String> {
        let lost = self.state.lost.lock();
        shown_instead(&lost.exports, &lost.config, wanted)
    }

    /// Leaves out the exports that would show a disk without what was written to a node that is lost,
    /// and says of each why.
    pub fn leave_out_lost(&self, wanted: &mut Parts) -> Vec<String> {
        let refused = self.state.lost.lock().refused(wanted, &self.nodes);
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
        let (jobs, chains) = {
            let mut lost = self.state.lost.lock();
            lost.forget(&back);
            let names = lost.names();
            let is_lost = |job: &SavedJob| {
                let mut texts = job.arguments.values().filter_map(Value::as_str);
                texts.any(|text| names.contains(text))
            };
            let (kept, free) = std::mem::take(&mut lost.jobs)
                .into_iter()
                .partition(is_lost);
            lost.jobs = kept;
            let free: Vec<SavedJob> = free;
            (free, lost.take_chains_of(&back))
        };
        let (policies, left) = chains;
        for policy in &policies {
            let is_there = self.chains.contains(name_of(policy));
            let key = PartKey::new(PartKind::Chain, name_of(policy));
            if !is_there && wanted.get(&key).is_none() {
                let set = self.set_saved_chain(policy).await;
                told.extend(set.err().map(|failure| failure.0));
            }
        }
        left.iter().for_each(|left| self.chains.take_left(left));
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
        let (mut names, withheld) = {
            let lost = self.state.lost.lock();
            (lost.names(), lost.withheld(&self.nodes))
        };
        let all: Vec<_> = nodes.iter().chain(&below).cloned().collect();
        let check = || check_same(&all, &withheld, &self.nodes);
        if let Err(failure) = check() {
            return (vec![failure.0], back);
        }
        for node in &nodes {
            let name = name_of(node);
            let is_wanted = wanted.get(&PartKey::new(PartKind::Disk, name)).is_some();
            let is_there = self.nodes.contains(name);
            if is_wanted && !is_there {
                continue;
            }
            let brought = match stands_on(node, &names) {
                Some(gone) => Err(cannot_stand(name, gone)),
                None => bring_back(self, node, check).await,
            };
            match brought {
                Ok(()) => {
                    names.remove(name);
                    back.insert(name.to_owned());
                }
                Err(text) => told.push(text),
            }
        }
        let mut state = self.parts.lock().await;
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
        if self.is_one_of_several {
            job["of-several"] = json!(true);
        }
        job
    }
}
