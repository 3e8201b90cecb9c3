//! What a state file says and cannot be had: with `on-error = "report"` the others are served, and this
//! is kept for the next reload, or the next start.
//!
//! Invariants:
//! - What is lost stays in the file as it was, until it is back or something else has its name.
//! - No export shows a disk on which a lost node stands, or whose users were led to one, unless it did
//!   before: what was written since would be missing. That holds for the filters that stood on such a node, and
//!   for what stands on them: where a configuration has made them on another node, they are *withheld*.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};
use vellum_graph::Nodes;

use crate::config::{PartKey, PartKind, Parts};

use super::described::{below, bottom_up, place, references_of, stands_on};
use super::saved::{SavedExport, SavedJob, SavedState, shown_instead};

/// What is lost.
#[derive(Debug, Default)]
pub(super) struct Lost {
    /// The nodes, each after those that it names.
    pub(super) nodes: Vec<Map<String, Value>>,
    /// What they stood on, as it was.
    pub(super) below: Vec<Map<String, Value>>,
    /// The exports that showed them.
    pub(super) exports: Vec<SavedExport>,
    /// The jobs that worked with them.
    pub(super) jobs: Vec<SavedJob>,
    /// The policies of their chains, and what jobs for these leave behind.
    pub(super) chains: Chains,
    pub(super) chains_left: Chains,
    /// What a configuration had made of that.
    pub(super) config: Map<String, Value>,
    /// What each export showed.
    pub(super) shown: BTreeMap<String, String>,
}

/// What a file says of chains.
type Chains = Vec<Map<String, Value>>;

pub(super) fn name_of(node: &Map<String, Value>) -> &str {
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
pub(super) fn describes(described: &Value, name: &str) -> bool {
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
    pub(super) fn forget(&mut self, back: &BTreeSet<String>) {
        self.nodes.retain(|node| !back.contains(name_of(node)));
        let mut found = BTreeSet::new();
        self.nodes
            .iter()
            .for_each(|node| references_of(node, &mut found));
        let below = std::mem::take(&mut self.below).into_iter();
        self.below = below.filter(|node| found.contains(name_of(node))).collect();
    }

    /// What is kept of the chains of some nodes, which is kept no longer.
    pub(super) fn take_chains_of(&mut self, back: &BTreeSet<String>) -> (Chains, Chains) {
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
    pub(super) fn refused(&self, wanted: &Parts, nodes: &Nodes) -> Vec<(PartKey, String)> {
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
