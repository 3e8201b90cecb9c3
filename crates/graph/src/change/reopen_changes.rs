//! [`ReopenChanges`]: what of a node is to be another one when it is opened anew, and how it is opened then.

use vellum_options::{OpenFlags, Options, Scalar};

use crate::change::drain::DrainedUsers;
use crate::live::state::GraphState;
use crate::live::uses::{Use, User};
use crate::node::errors::MADE_UP;
use crate::node::file_node::CommonOptions;
use crate::node::origin::Origin;
use crate::node::quorum_children::child_number;

/// What of a node is to be another one when it is opened anew.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReopenChanges {
    pub(crate) writable: Option<bool>,
    /// What it stands on by a role: another node, or nothing.
    pub(crate) children: Vec<(String, Option<String>)>,
    /// Whether it is active.
    pub(crate) active: Option<bool>,
    /// All its options, in the place of those that it was opened with.
    pub(crate) options: Option<Options>,
}

impl ReopenChanges {
    /// Whether somebody else who stands on the node may notice.
    pub(crate) fn shows(&self) -> bool {
        self.writable == Some(true) || self.options.is_some() || !self.children.is_empty()
    }

    /// These too.
    pub(crate) fn add(&mut self, more: ReopenChanges) {
        self.writable = more.writable.or(self.writable);
        self.active = more.active.or(self.active);
        self.options = more.options.or_else(|| self.options.take());
        self.children.extend(more.children);
    }

    /// Another node below it, or none.
    pub(crate) fn child(role: &str, below: Option<&str>) -> ReopenChanges {
        ReopenChanges {
            children: vec![(role.to_owned(), below.map(str::to_owned))],
            ..ReopenChanges::default()
        }
    }
}

/// A node that is opened anew: as it was, and as it will be.
#[derive(Debug, Clone)]
pub(crate) struct ReopenedNode {
    pub(crate) name: String,
    pub(crate) old: Origin,
    pub(crate) new: Origin,
    /// What it stood on.
    pub(crate) below: Vec<Use>,
}

/// Nodes that are about to be opened anew, from the top down, with their users held up.
#[derive(Debug, Default)]
pub(crate) struct HeldNodes(pub(crate) Vec<DrainedUsers>);

impl HeldNodes {
    pub(crate) fn nodes(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|held| held.node.clone())
    }

    /// The nodes, as users of those below them.
    pub(crate) fn as_users(&self) -> Vec<User> {
        self.nodes().map(User::Node).collect()
    }

    pub(crate) fn users_of(&self, name: &str) -> Option<&DrainedUsers> {
        self.0.iter().find(|held| held.node == name)
    }
}

/// Whether a node with these options stands on another one by its name.
pub(crate) fn refers_to(options: &Options, name: &str) -> bool {
    let mut entries = options.iter();
    entries.any(|(key, value)| {
        let is_role = !matches!(key, "driver" | "node-name" | "filename");
        is_role && matches!(value, Scalar::Text(text) if text == name)
    })
}

impl GraphState {
    /// How to open a node as it is now, but for what is to be changed.
    pub(crate) fn origin_now(
        &self,
        name: &str,
        origin: &Origin,
        changes: &ReopenChanges,
    ) -> Origin {
        let mut new = origin.clone();
        if let Some(options) = &changes.options {
            new.options = options.clone();
        }
        let options = &mut new.options;
        options.take("node-name");
        if changes.options.is_none() {
            self.fill_children(name, options);
        }
        for (role, child) in &changes.children {
            options.take_group(role);
            options.take(role);
            match child {
                Some(child) => options.set_text(role, &**child),
                // One of a number of children is just gone.
                None if child_number(role).is_some() => {}
                None => options.set(role, Scalar::Null),
            }
        }
        if let Some(writable) = changes.writable {
            for key in ["read-only", "auto-read-only", "file.read-only"] {
                options.take(key);
            }
            options.set("read-only", Scalar::Bool(!writable));
        }
        new.place.parent = Some(name.to_owned());
        new.place.reopens = true;
        new
    }

    /// Names in a node's options what it stands on now.
    fn fill_children(&self, name: &str, options: &mut Options) {
        // What nobody else can know is opened anew with it.
        let below = self.uses.by(name);
        let below =
            below.filter(|one| one.wanted.role == "backing" || !one.node.starts_with(MADE_UP));
        for child in below {
            options.take_group(&child.wanted.role);
            options.set_text(&child.wanted.role, &*child.node);
        }
        if self.uses.by_as(name, "backing").is_none() && self.takes_backing(name) {
            options.take_group("backing");
            options.set("backing", Scalar::Null);
        }
    }

    /// The flags that a node inherits from one that is opened anew with it.
    pub(crate) fn inherited(&self, name: &str, above: &[ReopenedNode]) -> Option<OpenFlags> {
        let parent = |one: &&Use| match &one.user {
            User::Node(user) => self.inherits(name, user, &one.wanted.role),
            _ => false,
        };
        let User::Node(parent) = &self.uses.of(name).find(parent)?.user else {
            return None;
        };
        let new = &above.iter().find(|one| one.name == *parent)?.new;
        let common = CommonOptions::of(&new.options, &new.flags).ok()?;
        Some(common.child_flags(&new.flags))
    }

    /// Whether images of a node's format may stand on others.
    fn takes_backing(&self, name: &str) -> bool {
        let node = self.nodes.get(name);
        node.is_some_and(|node| node.opened.driver.name == "qcow2")
    }
}
