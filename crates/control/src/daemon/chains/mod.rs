//! Policies for backing chains: a disk has at most so many layers, or so much in the overlays that were
//! put over it. What is beyond is committed or streamed in the background.
//!
//! Now and then each disk with a policy is looked at, and one job begun where it is beyond: an
//! ordinary `block-commit` or `block-stream` called `chain-DISK`, which clients see and may cancel, and
//! which the state file knows.
//!
//! Invariants:
//! - Written is only to images above the disk's own, and to that, and only if nobody but this chain
//!   uses them: what they stand on (a golden image) is only read.
//! - A disk whose layers a job uses gets no other one.
//! - What has not helped is tried again later and later.

mod decide;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use serde_json::{Map, Value, json};
use vellum_io::{lane, spawn};

use super::{Daemon, carry_out};
use crate::nodes::{Inventory, Wanted};
use crate::qmp::{Arguments, Outcome};
use decide::{Act, Chain, Leaving, Policy, chain_of, first_image};

/// How often chains are looked at.
const INTERVAL: Duration = Duration::from_secs(2);
/// How soon something is tried again that has not helped, and how late.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
struct Kept {
    policy: Policy,
    /// The layers for which a job was begun last, when it may be tried again, and after how long then.
    tried: Option<(Vec<String>, Instant, Duration)>,
    leaving: Option<Leaving>,
    error: Option<String>,
}

/// The policies, by the nodes that they are of.
#[derive(Debug, Default)]
pub(super) struct ChainPolicies {
    kept: RefCell<BTreeMap<String, Kept>>,
    runs: Cell<bool>,
}

fn job_of(name: &str) -> String {
    format!("chain-{name}")
}

/// Sets the policy of a disk; without bounds it has none any more.
pub(super) async fn set(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let name = arguments.need_text("node-name")?;
    let mut policy = Policy::take(&mut arguments)?;
    arguments.finish()?;
    if !policy.bounds() {
        daemon.chains.kept.borrow_mut().remove(&name);
        return Ok(json!({}));
    }
    daemon.nodes.device(&name)?;
    policy.image = policy.image.or_else(|| daemon.own_image(&name));
    let kept = Kept {
        policy,
        ..Kept::default()
    };
    daemon.chains.kept.borrow_mut().insert(name, kept);
    if !daemon.chains.runs.replace(true) {
        drop(spawn(daemon.clone().keep_chains()));
    }
    Ok(json!({}))
}

/// Tells of all policies, and how it stands with them.
pub(super) async fn query(daemon: Rc<Daemon>, arguments: Arguments) -> Outcome {
    arguments.finish()?;
    if daemon.chains.kept.borrow().is_empty() {
        return Ok(json!([]));
    }
    let (states, exported) = daemon.look_at_nodes();
    let kept = daemon.chains.kept.borrow();
    let described = kept.iter().map(|(name, kept)| {
        let mut told = kept.policy.describe(name);
        if let Some(chain) = chain_of(&states, &exported, name, kept.policy.image.as_ref()) {
            told.insert("layers".to_owned(), json!(chain.layers.len()));
            told.insert("overlay-bytes".to_owned(), json!(chain.overlay_bytes()));
        }
        if daemon.jobs.find(&job_of(name)).is_some() {
            told.insert("job".to_owned(), json!(job_of(name)));
        }
        if let Some(error) = &kept.error {
            told.insert("error".to_owned(), json!(error));
        }
        Value::Object(told)
    });
    Ok(described.collect())
}

impl ChainPolicies {
    /// All of them, as they are set again.
    pub(super) fn describe(&self) -> Value {
        let kept = self.kept.borrow();
        let all = kept.iter();
        all.map(|(name, kept)| Value::Object(kept.policy.describe(name)))
            .collect()
    }

    /// What jobs leave behind, for a state file.
    pub(super) fn describe_left(&self) -> Value {
        let kept = self.kept.borrow();
        let left = kept
            .iter()
            .filter_map(|(name, kept)| Some(kept.leaving.as_ref()?.describe(name)));
        left.collect()
    }

    /// Takes in what a daemon before this one has noted of a job.
    pub(super) fn take_left(&self, saved: &Map<String, Value>) {
        let name = saved.get("node-name").and_then(Value::as_str);
        if let Some(kept) = self.kept.borrow_mut().get_mut(name.unwrap_or_default()) {
            kept.leaving = Leaving::of(saved);
        }
    }

    fn has_left(&self, name: &str) -> bool {
        let mut kept = self.kept.borrow_mut();
        let left = kept.get_mut(name).and_then(|kept| kept.leaving.as_mut());
        left.map(|left| left.is_ours = false).is_some()
    }

    fn forget_left(&self, name: &str) {
        if let Some(kept) = self.kept.borrow_mut().get_mut(name) {
            kept.leaving = None;
        }
    }

    /// The node of a disk's own image, where that is another one.
    fn image(&self, name: &str) -> Option<String> {
        self.kept.borrow().get(name)?.policy.image.clone()
    }

    /// Whether a disk has one.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.kept.borrow().contains_key(name)
    }
}

impl Daemon {
    fn look_at_nodes(&self) -> (Inventory, Vec<String>) {
        let wanted = Wanted {
            sizes: true,
            ..Wanted::default()
        };
        let exports = self.counted.list(&self.nodes).into_iter();
        let exported = exports.map(|export| export.node).collect();
        (self.nodes.inventory(wanted), exported)
    }

    /// The node of a disk's own image where that of the disk is a filter, while it may still be told
    /// from overlays that will be put between the two.
    fn own_image(&self, name: &str) -> Option<String> {
        self.chains.image(name).or_else(|| {
            let (nodes, _) = self.look_at_nodes();
            let is_filter = nodes.get(name)?.is_filter;
            let first = first_image(&nodes, name).filter(|_| is_filter)?;
            Some(first.name.clone())
        })
    }

    async fn keep_chains(self: Rc<Self>) {
        loop {
            let pause = pin!(lane::sleep(INTERVAL));
            if let Either::Right(_) = select(pause, pin!(self.stop.wait())).await {
                return;
            }
            let names: Vec<String> = self.chains.kept.borrow().keys().cloned().collect();
            if names.is_empty() {
                continue;
            }
            let (nodes, exported) = self.look_at_nodes();
            for name in names {
                if self.stop.is_requested() {
                    return;
                }
                // To its end: a job that was made and not begun would never be over.
                self.keep_chain(&nodes, &exported, &name).await;
            }
        }
    }

    async fn keep_chain(self: &Rc<Self>, nodes: &Inventory, exported: &[String], name: &str) {
        let image = self.chains.image(name);
        let chain = chain_of(nodes, exported, name, image.as_ref());
        if let Some(job) = self.jobs.find(&job_of(name)) {
            let id = json!({"id": job_of(name)});
            match job.state().status {
                // A commit of what users write to waits for a word.
                "ready" => drop(self.ask(name, "job-complete", id).await),
                "concluded" => {
                    let failure = job.failure();
                    self.ask(name, "job-dismiss", id).await;
                    self.end_job(name, failure).await;
                }
                _ => {}
            }
            return;
        }
        if self.chains.has_left(name) {
            // Its job has ended with the daemon before, or was dismissed by a client.
            return self.end_job(name, None).await;
        }
        let Some(chain) = chain.filter(|chain| !chain.is_busy) else {
            return;
        };
        let Some(asked) = self.chains.next(name, &chain) else {
            return;
        };
        let (command, arguments) = asked;
        if !self.ask(name, command, arguments).await {
            self.chains.forget_left(name);
        }
    }

    /// Takes away what a job has left behind, unless it has failed.
    async fn end_job(self: &Rc<Self>, name: &str, failure: Option<String>) {
        let leaving = match self.chains.kept.borrow_mut().get_mut(name) {
            None => return,
            Some(kept) => {
                kept.error.clone_from(&failure);
                kept.leaving.take()
            }
        };
        let Some(leaving) = leaving.filter(|_| failure.is_none()) else {
            return;
        };
        let (nodes, exported) = self.look_at_nodes();
        let shown = nodes.layers(nodes.get(&leaving.top));
        let shown: Vec<&str> = shown.map(|node| node.name.as_str()).collect();
        let is_top_left = leaving.nodes.contains(&leaving.top);
        let image = |name: &String| first_image(&nodes, name).map(|node| &node.name);
        let are_users_on = |node: &String| exported.iter().any(|user| image(user) == image(node));
        let have_moved = leaving.is_ours || are_users_on(&leaving.base);
        for node in &leaving.nodes {
            // The last copy of what users have written must not go for a mistake.
            let is_stale = match is_top_left {
                true => have_moved && !are_users_on(&leaving.top),
                false => !shown.contains(&node.as_str()),
            };
            if is_stale && nodes.get(node).is_some() {
                self.ask(name, "blockdev-del", json!({"node-name": node}))
                    .await;
            }
        }
    }

    /// Carries out a command for a policy, and notes what comes of it; whether it has succeeded.
    async fn ask(self: &Rc<Self>, name: &str, command: &'static str, arguments: Value) -> bool {
        let Value::Object(arguments) = arguments else {
            return false;
        };
        let outcome = carry_out(self, command, Arguments::new(arguments)).await;
        let is_done = outcome.is_ok();
        if let Some(kept) = self.chains.kept.borrow_mut().get_mut(name) {
            kept.error = outcome.err().map(|failure| failure.text);
        }
        is_done
    }
}

impl ChainPolicies {
    /// The command that is to be carried out for a chain now, if one is.
    fn next(&self, name: &str, chain: &Chain) -> Option<(&'static str, Value)> {
        let mut kept = self.kept.borrow_mut();
        let kept = kept.get_mut(name)?;
        let Some(act) = chain.act(&kept.policy) else {
            kept.tried = None;
            kept.error = None;
            return None;
        };
        let layers: Vec<String> = chain
            .layers
            .iter()
            .map(|layer| layer.name.clone())
            .collect();
        let now = lane::now();
        let pause = match &kept.tried {
            Some((tried, until, _)) if *tried == layers && now < *until => return None,
            Some((tried, _, pause)) if *tried == layers => (*pause * 2).min(LONGEST_PAUSE),
            _ => FIRST_PAUSE,
        };
        let top = layers.first()?.clone();
        kept.tried = Some((layers, now + pause, pause));
        kept.leaving = chain.left_by(&act);
        let (command, mut arguments) = match act {
            Act::Commit { top: from, base } => (
                "block-commit",
                json!({"device": top, "top-node": from, "base-node": base}),
            ),
            Act::Stream { base: Some(base) } => {
                ("block-stream", json!({"device": top, "base-node": base}))
            }
            Act::Stream { base: None } => ("block-stream", json!({"device": top})),
        };
        arguments["job-id"] = json!(job_of(name));
        // Whether it has succeeded is looked at before it goes.
        arguments["auto-dismiss"] = json!(false);
        if let Some(speed) = kept.policy.speed {
            arguments["speed"] = json!(speed);
        }
        Some((command, arguments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policies(max_layers: u64) -> ChainPolicies {
        let policies = ChainPolicies::default();
        let kept = Kept {
            policy: Policy {
                max_layers: Some(max_layers),
                ..Policy::default()
            },
            ..Kept::default()
        };
        policies.kept.borrow_mut().insert("d".to_owned(), kept);
        policies
    }

    #[test]
    fn what_does_not_help_is_tried_later_and_later() {
        let (policies, chain) = (policies(2), Chain::of_test("bdG", 1));
        let (command, arguments) = policies.next("d", &chain).expect("it is beyond");
        assert_eq!(command, "block-commit");
        let expected = json!({"device": "b", "top-node": "b", "base-node": "d",
            "job-id": "chain-d", "auto-dismiss": false});
        assert_eq!(arguments, expected);
        assert_eq!(policies.next("d", &chain), None);
        let other = Chain::of_test("cdG", 1);
        assert!(policies.next("d", &other).is_some());
    }
}
