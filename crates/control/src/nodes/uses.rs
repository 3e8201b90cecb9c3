//! Who uses which node, and for what: what a node's fate depends on.
//!
//! Invariants:
//! - Of the users of one node none changes what another one needs to stay as it
//!   is; who would is refused.
//! - What a job watches is not opened anew.
//! - Uses are in the order in which they began, and found by who uses and by what is used.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vellum::nodes::Link;
use vellum::{Error, ErrorKind, Result};

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

    /// The names of the permissions of QEMU that are in both; none if there are none.
    fn both(self, other: Changes) -> Option<String> {
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

/// A user's use of a node.
#[derive(Debug, Clone)]
pub(super) struct Use {
    pub(super) id: u64,
    pub(super) user: User,
    pub(super) node: String,
    pub(super) wanted: RequiredAccess,
    /// The node to which the user belongs, where that is a node.
    pub(super) owner: Option<String>,
    /// What the user holds, if the node can be exchanged under it.
    pub(super) link: Option<Arc<Link>>,
}

impl Use {
    fn describe(&self) -> String {
        format!(
            "{} (uses node '{}' as '{}' child)",
            self.user.describe(),
            self.node,
            self.wanted.role
        )
    }

    /// Whether it is written to by a mirror.
    pub(super) fn is_target_of_mirror(&self) -> bool {
        let by_mirror = matches!(self.user, User::Job { kind: "mirror", .. });
        by_mirror && self.wanted.role == "target"
    }

    /// That a job uses the node.
    pub(super) fn job(&self) -> Option<String> {
        match &self.user {
            User::Job { kind, .. } => Some(format!("block device is in use by block job: {kind}")),
            _ => None,
        }
    }

    /// Why a node that is used like this can neither go nor be changed; `None` if its
    /// other uses have to say it.
    pub(super) fn blocker(&self) -> Option<String> {
        match &self.user {
            User::Job { .. } => self.job(),
            User::Node(name) if self.wanted.role == "backing" => {
                Some(format!("node is used as backing hd of '{name}'"))
            }
            _ => None,
        }
    }
}

/// Who uses what: all of it.
#[derive(Debug, Default)]
pub(super) struct Uses {
    by_id: BTreeMap<u64, Use>,
    /// Numbers of the uses of each node.
    of: BTreeMap<String, BTreeSet<u64>>,
    /// Numbers of the uses that each node makes of others.
    by: BTreeMap<String, BTreeSet<u64>>,
    next_id: u64,
}

impl Uses {
    /// All uses.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Use> {
        self.by_id.values()
    }

    /// The uses of a node.
    pub(super) fn of<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a Use> + Clone {
        let ids = self.of.get(node).into_iter().flatten();
        ids.filter_map(|id| self.by_id.get(id))
    }

    /// What a node makes use of.
    pub(super) fn by<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a Use> + Clone {
        let ids = self.by.get(node).into_iter().flatten();
        ids.filter_map(|id| self.by_id.get(id))
    }

    /// A node's use of the one that is `role` to it.
    pub(super) fn by_as(&self, node: &str, role: &str) -> Option<&Use> {
        self.by(node).find(|one| one.wanted.role == role)
    }

    pub(super) fn get(&self, id: u64) -> Option<&Use> {
        self.by_id.get(&id)
    }

    /// Notes a use, and numbers it.
    ///
    /// # Errors
    /// If it gets in the way of others.
    pub(super) fn add(&mut self, mut new: Use) -> Result<u64> {
        let wanted = &new.wanted;
        // Whoever only reads is in nobody's way, and a backing file has many who do.
        if (wanted.changes, wanted.keeps) != (Changes::NONE, Changes::NONE) {
            check(&new, self.of(&new.node))?;
        }
        new.id = self.next_id;
        self.next_id += 1;
        self.of.entry(new.node.clone()).or_default().insert(new.id);
        if let User::Node(user) = &new.user {
            self.by.entry(user.clone()).or_default().insert(new.id);
        }
        let id = new.id;
        self.by_id.insert(id, new);
        Ok(id)
    }

    pub(super) fn remove(&mut self, id: u64) {
        let Some(gone) = self.by_id.remove(&id) else {
            return;
        };
        forget(&mut self.of, &gone.node, id);
        if let User::Node(user) = &gone.user {
            forget(&mut self.by, user, id);
        }
    }

    /// Ends what a node makes use of.
    pub(super) fn remove_by(&mut self, node: &str) {
        for id in self.by.get(node).cloned().unwrap_or_default() {
            self.remove(id);
        }
    }

    /// Ends what the nodes of an owner make use of.
    pub(super) fn remove_owned(&mut self, owner: &str) {
        let owned = self
            .iter()
            .filter(|one| one.owner.as_deref() == Some(owner));
        let owned: Vec<u64> = owned.map(|one| one.id).collect();
        for id in owned {
            self.remove(id);
        }
    }

    /// Has a use lead to another node.
    pub(super) fn lead(&mut self, id: u64, node: &str) {
        let Some(one) = self.by_id.get_mut(&id) else {
            return;
        };
        let old = std::mem::replace(&mut one.node, node.to_owned());
        forget(&mut self.of, &old, id);
        self.of.entry(node.to_owned()).or_default().insert(id);
    }

    /// Has a use want something else; nobody is asked.
    pub(super) fn want(&mut self, id: u64, wanted: RequiredAccess) {
        if let Some(one) = self.by_id.get_mut(&id) {
            one.wanted = wanted;
        }
    }

    /// Has a use go through a link.
    pub(super) fn go_through(&mut self, id: u64, link: Arc<Link>) {
        if let Some(one) = self.by_id.get_mut(&id) {
            one.link = Some(link);
        }
    }

    /// Gives what a node makes use of to another owner.
    pub(super) fn own_by(&mut self, node: &str, owner: &str) {
        for id in self.by.get(node).into_iter().flatten() {
            if let Some(one) = self.by_id.get_mut(id) {
                one.owner = Some(owner.to_owned());
            }
        }
    }
}

fn forget(index: &mut BTreeMap<String, BTreeSet<u64>>, name: &str, id: u64) {
    if let Some(ids) = index.get_mut(name) {
        ids.remove(&id);
        if ids.is_empty() {
            index.remove(name);
        }
    }
}

/// Refuses a use that gets in the way of others.
pub(super) fn check<'a>(new: &Use, others: impl IntoIterator<Item = &'a Use>) -> Result<()> {
    for other in others {
        let change = new.wanted.changes.both(other.wanted.keeps);
        let keep = other.wanted.changes.both(new.wanted.keeps);
        // Which of two conflicts is told shows in scripts: an export keeps the size only
        // once it is there.
        let change_first = matches!(new.user, User::Export(_));
        let (what, changer, keeper) = match (change, keep) {
            (Some(what), _) if change_first => (what, new, other),
            (_, Some(what)) => (what, other, new),
            (Some(what), None) => (what, new, other),
            (None, None) => continue,
        };
        let message = format!(
            "Permission conflict on node '{}': permissions '{what}' are both required by {} and \
             unshared by {}.",
            new.node,
            changer.describe(),
            keeper.describe()
        );
        return Err(Error::new(ErrorKind::Denied, "use node", message).target(&*new.node));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_and_one_who_needs_rest_are_told_apart() {
        let one = |user, role: &str, changes, keeps| Use {
            id: 0,
            user,
            node: "n".into(),
            wanted: RequiredAccess {
                role: role.into(),
                changes,
                keeps,
            },
            owner: None,
            link: None,
        };
        let export = one(
            User::Export("e".into()),
            "root",
            Changes::CONTENT,
            Changes::SIZE,
        );
        let id = "j".to_owned();
        let job = User::Job { id, kind: "stream" };
        let job = one(job, "intermediate node", Changes::NONE, Changes::CONTENT);
        let above = one(
            User::Node("above".into()),
            "backing",
            Changes::NONE,
            Changes::NONE,
        );
        let expected = "Permission conflict on node 'n': permissions 'write' are both required by \
                        an unnamed block device (uses node 'n' as 'root' child) and unshared by \
                        stream job 'j' (uses node 'n' as 'intermediate node' child).";
        assert_eq!(
            check(&job, [&above, &export]).unwrap_err().message(),
            expected
        );
        assert_eq!(check(&export, [&job]).unwrap_err().message(), expected);
        assert!(check(&above, [&export, &job]).is_ok());
    }
}
