//! How nodes are made anew as they are now: what a daemon that is started again is told.
//!
//! Invariant: what is told is the graph, not what was asked for: jobs and snapshots have changed it
//! since.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;
use vellum_options::{Options, Scalar};

use crate::live::nodes::Nodes;
use crate::live::state::GraphState;
use crate::live::uses::{Use, User};
use crate::node::errors::MADE_UP;
use crate::node::origin::Origin;
use crate::node::quorum_children::number_anew;

/// Descriptions as they were told last, by the names of nodes: of a thousand a command changes one.
#[derive(Debug, Default)]
pub struct DescriptionMemo(BTreeMap<String, Told>);

/// A description, and all that it was made of.
#[derive(Debug)]
struct Told {
    origin: Arc<Origin>,
    driver: &'static str,
    is_inactive: bool,
    /// What the node stands on: the role, and the node.
    below: Vec<(String, String)>,
    text: String,
}

impl Nodes {
    /// [`Nodes::descriptions`] as the text of a list.
    pub fn descriptions_text(
        &self,
        led: Option<(&str, &str)>,
        memo: &mut DescriptionMemo,
    ) -> String {
        let state = self.lock();
        let mut before = std::mem::take(memo).0;
        let mut texts = String::from("[");
        for name in state.described_names(led) {
            let known = before.remove(&name);
            let known = known.filter(|told| state.is_as_told(&name, led, told));
            let Some(told) = known.or_else(|| state.tell(&name, led)) else {
                continue;
            };
            if texts.len() > 1 {
                texts.push(',');
            }
            debug_assert_eq!(
                Some(&told.text),
                state.tell(&name, led).map(|now| now.text).as_ref(),
                "what '{name}' was told to be is remembered wrongly"
            );
            texts.push_str(&told.text);
            memo.0.insert(name, told);
        }
        texts.push(']');
        texts
    }

    /// How to make the nodes that have names, by `blockdev-add`, each after those that it stands on.
    /// What was described with the node above it, and is used by that alone, still is. With `led`, the users of the first node are told of as users of the second one.
    ///
    /// Nodes without a name that somebody gave them, what jobs have put in front of others, and what
    /// they have opened and use alone, are left out.
    pub fn descriptions(&self, led: Option<(&str, &str)>) -> Vec<(String, Value)> {
        let state = self.lock();
        let names = state.described_names(led).into_iter();
        let describe = |name: String| {
            let described = state.whole_description(&name, led)?;
            Some((name, described))
        };
        names.filter_map(describe).collect()
    }
}

impl Nodes {
    /// The node that one has as its `file`, if that has a name of its own in [`Nodes::descriptions`].
    pub fn file_of_others(&self, name: &str) -> Option<String> {
        let state = self.lock();
        let below = &state.uses.by_as(name, "file")?.node;
        let has_name = !below.starts_with(MADE_UP) && !state.is_inside(below, None);
        has_name.then(|| below.clone())
    }

    /// The node that one has as its `file`, if somebody gave that a name.
    pub fn named_file(&self, name: &str) -> Option<String> {
        let state = self.lock();
        let below = &state.uses.by_as(name, "file")?.node;
        (!below.starts_with(MADE_UP)).then(|| below.clone())
    }

    /// Whether a node is one of some others, or stands on one, whatever that is to it.
    pub fn stands_on_any(&self, name: &str, others: &BTreeSet<String>) -> bool {
        let state = self.lock();
        let (mut found, mut pending) = (BTreeSet::new(), vec![name]);
        while let Some(name) = pending.pop() {
            if others.contains(name) {
                return true;
            }
            if found.insert(name) {
                pending.extend(state.uses.by(name).map(|one| one.node.as_str()));
            }
        }
        false
    }
}

impl GraphState {
    /// The nodes that are described by themselves, each after those that it stands on.
    fn described_names(&self, led: Option<(&str, &str)>) -> Vec<String> {
        let own = self.nodes.keys().filter(|name| !name.starts_with(MADE_UP));
        let own = own.filter(|name| !self.is_inside(name, led) && !self.is_of_job_alone(name, led));
        let mut names = self.top_down(own.cloned().collect());
        names.reverse();
        names
    }

    /// Whether nobody but the job that has opened a node has to do with it.
    fn is_of_job_alone(&self, name: &str, led: Option<(&str, &str)>) -> bool {
        let is_of_job = self.nodes.get(name).is_some_and(|node| node.is_of_job);
        is_of_job
            && led.is_none_or(|(_, to)| to != name)
            && self.uses.of(name).all(|one| one.user.is_job())
    }

    pub(crate) fn whole_description(&self, name: &str, led: Option<(&str, &str)>) -> Option<Value> {
        let mut options = self.description(name, led)?;
        if self.is_inactive(name) {
            options.set("active", Scalar::Bool(false));
        }
        Some(options.to_json())
    }

    fn tell(&self, name: &str, led: Option<(&str, &str)>) -> Option<Told> {
        let node = self.nodes.get(name)?;
        let below = self.uses.by(name);
        let below = below.map(|one| (one.wanted.role.clone(), self.led_to(one, led).to_owned()));
        Some(Told {
            origin: node.origin.clone()?,
            driver: node.opened.driver.name,
            is_inactive: node.is_inactive(),
            below: below.collect(),
            text: self.whole_description(name, led)?.to_string(),
        })
    }

    /// Whether a description is made of what there is now.
    fn is_as_told(&self, name: &str, led: Option<(&str, &str)>, told: &Told) -> bool {
        let Some(node) = self.nodes.get(name) else {
            return false;
        };
        let origin = node.origin.as_ref();
        let mut below = told.below.iter();
        let mut is_same = |one: &Use| {
            let node = self.led_to(one, led);
            let known = below.next();
            // What is described with the node has a description of its own in it.
            let is_apart = node.starts_with(MADE_UP) || !self.is_inside(node, led);
            is_apart && known.is_some_and(|(role, known)| *role == one.wanted.role && known == node)
        };
        origin.is_some_and(|origin| Arc::ptr_eq(origin, &told.origin))
            && node.opened.driver.name == told.driver
            && node.is_inactive() == told.is_inactive
            && self.uses.by(name).all(&mut is_same)
            && below.next().is_none()
    }

    /// The node that a use leads to.
    fn led_to<'a>(&self, one: &'a Use, led: Option<(&'a str, &'a str)>) -> &'a str {
        match (led, &one.user) {
            (Some((from, to)), User::Node(user)) if one.node == from && user != to => to,
            _ => &one.node,
        }
    }

    /// Whether a node is described with the one above it.
    fn is_inside(&self, name: &str, led: Option<(&str, &str)>) -> bool {
        // Those of others are looked at only where they may be led here.
        let led_here = led.filter(|(_, to)| *to == name).map(|(from, _)| from);
        let users = self.uses.of(name);
        let users = users.chain(led_here.into_iter().flat_map(|from| self.uses.of(from)));
        let users = users.filter(|one| self.led_to(one, led) == name);
        let mut above = users.filter_map(|one| match &one.user {
            User::Node(user) => Some(user),
            _ => None,
        });
        let is_part = |user: &String| self.is_part_of(name, user);
        above.next().is_some_and(is_part) && above.all(is_part)
    }

    fn description(&self, name: &str, led: Option<(&str, &str)>) -> Option<Options> {
        let node = self.nodes.get(name)?;
        let mut options = node.origin.as_ref()?.options.clone();
        options.take("node-name");
        if !name.starts_with(MADE_UP) {
            options.set_text("node-name", name);
        }
        if options.get_text("driver").is_none() {
            options.set_text("driver", node.opened.driver.name);
        }
        let mut has_backing = false;
        for one in self.uses.by(name) {
            let (role, below) = (one.wanted.role.as_str(), self.led_to(one, led));
            has_backing |= role == "backing";
            let is_made_up = below.starts_with(MADE_UP);
            match self.is_inside(below, led) {
                // The image says what it stands on, unless the options describe that.
                _ if is_made_up && role == "backing" => drop(options.take("backing")),
                // The options describe it.
                _ if is_made_up => {}
                true => {
                    let part = self.description(below, led)?;
                    options.take_group(role);
                    options.take(role);
                    options.set_group(role, part);
                }
                false => {
                    options.take_group(role);
                    options.set_text(role, below);
                }
            }
        }
        if node.opened.driver.name == "quorum" {
            number_anew(&mut options);
        }
        if !has_backing && node.opened.driver.name == "qcow2" {
            options.take_group("backing");
            options.set("backing", Scalar::Null);
        }
        Some(options)
    }
}
