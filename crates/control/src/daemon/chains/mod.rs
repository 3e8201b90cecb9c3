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
//! - While nothing changes that a policy depends on, no chain is looked at.
//! - What has not helped is tried again later and later.

mod decide;
mod look;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use serde_json::{Map, Value, json};
use vellum_io::{lane, spawn};

use super::{Daemon, carry_out};
use crate::nodes::Wanted;
use crate::qmp::{Arguments, Outcome};
use decide::{Act, Chain, Leaving, Policy, chain_of, first_image};
use look::Look;

/// How often chains are looked at.
const INTERVAL: Duration = Duration::from_secs(2);
/// How soon something is tried again that has not helped, and how late.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
/// So many chains are looked at before others on the lane have their turn.
const CHAINS_A_TURN: usize = 32;

#[derive(Debug, Default)]
struct Kept {
    policy: Policy,
    /// The layers for which a job was begun last, when it may be tried again, and after how long then.
    tried: Option<(Vec<String>, Instant, Duration)>,
    leaving: Option<Leaving>,
    error: Option<String>,
}

impl Kept {
    /// Why nothing can be done with the chain of a disk, or what the last attempt has met.
    fn shown_error(&self, chain: Result<Option<Chain>, &'static str>) -> Option<&str> {
        let hindrance = match chain {
            // The policy's own commit: what it has left is about to be closed, and looks until then like an
            // image over a lower one that an export shows.
            _ if self.leaving.is_some() => None,
            Err(why) => Some(why),
            Ok(chain) => chain.and_then(|chain| chain.act(&self.policy).err()),
        };
        hindrance.or(self.error.as_deref())
    }
}

/// The policies, by the nodes that they are of.
#[derive(Debug, Default)]
pub(super) struct ChainPolicies {
    kept: RefCell<BTreeMap<String, Kept>>,
    runs: Cell<bool>,
    /// How often policies were set, or told what was left.
    changes: Cell<u64>,
}

/// All that the fate of chains depends on, but for sizes of files and jobs of policies.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    graph_changes: u64,
    policy_changes: u64,
    /// The nodes that exports show.
    exported: Vec<String>,
}

/// Whether a chain has to be looked at again though nothing that is [`Seen`] has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Change,
    Interval,
}

fn job_of(name: &str) -> String {
    format!("chain-{name}")
}

/// Sets the policy of a disk; without bounds it has none any more.
pub(super) async fn set(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let name = arguments.need_text("node-name")?;
    let mut policy = Policy::take(&mut arguments)?;
    arguments.finish()?;
    if policy.bounds() {
        daemon.nodes.device(&name)?;
        policy.image = policy.image.or_else(|| daemon.own_image(&name));
    } else if daemon.jobs.find(&job_of(&name)).is_none() {
        daemon.chains.kept.borrow_mut().remove(&name);
        return Ok(json!({}));
    }
    // A job that runs is seen to its end, and what it leaves behind is taken away.
    daemon.chains.replace(name, policy);
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
    let look = daemon.look_at_nodes();
    let kept = daemon.chains.kept.borrow();
    let bounding = kept.iter().filter(|(_, kept)| kept.policy.bounds());
    let described = bounding.map(|(name, kept)| {
        let mut told = kept.policy.describe(name);
        let chain = chain_of(&look, name, kept.policy.image.as_ref()).transpose();
        if let Ok(Some(chain)) = &chain {
            told.insert("layers".to_owned(), json!(chain.layers.len()));
            told.insert("overlay-bytes".to_owned(), json!(chain.overlay_bytes()));
        }
        let error = kept.shown_error(chain);
        if daemon.jobs.find(&job_of(name)).is_some() {
            told.insert("job".to_owned(), json!(job_of(name)));
        }
        if let Some(error) = error {
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
        let all = kept.iter().filter(|(_, kept)| kept.policy.bounds());
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
        self.note_change();
    }

    /// Sets the policy of a disk in the place of another one.
    fn replace(&self, name: String, policy: Policy) {
        let mut all = self.kept.borrow_mut();
        let kept = all.entry(name).or_default();
        let leaving = kept.leaving.take();
        *kept = Kept {
            policy,
            leaving,
            ..Kept::default()
        };
        drop(all);
        self.note_change();
    }

    /// Forgets a policy that was only there for its job.
    fn forget_unbounded(&self, name: &str) {
        let mut all = self.kept.borrow_mut();
        if all.get(name).is_some_and(|kept| !kept.policy.bounds()) {
            all.remove(name);
        }
    }

    fn note_change(&self) {
        self.changes.set(self.changes.get() + 1);
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
        let kept = self.kept.borrow();
        kept.get(name).is_some_and(|kept| kept.policy.bounds())
    }
}

impl Daemon {
    fn exported_nodes(&self) -> Vec<String> {
        let exports = self.counted.list(&self.nodes).into_iter();
        exports.map(|export| export.node).collect()
    }

    fn look_at_nodes(&self) -> Look {
        let exported = self.exported_nodes();
        Look::new(self.nodes.inventory(Wanted::default()), exported)
    }

    /// The node of a disk's own image where that of the disk is a filter, while it may still be told
    /// from overlays that will be put between the two.
    fn own_image(&self, name: &str) -> Option<String> {
        self.chains.image(name).or_else(|| {
            let nodes = self.nodes.inventory(Wanted {
                of: Some(name),
                ..Wanted::default()
            });
            let is_filter = nodes.get(name)?.is_filter;
            let first = first_image(&nodes, name).filter(|_| is_filter)?;
            Some(first.name.clone())
        })
    }

    async fn keep_chains(self: Rc<Self>) {
        let mut settled: Option<Seen> = None;
        loop {
            let pause = pin!(lane::sleep(INTERVAL));
            if let Either::Right(_) = select(pause, pin!(self.stop.wait())).await {
                return;
            }
            let names: Vec<String> = self.chains.kept.borrow().keys().cloned().collect();
            if names.is_empty() {
                // The next policy has it begin again.
                self.chains.runs.set(false);
                return;
            }
            // Before the look: what changes from here on is seen by the next one.
            let seen = Seen {
                graph_changes: self.nodes.changes(),
                policy_changes: self.chains.changes.get(),
                exported: self.exported_nodes(),
            };
            if settled.as_ref() == Some(&seen) {
                continue;
            }
            let look = self.look_at_nodes();
            let mut next = Next::Change;
            for (at, name) in names.iter().enumerate() {
                if self.stop.is_requested() {
                    return;
                }
                if at % CHAINS_A_TURN == CHAINS_A_TURN - 1 {
                    lane::yield_now().await;
                }
                // To its end: a job that was made and not begun would never be over.
                if self.keep_chain(&look, name).await == Next::Interval {
                    next = Next::Interval;
                }
            }
            settled = (next == Next::Change).then_some(seen);
        }
    }

    async fn keep_chain(self: &Rc<Self>, look: &Look, name: &str) -> Next {
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
            return Next::Interval;
        }
        if self.chains.has_left(name) {
            // Its job has ended with the daemon before, or was dismissed by a client.
            self.end_job(name, None).await;
            return Next::Interval;
        }
        self.chains.forget_unbounded(name);
        let image = self.chains.image(name);
        let chain = chain_of(look, name, image.as_ref()).and_then(Result::ok);
        let Some(chain) = chain.filter(|chain| !chain.is_busy) else {
            // The end of what works with it is a change.
            return Next::Change;
        };
        let Some(asked) = self.chains.next(name, &chain) else {
            return self.chains.wait_for(name, &chain);
        };
        let (command, arguments) = asked;
        if !self.ask(name, command, arguments).await {
            self.chains.forget_left(name);
        }
        Next::Interval
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
        let look = self.look_at_nodes();
        let (nodes, exported) = (&look.nodes, &look.exported);
        let shown = nodes.layers(nodes.get(&leaving.top));
        let shown: Vec<&str> = shown.map(|node| node.name.as_str()).collect();
        let is_top_left = leaving.nodes.contains(&leaving.top);
        let image = |name: &String| first_image(nodes, name).map(|node| &node.name);
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
    /// What a chain waits for of which nothing is asked now.
    fn wait_for(&self, name: &str, chain: &Chain) -> Next {
        let kept = self.kept.borrow();
        let Some(kept) = kept.get(name) else {
            return Next::Change;
        };
        // Files grow without a word.
        let may_grow = kept.policy.max_overlay_bytes.is_some() && chain.at > 0;
        match may_grow || kept.tried.is_some() {
            true => Next::Interval,
            false => Next::Change,
        }
    }

    /// The command that is to be carried out for a chain now, if one is.
    fn next(&self, name: &str, chain: &Chain) -> Option<(&'static str, Value)> {
        let mut kept = self.kept.borrow_mut();
        let kept = kept.get_mut(name)?;
        let Ok(Some(act)) = chain.act(&kept.policy) else {
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
    fn what_the_policy_has_left_behind_itself_is_no_error() {
        let policies = policies(1);
        let mut all = policies.kept.borrow_mut();
        let kept = all.get_mut("d").expect("a policy");
        assert_eq!(kept.shown_error(Err("shown")), Some("shown"));
        kept.leaving = Chain::of_test("bdG", 1).left_by(&Act::Commit {
            top: "b".to_owned(),
            base: "d".to_owned(),
        });
        assert!(kept.leaving.is_some());
        assert_eq!(kept.shown_error(Err("shown")), None);
        kept.error = Some("failed".to_owned());
        assert_eq!(kept.shown_error(Err("shown")), Some("failed"));
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
