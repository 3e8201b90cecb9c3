//! What the list of nodes tells of their users, and how to open one of them anew.

use std::sync::Arc;

use vellum::nodes::Link;
use vellum::{ErrorKind, Result};

use super::changes::ReopenChanges;
use super::{MADE_UP, NamedNode, Origin, Use, User, invalid, unknown_node};
use crate::options::Scalar;

impl NamedNode {
    /// The links of a node's users but some.
    pub(super) fn links(&self, name: &str, spared: &[User]) -> Result<Vec<(u64, Arc<Link>)>> {
        if !self.nodes.contains_key(name) {
            return Err(unknown_node(name));
        }
        let users = self.uses.iter();
        let users = users.filter(|one| one.node == name && !spared.contains(&one.user));
        let link = |one: &Use| match &one.link {
            Some(link) => Ok((one.id, link.clone())),
            None => Err(vellum::Error::new(
                ErrorKind::Unsupported,
                "change the graph",
                format!(
                    "Node '{name}' cannot be exchanged as '{}' child",
                    one.wanted.role
                ),
            )),
        };
        users.map(link).collect()
    }

    pub(super) fn jobs(&self) -> Vec<User> {
        let users = self.uses.iter().map(|one| &one.user);
        users.filter(|user| user.is_job()).cloned().collect()
    }

    pub(super) fn backing_use(&self, name: &str) -> Option<usize> {
        self.use_as(name, "backing")
    }

    /// A node's use of the one that is `role` to it.
    pub(super) fn use_as(&self, name: &str, role: &str) -> Option<usize> {
        self.uses.iter().position(|one| {
            matches!(&one.user, User::Node(user) if user == name) && one.wanted.role == role
        })
    }

    pub(super) fn blocker(&self, name: &str) -> Option<String> {
        let mut users = self.uses.iter().filter(|one| one.node == name);
        users.find_map(Use::blocker)
    }

    /// Refuses a node that a job works on.
    pub(super) fn check_no_job(&self, name: &str) -> Result<()> {
        let mut users = self.uses.iter().filter(|one| one.node == name);
        match users.find_map(Use::job) {
            None => Ok(()),
            Some(why) => Err(invalid(format!("Node '{name}' is busy: {why}"))),
        }
    }

    /// Why nothing new can stand on a node whose content a job is changing: it would not
    /// stay what it was.
    pub(super) fn changed_by_job(&self, name: &str) -> Option<String> {
        let users = self.uses.iter();
        let mut changing = users.filter(|one| one.node == name && one.wanted.changes.content);
        changing.find_map(Use::job)
    }

    /// How to open a node as it is now, but for what is to be changed.
    pub(super) fn origin_now(
        &self,
        name: &str,
        origin: &Origin,
        renewal: &ReopenChanges,
    ) -> Origin {
        let mut new = origin.clone();
        let options = &mut new.options;
        options.take("node-name");
        let below = self.uses.iter().filter(|one| {
            let own = matches!(&one.user, User::Node(user) if user == name);
            // What nobody else can know is opened anew with it.
            own && (one.wanted.role == "backing" || !one.node.starts_with(MADE_UP))
        });
        for child in below {
            options.take_group(&child.wanted.role);
            options.set_text(&child.wanted.role, &*child.node);
        }
        if let Some(backing) = &renewal.backing {
            options.take_group("backing");
            options.set("backing", Scalar::Text(backing.clone()));
        } else if self.backing_use(name).is_none() && self.takes_backing(name) {
            options.take_group("backing");
            options.set("backing", Scalar::Null);
        }
        if let Some(writable) = renewal.writable {
            for key in ["read-only", "auto-read-only", "file.read-only"] {
                options.take(key);
            }
            options.set("read-only", Scalar::Bool(!writable));
        }
        new.around.place.parent = Some(name.to_owned());
        new.around.place.renewal = true;
        new
    }

    /// Whether images of a node's format may stand on others.
    fn takes_backing(&self, name: &str) -> bool {
        let node = self.nodes.get(name);
        node.is_some_and(|node| node.opened.driver == "qcow2")
    }

    /// Forgets what a node stands on: the uses, and files that only it knows.
    pub(super) fn forget_below(&mut self, name: &str) {
        let is_own = |user: &User| matches!(user, User::Node(user) if user == name);
        let below: Vec<_> = self
            .uses
            .iter()
            .filter(|one| is_own(&one.user))
            .map(|one| (one.node.clone(), one.wanted.role.clone()))
            .collect();
        self.uses.retain(|one| !is_own(&one.user));
        for (below, role) in below {
            if role != "backing" && below.starts_with(MADE_UP) {
                self.forget_below(&below);
                self.nodes.remove(&below);
            }
        }
    }
}
