//! The commands that set and tell policies, and the look at chains now and then.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use serde_json::{Value, json};
use vellum_graph::live::Wanted;
use vellum_io::{lane, spawn};
use vellum_jobs::job::Verb;

use crate::commands::job_verbs::{self, JobVerb};
use crate::commands::{self, carry_out, change};
use crate::daemon::Daemon;
use crate::qmp::{Arguments, Failure, Outcome};

use super::decide::{Policy, chain_of, first_image};
use super::look::Look;
use super::policies::{Next, job_of};

/// How often chains are looked at.
const INTERVAL: Duration = Duration::from_secs(2);
/// So many chains are looked at before others on the lane have their turn.
const CHAINS_A_TURN: usize = 32;

/// All that the fate of chains depends on, but for sizes of files and jobs of policies.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    graph_changes: u64,
    policy_changes: u64,
    /// The nodes that exports show.
    exported: Vec<String>,
}

/// Takes the disk and its policy.
pub(crate) fn take(mut arguments: Arguments) -> Result<(String, Policy), Failure> {
    let name = arguments.need_text("node-name")?;
    let policy = Policy::take(&mut arguments)?;
    arguments.finish().map(|()| (name, policy))
}

/// Sets the policy of a disk; without bounds it has none any more.
pub(crate) async fn set(daemon: Rc<Daemon>, request: (String, Policy)) -> Result<(), Failure> {
    let (name, mut policy) = request;
    if policy.bounds() {
        daemon.nodes.device(&name)?;
        policy.image = policy.image.or_else(|| daemon.own_image(&name));
    } else if daemon.jobs.find(&job_of(&name)).is_none() {
        daemon.chains.kept.borrow_mut().remove(&name);
        return Ok(());
    }
    // A job that runs is seen to its end, and what it leaves behind is taken away.
    daemon.chains.replace(name, policy);
    if !daemon.chains.runs.replace(true) {
        drop(spawn(daemon.clone().keep_chains()));
    }
    Ok(())
}

/// Tells of all policies, and how it stands with them.
pub(crate) async fn query(daemon: Rc<Daemon>, (): ()) -> Outcome {
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
            let lead = |verb| job_verbs::apply(self.clone(), JobVerb::new(job_of(name), verb));
            match job.state().status {
                // A commit of what users write to waits for a word.
                "ready" => self.note(name, lead(Verb::Complete).await),
                "concluded" => {
                    let failure = job.failure();
                    self.note(name, lead(Verb::Dismiss).await);
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
        let outcome = carry_out(self, command, Arguments::new(arguments)).await;
        let is_begun = outcome.is_ok();
        self.note(name, outcome.map(drop));
        if !is_begun {
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
                let removal = commands::nodes::del(self.clone(), node.clone());
                let removed = change(self, "blockdev-del", removal).await;
                self.note(name, removed);
            }
        }
    }

    /// Notes what has come of a command for a policy.
    fn note(&self, name: &str, outcome: Result<(), Failure>) {
        if let Some(kept) = self.chains.kept.borrow_mut().get_mut(name) {
            kept.error = outcome.err().map(|failure| failure.text);
        }
    }
}
