//! Users of a node are held up while it changes.
//!
//! Invariant: a change holds only links that lead to one node, so its drain ends.

use std::sync::Arc;

use tracing::trace;
use vellum::nodes::{Drained, Link};
use vellum::{BlockDevice, Result};
use vellum_storage::nodes::throttle::Lifted;

use crate::live::nodes::Nodes;
use crate::live::uses::User;
use crate::throttle_groups;

/// The users of a node, held up until this is dropped.
#[derive(Debug)]
pub struct DrainedUsers {
    pub(crate) node: String,
    /// Number of the use, and its link.
    pub(crate) links: Vec<(u64, Arc<Link>)>,
    drained: Vec<Drained>,
    /// Those of the nodes that stand on it without a link.
    _above: Vec<Drained>,
}

impl DrainedUsers {
    pub(crate) fn set(&self, device: &Arc<dyn BlockDevice>) {
        for drained in &self.drained {
            drained.set(device.clone());
        }
    }

    pub(crate) fn ids(&self) -> Vec<u64> {
        self.links.iter().map(|(id, _)| *id).collect()
    }
}

impl Nodes {
    /// Holds up all users of a node but some, those of the nodes above it first.
    pub(crate) async fn hold_but(&self, name: &str, spared: &[User]) -> Result<DrainedUsers> {
        let (above, links) = {
            let state = self.lock();
            let mut above = state.standing_directly(&[name.to_owned()]);
            // What is being opened has no users yet.
            above.retain(|upper| upper == name || state.nodes.contains_key(upper));
            (above, state.links(name, spared)?)
        };
        let mut held_above = Vec::new();
        for upper in above.iter().filter(|upper| *upper != name) {
            let _lifted = self.lift_limits(upper);
            let links = self.lock().links(upper, spared)?;
            for (_, link) in links {
                held_above.push(link.drain().await);
            }
        }
        let _lifted = self.lift_limits(name);
        let mut drained = Vec::with_capacity(links.len());
        trace!(name: "node_drain_start", node = name, users = links.len());
        for (_, link) in &links {
            drained.push(link.drain().await);
        }
        trace!(name: "node_drain_done", node = name);
        Ok(DrainedUsers {
            node: name.to_owned(),
            links,
            drained,
            _above: held_above,
        })
    }

    /// Holds up those users of a node that can be held up.
    pub(crate) async fn hold_linked(&self, name: &str) -> Vec<Drained> {
        let _lifted = self.lift_limits(name);
        let links: Vec<_> = {
            let state = self.lock();
            let uses = state.uses.of(name);
            uses.filter_map(|one| one.link.clone()).collect()
        };
        let mut drained = Vec::with_capacity(links.len());
        for link in links {
            drained.push(link.drain().await);
        }
        drained
    }

    /// Lets requests to a node, and to those below it, pass whatever limits they keep, for one
    /// who waits for them to end.
    pub fn lift_limits(&self, name: &str) -> Vec<Lifted> {
        if !throttle_groups::are_used() {
            return Vec::new();
        }
        let state = self.lock();
        let names = state.with_below(name).into_iter();
        let names: Vec<String> = names.map(str::to_owned).collect();
        drop(state);
        throttle_groups::lift(Some(&names))
    }

    /// Holds up all users of a node but jobs: requests that run have ended, new ones wait.
    ///
    /// # Errors
    /// If there is no such node, or one that stands on it does not let it be exchanged.
    pub async fn drain(&self, name: &str) -> Result<DrainedUsers> {
        let jobs = self.lock().jobs();
        self.hold_but(name, &jobs).await
    }

    /// As [`Nodes::drain`], for one of several nodes that are held at one moment: those of `others` that
    /// stand on it may go on asking. Once their own users are held nothing comes by way of them but
    /// what they are asked to make durable.
    ///
    /// # Errors
    /// As [`Nodes::drain`].
    pub async fn drain_among(&self, name: &str, others: &[String]) -> Result<DrainedUsers> {
        let mut spared = self.lock().jobs();
        spared.extend(others.iter().cloned().map(User::Node));
        self.hold_but(name, &spared).await
    }

    /// Makes durable what has been written to a node.
    ///
    /// # Errors
    /// If there is no such node, or it cannot be.
    pub async fn flush(&self, name: &str) -> Result<()> {
        let device = self.device(name)?;
        match device.info().read_only {
            true => Ok(()),
            false => device.flush().await,
        }
    }
}
