//! What a state file says, and how it comes back.
//!
//! What a command line or a configuration names is made by these, and not a second time: a node, an
//! object or an export of that name stays as it is. What a configuration had made and names no more is
//! not brought back.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use serde_json::{Map, Value, json};
use vellum_graph::live::NewNode;
use vellum_options::Options;

use crate::chains;
use crate::commands::{carry_out, effect};
use crate::config::{PartKey, PartKind, Parts};
use crate::daemon::Daemon;
use crate::effect::Effect;
use crate::failure::{Failure, message};
use crate::qmp::Arguments;

use super::described::{below, bottom_up, cannot_stand, stands_on};
use super::saved::{SavedJob, SavedState, check_same, shown_instead, text};

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
            if is_own && state.object_type(&id).is_none() {
                state.add_object(Options::from_object(object.clone())?)?;
                self.state.note_object(Value::Object(object.clone()));
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
                        let why = vellum_options::error_text(&error);
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
        let set = async {
            let request = chains::take(Arguments::new(policy.clone()))?;
            chains::set(self.clone(), request).await
        };
        let set = set.await.map_err(|failure| {
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
        let begun = match job.anew(&self.nodes) {
            Ok(_) if effect(command) != Some(Effect::BeginsJob) => {
                Err(format!("'{command}' begins no job"))
            }
            Ok(arguments) => {
                let begun = carry_out(self, command, Arguments::new(arguments)).await;
                begun.map_err(|failure| failure.text)
            }
            Err(why) => Err(why),
        };
        match begun {
            Ok(_) => {
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
