//! Who uses which node, and for what: what a node's fate depends on.
//!
//! Invariants:
//! - Of the users of one node none changes what another one needs to stay as it
//!   is; who would is refused.
//! - What a job watches is not opened anew.

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
