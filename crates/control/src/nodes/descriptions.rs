//! How nodes are made anew as they are now: what a daemon that is started again is told.
//!
//! Invariant: what is told is the graph, not what was asked for: jobs and snapshots have changed it
//! since.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{MADE_UP, NamedNode, Nodes, Use, User, children};
use crate::options::{Options, Scalar};

impl Nodes {
    /// How to make the nodes that have names, by `blockdev-add`, each after those that it stands on.
    /// What was described with the node above it, and is used by that alone, still is. With `led`, the users of the first node are told of as users of the second one.
    ///
    /// Nodes without a name that somebody gave them, and what jobs have put in front of others, are
    /// left out.
    pub fn descriptions(&self, led: Option<(&str, &str)>) -> Vec<(String, Value)> {
        let named = self.lock();
        let own = named.nodes.keys().filter(|name| !name.starts_with(MADE_UP));
        let own = own.filter(|name| !named.is_inside(name, led));
        let mut names = named.top_down(own.cloned().collect());
        names.reverse();
        let describe = |name: String| {
            let mut options = named.description(&name, led)?;
            if named.is_inactive(&name) {
                options.set("active", Scalar::Bool(false));
            }
            Some((name, options.to_json()))
        };
        names.into_iter().filter_map(describe).collect()
    }
}

impl Nodes {
    /// The node that one has as its `file`, if that has a name of its own in [`Nodes::descriptions`].
    pub(crate) fn file_of_others(&self, name: &str) -> Option<String> {
        let named = self.lock();
        let below = &named.uses.by_as(name, "file")?.node;
        let has_name = !below.starts_with(MADE_UP) && !named.is_inside(below, None);
        has_name.then(|| below.clone())
    }

    /// The node that one has as its `file`, if somebody gave that a name.
    pub(crate) fn named_file(&self, name: &str) -> Option<String> {
        let named = self.lock();
        let below = &named.uses.by_as(name, "file")?.node;
        (!below.starts_with(MADE_UP)).then(|| below.clone())
    }

    /// Whether a node is one of some others, or stands on one, whatever that is to it.
    pub(crate) fn stands_on_any(&self, name: &str, others: &BTreeSet<String>) -> bool {
        let named = self.lock();
        let (mut found, mut pending) = (BTreeSet::new(), vec![name]);
        while let Some(name) = pending.pop() {
            if others.contains(name) {
                return true;
            }
            if found.insert(name) {
                pending.extend(named.uses.by(name).map(|one| one.node.as_str()));
            }
        }
        false
    }
}

impl NamedNode {
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
            options.set_text("driver", node.opened.driver);
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
        if node.opened.driver == "quorum" {
            children::number_anew(&mut options);
        }
        if !has_backing && node.opened.driver == "qcow2" {
            options.take_group("backing");
            options.set("backing", Scalar::Null);
        }
        Some(options)
    }
}
