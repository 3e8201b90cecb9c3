//! Who uses which node, and for what: what a node's fate depends on.
//!
//! Invariants:
//! - Nothing is noted here that gets in another one's way: that is asked before (`access.rs`).
//! - What a job watches is not opened anew; what it only writes to may be, since it has a link there.
//! - Uses are in the order in which they began, and found by who uses and by what is used.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use vellum::nodes::Link;

/// Somebody who uses a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum User {
    /// The node of this name stands on it.
    Node(String),
    /// The export of this id serves it.
    Export(String),
    /// A job works on it.
    Job {
        /// Its id.
        id: String,
        /// What it does: `commit`, `stream`.
        kind: &'static str,
    },
}

impl User {
    /// Whether it is a job.
    pub fn is_job(&self) -> bool {
        matches!(self, User::Job { .. })
    }

    fn describe(&self) -> String {
        match self {
            User::Node(name) => format!("node '{name}'"),
            User::Export(_) => "an unnamed block device".to_owned(),
            User::Job { id, kind } => format!("{kind} job '{id}'"),
        }
    }
}

/// What a user wants of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequiredAccess {
    /// What the node is to the user: `backing`, `file`, `root`.
    pub role: String,
    /// What the user changes of it.
    pub changes: Changes,
    /// What others must not change of it.
    pub keeps: Changes,
}

/// What of a node may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Changes {
    /// What it reads as.
    pub content: bool,
    /// How long it is.
    pub size: bool,
}

impl Changes {
    /// Nothing.
    pub const NONE: Changes = Changes {
        content: false,
        size: false,
    };
    /// What it reads as.
    pub const CONTENT: Changes = Changes {
        content: true,
        size: false,
    };
    /// How long it is.
    pub const SIZE: Changes = Changes {
        content: false,
        size: true,
    };
    /// Everything.
    pub const ALL: Changes = Changes {
        content: true,
        size: true,
    };

    /// What is in one of them.
    pub(crate) fn or(self, other: Changes) -> Changes {
        Changes {
            content: self.content || other.content,
            size: self.size || other.size,
        }
    }

    /// The names of the permissions of QEMU that are in both; none if there are none.
    pub(crate) fn both(self, other: Changes) -> Option<String> {
        let names = [
            ("write", self.content && other.content),
            ("resize", self.size && other.size),
        ];
        let names: Vec<&str> = names
            .iter()
            .filter_map(|(name, is_in)| is_in.then_some(*name))
            .collect();
        (!names.is_empty()).then(|| names.join(", "))
    }
}

/// What the image over the layers of a commit is to that.
pub const OVERLAY: &str = "overlay";

/// What layers are to a job that reads them.
pub const BETWEEN: &str = "intermediate node";

impl RequiredAccess {
    /// Reading, whatever others do.
    pub fn reading(role: impl Into<String>) -> RequiredAccess {
        RequiredAccess {
            role: role.into(),
            changes: Changes::NONE,
            keeps: Changes::NONE,
        }
    }
}

/// What a job keeps of what lies below its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeps {
    /// How long it is, as far as the job keeps that of the node.
    Size,
    /// Everything but what it stands on by its backing file.
    Files,
    /// Everything.
    All,
}

/// What a node passes on to one that it stands on, of what its own users want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passes {
    /// All of it.
    All,
    /// All of it; and while it has users, nobody else changes anything.
    AllAndKeeps,
    /// It only reads there: if its content is to stay, that of the other has to.
    Reading,
    /// Nothing.
    Nothing,
}

/// A user's use of a node.
#[derive(Debug, Clone)]
pub(crate) struct Use {
    pub(crate) id: u64,
    pub(crate) user: User,
    pub(crate) node: String,
    /// What the user wants itself.
    pub(crate) wanted: RequiredAccess,
    /// What of the wants of its users is wanted too, where the user is a node.
    pub(crate) passes: Passes,
    /// Nobody sees what the user changes itself: it writes what it has read there.
    pub(crate) rewrites: bool,
    /// Of a job: what others must not change of what lies below the node.
    pub(crate) keeps_below: Keeps,
    /// The node to which the user belongs, where that is a node.
    pub(crate) owner: Option<String>,
    /// What the user holds, if the node can be exchanged under it.
    pub(crate) link: Option<Arc<Link>>,
}

impl Use {
    /// A use without a link. It is numbered when it is noted.
    pub(crate) fn new(user: User, node: &str, wanted: RequiredAccess, owner: Option<&str>) -> Use {
        let passes = match wanted.role.as_str() {
            "backing" => Passes::Reading,
            _ => Passes::All,
        };
        Use {
            id: 0,
            user,
            node: node.to_owned(),
            wanted,
            passes,
            rewrites: false,
            keeps_below: Keeps::Size,
            owner: owner.map(str::to_owned),
            link: None,
        }
    }

    /// What others must not change of what lies below the node. A job that writes to layers of a
    /// chain keeps the content of others above, which read what it writes.
    pub(crate) fn kept_below(&self) -> Changes {
        match self.user.is_job() {
            true if self.keeps_below != Keeps::Size => Changes::ALL,
            true => Changes {
                content: false,
                ..self.wanted.keeps
            },
            false => self.wanted.keeps,
        }
    }

    pub(crate) fn describe(&self) -> String {
        format!(
            "{} (uses node '{}' as '{}' child)",
            self.user.describe(),
            self.node,
            self.wanted.role
        )
    }

    /// Whether a job that uses a node like this does not mind that a stream reads it: the stream brings
    /// up what the image holds, the commit below only changes what it stands on.
    pub(crate) fn is_overlay_of_commit(&self) -> bool {
        let by_commit = matches!(self.user, User::Job { kind: "commit", .. });
        by_commit && self.wanted.role == OVERLAY
    }

    /// Whether a stream reads the node, and does not change it.
    pub(crate) fn is_between_of_stream(&self) -> bool {
        let by_stream = matches!(self.user, User::Job { kind: "stream", .. });
        by_stream && self.wanted.role == BETWEEN
    }

    /// Whether it is written to by a mirror.
    pub(crate) fn is_target_of_mirror(&self) -> bool {
        let by_mirror = matches!(self.user, User::Job { kind: "mirror", .. });
        by_mirror && self.wanted.role == "target"
    }

    /// That a job uses the node.
    pub(crate) fn job(&self) -> Option<String> {
        match &self.user {
            User::Job { kind, .. } => Some(format!("block device is in use by block job: {kind}")),
            _ => None,
        }
    }

    /// Why a node that is used like this can neither go nor be changed; `None` if its
    /// other uses have to say it.
    pub(crate) fn blocker(&self) -> Option<String> {
        self.job().or_else(|| self.backing_blocker())
    }

    /// That an image stands on the node by its backing file.
    pub(crate) fn backing_blocker(&self) -> Option<String> {
        match &self.user {
            User::Node(name) if self.wanted.role == "backing" => {
                Some(format!("node is used as backing hd of '{name}'"))
            }
            _ => None,
        }
    }
}

/// Who uses what: all of it.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    by_id: BTreeMap<u64, Use>,
    /// Numbers of the uses of each node.
    of: HashMap<String, BTreeSet<u64>>,
    /// Numbers of the uses that each node makes of others.
    by: HashMap<String, BTreeSet<u64>>,
    /// Numbers of the uses that end with the node of this name.
    of_owner: HashMap<String, BTreeSet<u64>>,
    next_id: u64,
    /// How often a use may have changed.
    changes: u64,
}

impl Uses {
    /// How often a use may have changed.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// All uses.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Use> {
        self.by_id.values()
    }

    /// The uses of a node.
    pub(crate) fn of<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a Use> + Clone {
        let ids = self.of.get(node).into_iter().flatten();
        ids.filter_map(|id| self.by_id.get(id))
    }

    /// What a node makes use of.
    pub(crate) fn by<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a Use> + Clone {
        let ids = self.by.get(node).into_iter().flatten();
        ids.filter_map(|id| self.by_id.get(id))
    }

    /// A node's use of the one that is `role` to it.
    pub(crate) fn by_as(&self, node: &str, role: &str) -> Option<&Use> {
        self.by(node).find(|one| one.wanted.role == role)
    }

    pub(crate) fn get(&self, id: u64) -> Option<&Use> {
        self.by_id.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: u64) -> Option<&mut Use> {
        self.changes += 1;
        self.by_id.get_mut(&id)
    }

    /// Notes a use, and numbers it.
    pub(crate) fn add(&mut self, mut new: Use) -> u64 {
        self.changes += 1;
        new.id = self.next_id;
        self.next_id += 1;
        self.of.entry(new.node.clone()).or_default().insert(new.id);
        if let User::Node(user) = &new.user {
            self.by.entry(user.clone()).or_default().insert(new.id);
        }
        if let Some(owner) = &new.owner {
            let owned = self.of_owner.entry(owner.clone()).or_default();
            owned.insert(new.id);
        }
        let id = new.id;
        self.by_id.insert(id, new);
        id
    }

    pub(crate) fn remove(&mut self, id: u64) {
        self.changes += 1;
        let Some(gone) = self.by_id.remove(&id) else {
            return;
        };
        forget(&mut self.of, &gone.node, id);
        if let User::Node(user) = &gone.user {
            forget(&mut self.by, user, id);
        }
        if let Some(owner) = &gone.owner {
            forget(&mut self.of_owner, owner, id);
        }
    }

    /// Ends what a node makes use of.
    pub(crate) fn remove_by(&mut self, node: &str) {
        for id in self.by.get(node).cloned().unwrap_or_default() {
            self.remove(id);
        }
    }

    /// Ends what the nodes of an owner make use of.
    pub(crate) fn remove_owned(&mut self, owner: &str) {
        for id in self.of_owner.get(owner).cloned().unwrap_or_default() {
            self.remove(id);
        }
    }

    /// Has a use lead to another node.
    pub(crate) fn lead(&mut self, id: u64, node: &str) {
        self.changes += 1;
        let Some(one) = self.by_id.get_mut(&id) else {
            return;
        };
        let old = std::mem::replace(&mut one.node, node.to_owned());
        forget(&mut self.of, &old, id);
        self.of.entry(node.to_owned()).or_default().insert(id);
    }

    /// Has a use go through a link.
    pub(crate) fn go_through(&mut self, id: u64, link: Arc<Link>) {
        if let Some(one) = self.by_id.get_mut(&id) {
            one.link = Some(link);
        }
    }

    /// Gives what a node makes use of to another owner.
    pub(crate) fn own_by(&mut self, node: &str, owner: &str) {
        for id in self.by.get(node).into_iter().flatten() {
            let Some(one) = self.by_id.get_mut(id) else {
                continue;
            };
            if let Some(old) = one.owner.replace(owner.to_owned()) {
                forget(&mut self.of_owner, &old, *id);
            }
            let owned = self.of_owner.entry(owner.to_owned()).or_default();
            owned.insert(*id);
        }
    }
}

fn forget(index: &mut HashMap<String, BTreeSet<u64>>, name: &str, id: u64) {
    if let Some(ids) = index.get_mut(name) {
        ids.remove(&id);
        if ids.is_empty() {
            index.remove(name);
        }
    }
}
