//! What could not be brought back is tried again, once what it needs is there.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use serde_json::{Map, Value};
use vellum_options::Options;

use crate::config::{PartKey, PartKind, Parts};
use crate::daemon::Daemon;
use crate::failure::Failure;

use super::described::{below, cannot_stand, stands_on};
use super::lost::{Lost, name_of};
use super::saved::{SavedExport, SavedJob, SavedState, check_same, shown_instead};

/// Adds a node that is lost, or leads it to where it stood, if `check` does not mind: others may have
/// changed something while it was opened.
async fn bring_back(
    daemon: &Daemon,
    node: &Map<String, Value>,
    check: impl Fn() -> Result<(), Failure>,
) -> Result<(), String> {
    let (name, nodes) = (name_of(node), &daemon.nodes);
    let failed = |error: vellum::Error| {
        let why = vellum_options::error_text(&error);
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
    pub(crate) fn withheld(&self, name: &str) -> Option<String> {
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
    pub(crate) fn note_lost(&self, saved: &SavedState, names: &BTreeSet<String>) {
        if !names.is_empty() {
            *self.state.lost.lock() = Lost::of(saved, names);
        }
    }
}
