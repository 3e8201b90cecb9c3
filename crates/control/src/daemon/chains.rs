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

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use serde_json::{Map, Value, json};
use vellum_io::{lane, spawn};

use super::{Daemon, carry_out};
use crate::nodes::{NodeState, Wanted};
use crate::qmp::{Arguments, Failure, Outcome};

/// How often chains are looked at.
const INTERVAL: Duration = Duration::from_secs(2);
/// How soon something is tried again that has not helped, and how late.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// What a chain may be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Policy {
    /// So many images in all.
    max_layers: Option<u64>,
    /// So much in overlays of the disk's image, in bytes.
    max_overlay_bytes: Option<u64>,
    /// Most bytes a second of its jobs.
    speed: Option<u64>,
}

#[derive(Debug, Default)]
struct Kept {
    policy: Policy,
    /// The layers for which a job was begun last, when it may be tried again, and after how long then.
    tried: Option<(Vec<String>, Instant, Duration)>,
    leaving: Option<Leaving>,
    error: Option<String>,
}

/// Overlays that nobody needs any more once a job has succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Leaving {
    /// From the top down.
    nodes: Vec<String>,
    /// The topmost image when the job began.
    top: String,
    /// What they were committed into.
    base: String,
    /// This daemon has begun the job, and no other one before it.
    is_ours: bool,
}

impl Leaving {
    /// For a state file.
    fn describe(&self, name: &str) -> Value {
        json!({"node-name": name, "nodes": self.nodes, "top": self.top, "base": self.base})
    }

    fn of(saved: &Map<String, Value>) -> Option<Leaving> {
        let text = |key: &str| Some(saved.get(key)?.as_str()?.to_owned());
        let nodes = saved.get("nodes")?.as_array()?.iter();
        Some(Leaving {
            nodes: nodes
                .filter_map(|node| Some(node.as_str()?.to_owned()))
                .collect(),
            top: text("top")?,
            base: text("base")?,
            is_ours: false,
        })
    }
}

/// The policies, by the nodes that they are of.
#[derive(Debug, Default)]
pub(super) struct ChainPolicies {
    kept: RefCell<BTreeMap<String, Kept>>,
    runs: Cell<bool>,
}

/// An image of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Layer {
    name: String,
    allocated_bytes: u64,
    /// Nobody uses it but the layer above, or the disk's users if there is none.
    is_own: bool,
}

/// A chain.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Chain {
    /// From the top down.
    layers: Vec<Layer>,
    /// The place of the image whose policy it is.
    at: usize,
    is_busy: bool,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Act {
    /// What lies from `top` to above `base` goes into that.
    Commit { top: String, base: String },
    /// The topmost layer takes in what lies above `base`; all, if there is none.
    Stream { base: Option<String> },
}

impl Chain {
    /// What a commit leaves behind.
    fn left_by(&self, act: &Act) -> Option<Leaving> {
        let Act::Commit { top, base } = act else {
            return None;
        };
        let names = self.layers[..self.at].iter().map(|layer| &layer.name);
        Some(Leaving {
            nodes: names.skip_while(|name| *name != top).cloned().collect(),
            top: self.layers.first()?.name.clone(),
            base: base.clone(),
            is_ours: true,
        })
    }

    fn overlay_bytes(&self) -> u64 {
        let overlays = self.layers[..self.at].iter();
        overlays.map(|layer| layer.allocated_bytes).sum()
    }

    /// What brings the chain to what it may be, if it is beyond.
    fn act(&self, policy: &Policy) -> Option<Act> {
        let count = self.layers.len() as u64;
        let (layers, at) = (&self.layers, self.at);
        let beyond_layers = policy.max_layers.filter(|most| count > *most);
        let fits = |bytes: u64| policy.max_overlay_bytes.is_none_or(|most| bytes <= most);
        if beyond_layers.is_none() && fits(self.overlay_bytes()) {
            return None;
        }
        if at > 0 && layers[1..=at].iter().all(|layer| layer.is_own) {
            // Users need not change over where the layers between do.
            let kept = count - at as u64 + 1;
            let is_enough = policy.max_layers.is_none_or(|most| kept <= most)
                && fits(layers[0].allocated_bytes);
            let top = if at > 1 && is_enough { 1 } else { 0 };
            return Some(Act::Commit {
                top: layers[top].name.clone(),
                base: layers[at].name.clone(),
            });
        }
        // What others use is not written to, so the disk gets what it needs of it.
        let most = beyond_layers?.max(1);
        let base = count - most + 1;
        Some(Act::Stream {
            base: layers.get(base as usize).map(|layer| layer.name.clone()),
        })
    }
}

/// The chain that an image is in, if it is in one.
fn chain_of(
    states: &BTreeMap<String, NodeState>,
    exported: &[String],
    name: &str,
) -> Option<Chain> {
    let layers_from = |top: &str| {
        let below = |node: &&NodeState| states.get(node.shown_below()?);
        let all = std::iter::successors(states.get(top), below).take(states.len());
        all.collect::<Vec<_>>()
    };
    let own = layers_from(name).into_iter().find(|node| !node.is_filter)?;
    let tops = states.values().filter(|node| !node.is_below);
    let mut chains = tops
        .map(|top| layers_from(&top.name))
        .filter(|layers| layers.iter().any(|node| node.name == own.name));
    let (Some(all), None) = (chains.next(), chains.next()) else {
        // It is several disks' base.
        return None;
    };
    let is_first = |node: &NodeState| all.first().is_some_and(|top| top.name == node.name);
    // Users on a lower layer write what those above it do not know: nothing here is as it seems.
    if all
        .iter()
        .any(|node| !is_first(node) && exported.contains(&node.name))
    {
        return None;
    }
    let path = |node: &NodeState| states.get(node.child("file")?)?.path.clone();
    let is_own = |node: &NodeState| {
        let mut parents = states.values().flat_map(|other| &other.children);
        let users = parents
            .by_ref()
            .filter(|(_, child)| *child == node.name)
            .count();
        let path = path(node);
        let same_file = states.values().filter(|other| other.path == path).count();
        path.is_some() && same_file == 1 && users <= 1
    };
    let images: Vec<&&NodeState> = all.iter().filter(|node| !node.is_filter).collect();
    let layers = images.iter().map(|node| Layer {
        name: node.name.clone(),
        allocated_bytes: node
            .child("file")
            .and_then(|file| states.get(file)?.allocated_bytes)
            .unwrap_or_default(),
        is_own: is_own(node),
    });
    Some(Chain {
        layers: layers.collect(),
        at: images.iter().position(|node| node.name == own.name)?,
        is_busy: all.iter().any(|node| !node.jobs.is_empty()),
    })
}

fn job_of(name: &str) -> String {
    format!("chain-{name}")
}

impl Policy {
    fn take(arguments: &mut Arguments) -> Result<Policy, Failure> {
        let max_layers = arguments.size("max-layers")?;
        if max_layers == Some(0) {
            return Err(Failure::new(
                "'max-layers' is at least 1: the disk's own image",
            ));
        }
        Ok(Policy {
            max_layers,
            max_overlay_bytes: arguments.size("max-overlay-bytes")?,
            speed: arguments.size("speed")?,
        })
    }

    fn bounds(&self) -> bool {
        self.max_layers.is_some() || self.max_overlay_bytes.is_some()
    }

    fn describe(&self, name: &str) -> Map<String, Value> {
        let members = [
            ("max-layers", self.max_layers),
            ("max-overlay-bytes", self.max_overlay_bytes),
            ("speed", self.speed),
        ];
        let said = members
            .into_iter()
            .filter_map(|(key, value)| Some((key.to_owned(), json!(value?))));
        let name = ("node-name".to_owned(), json!(name));
        std::iter::once(name).chain(said).collect()
    }
}

/// Sets the policy of a disk; without bounds it has none any more.
pub(super) async fn set(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let name = arguments.need_text("node-name")?;
    let policy = Policy::take(&mut arguments)?;
    arguments.finish()?;
    if !policy.bounds() {
        daemon.chains.kept.borrow_mut().remove(&name);
        return Ok(json!({}));
    }
    daemon.nodes.device(&name)?;
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
    let (states, exported) = daemon.look_at_nodes();
    let kept = daemon.chains.kept.borrow();
    let described = kept.iter().map(|(name, kept)| {
        let mut told = kept.policy.describe(name);
        if let Some(chain) = chain_of(&states, &exported, name) {
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

    /// Whether a disk has one.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.kept.borrow().contains_key(name)
    }
}

impl Daemon {
    fn look_at_nodes(&self) -> (BTreeMap<String, NodeState>, Vec<String>) {
        let wanted = Wanted {
            of: None,
            filenames: false,
            sizes: true,
        };
        let states = self.nodes.inventory(wanted).into_iter();
        let exports = self.counted.list(&self.nodes).into_iter();
        (
            states.map(|state| (state.name.clone(), state)).collect(),
            exports.map(|export| export.node).collect(),
        )
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
            let (states, exported) = self.look_at_nodes();
            for name in names {
                let acted = pin!(self.keep_chain(&states, &exported, &name));
                if let Either::Right(_) = select(acted, pin!(self.stop.wait())).await {
                    return;
                }
            }
        }
    }

    async fn keep_chain(
        self: &Rc<Self>,
        states: &BTreeMap<String, NodeState>,
        exported: &[String],
        name: &str,
    ) {
        let chain = chain_of(states, exported, name);
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
        let (states, exported) = self.look_at_nodes();
        let below = |node: &&NodeState| states.get(node.shown_below()?);
        let shown = std::iter::successors(states.get(&leaving.top), below).take(states.len());
        let shown: Vec<&str> = shown.map(|node| node.name.as_str()).collect();
        let is_top_left = leaving.nodes.contains(&leaving.top);
        let have_moved = leaving.is_ours || exported.contains(&leaving.base);
        for node in &leaving.nodes {
            // The last copy of what users have written must not go for a mistake.
            let is_stale = match is_top_left {
                true => have_moved && !exported.contains(&leaving.top),
                false => !shown.contains(&node.as_str()),
            };
            if is_stale && states.contains_key(node) {
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

    /// A chain of layers, of which those in capitals are used by others too; `at` is the disk's.
    fn chain(names: &str, at: usize) -> Chain {
        let layer = |name: char| Layer {
            name: name.to_string(),
            allocated_bytes: 10,
            is_own: name.is_ascii_lowercase(),
        };
        Chain {
            layers: names.chars().map(layer).collect(),
            at,
            is_busy: false,
        }
    }

    fn layers(most: u64) -> Policy {
        Policy {
            max_layers: Some(most),
            ..Policy::default()
        }
    }

    fn commit(top: &str, base: &str) -> Option<Act> {
        Some(Act::Commit {
            top: top.to_owned(),
            base: base.to_owned(),
        })
    }

    fn stream(base: Option<&str>) -> Option<Act> {
        let base = base.map(str::to_owned);
        Some(Act::Stream { base })
    }

    #[test]
    fn overlays_are_committed_into_the_disks_own_image_and_no_further() {
        assert_eq!(chain("badG", 2).act(&layers(4)), None);
        assert_eq!(chain("badG", 2).act(&layers(3)), commit("a", "d"));
        assert_eq!(chain("badG", 2).act(&layers(2)), commit("b", "d"));
        assert_eq!(chain("bdG", 1).act(&layers(2)), commit("b", "d"));
    }

    #[test]
    fn overlays_that_are_committed_are_left_behind() {
        let chain = chain("cbadG", 3);
        let left = |top: &str| {
            let act = commit(top, "d").expect("an act");
            chain.left_by(&act).expect("some").nodes
        };
        assert_eq!(
            (left("c"), left("b")),
            (
                ["c", "b", "a"].map(str::to_owned).to_vec(),
                ["b", "a"].map(str::to_owned).to_vec()
            )
        );
        assert_eq!(chain.left_by(&Act::Stream { base: None }), None);
    }

    #[test]
    fn what_others_use_is_streamed_from() {
        assert_eq!(chain("dEFG", 0).act(&layers(3)), stream(Some("F")));
        assert_eq!(chain("dEFG", 0).act(&layers(2)), stream(Some("G")));
        assert_eq!(chain("dEFG", 0).act(&layers(1)), stream(None));
        assert_eq!(chain("dEFG", 0).act(&layers(4)), None);
        // Its own image is another disk's base by now.
        assert_eq!(chain("bDG", 1).act(&layers(2)), stream(Some("G")));
        assert_eq!(chain("bADG", 2).act(&layers(3)), stream(Some("D")));
    }

    #[test]
    fn overlays_have_so_many_bytes() {
        let policy = Policy {
            max_overlay_bytes: Some(15),
            ..Policy::default()
        };
        assert_eq!(chain("bdG", 1).act(&policy), None);
        assert_eq!(chain("cbdG", 2).act(&policy), commit("b", "d"));
        let less = Policy {
            max_overlay_bytes: Some(5),
            ..Policy::default()
        };
        assert_eq!(chain("cbdG", 2).act(&less), commit("c", "d"));
        assert_eq!(chain("bDG", 1).act(&less), None);
    }

    #[test]
    fn what_does_not_help_is_tried_later_and_later() {
        let policies = ChainPolicies::default();
        let kept = Kept {
            policy: layers(2),
            ..Kept::default()
        };
        policies.kept.borrow_mut().insert("d".to_owned(), kept);
        let chain = chain("bdG", 1);
        let (command, arguments) = policies.next("d", &chain).expect("it is beyond");
        assert_eq!(command, "block-commit");
        let expected = json!({"device": "b", "top-node": "b", "base-node": "d", "job-id": "chain-d",
                "auto-dismiss": false});
        assert_eq!(arguments, expected);
        assert_eq!(policies.next("d", &chain), None);
        let other = self::chain("cdG", 1);
        assert!(policies.next("d", &other).is_some());
    }
}
