//! How nodes are made anew as they are now: what a daemon that is started again is told.
//!
//! Invariant: what is told is the graph, not what was asked for: jobs and snapshots have changed it
//! since.

use serde_json::Value;

use super::{MADE_UP, NamedNode, Nodes};
use crate::options::{Options, Scalar};

impl Nodes {
    /// How to make the nodes that were asked for, by `blockdev-add`, each after those that it stands
    /// on. With `led`, the users of the first node are told of as users of the second one.
    ///
    /// Nodes without a name that somebody gave them, and what jobs have put in front of others, are
    /// left out.
    pub fn descriptions(&self, led: Option<(&str, &str)>) -> Vec<(String, Value)> {
        let named = self.lock();
        let roots = named.roots.iter().filter(|name| !name.starts_with(MADE_UP));
        let mut names = named.top_down(roots.cloned().collect());
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

impl NamedNode {
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
            let (role, mut below) = (one.wanted.role.as_str(), one.node.as_str());
            if let Some((from, to)) = led
                && (below, name != to) == (from, true)
            {
                below = to;
            }
            has_backing |= role == "backing";
            let is_made_up = below.starts_with(MADE_UP);
            match self.is_part_of(below, name) {
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
        if !has_backing && node.opened.driver == "qcow2" {
            options.take_group("backing");
            options.set("backing", Scalar::Null);
        }
        Some(options)
    }
}
