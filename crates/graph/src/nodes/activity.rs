//! Nodes that are *inactive*: another program may write to their files, so they write nothing
//! there, and hold no lock that would keep it away.
//!
//! Such a node is one that is open read-only, with all of its locks shared, under users that may
//! go on reading; what a format keeps in memory is on the disk before, and is read anew after.
//!
//! Invariants:
//! - A node that is active stands on active ones alone.
//! - What was acknowledged is durable before a node is inactive: it is opened anew for that.

use vellum::Result;

use super::renew::ReopenChanges;
use super::{MADE_UP, NamedNode, Node, Nodes, RequiredAccess, Use, User, invalid, unknown_node};
use crate::file_node::CommonOptions;

/// The refusal of a node that is not there, where a command names it.
fn not_found(name: &str) -> vellum::Error {
    invalid(format!("Failed to find node with node-name='{name}'"))
}

/// The refusal of what changes an inactive node.
pub(super) fn unavailable(permission: &str) -> vellum::Error {
    invalid(format!(
        "Permission '{permission}' unavailable on inactive node"
    ))
}

/// The refusal of an active node on an inactive one.
pub fn inactive_child(name: &str, role: &str, above: &str) -> vellum::Error {
    invalid(format!(
        "Inactive '{name}' can't be a {role} child of active '{above}'"
    ))
}

impl Node {
    pub(super) fn is_inactive(&self) -> bool {
        let origin = self.origin.as_ref();
        origin.is_some_and(|origin| origin.around.flags.inactive)
    }

    /// Whether it is writable, or would be if it were active.
    pub(super) fn is_writable_when_active(&self) -> bool {
        if !self.is_inactive() {
            return self.opened.writable;
        }
        let common = self.origin.as_ref().map(|origin| {
            let mut flags = origin.around.flags.clone();
            flags.inactive = false;
            CommonOptions::of(&origin.options, &flags)
        });
        matches!(common, Some(Ok(common)) if common.writable)
    }

    /// Refuses a use that changes an inactive node. An export that may have such a node has it
    /// read-only.
    pub(super) fn check_access(&self, user: &User, wanted: &RequiredAccess) -> Result<()> {
        let changes = wanted.changes;
        match self.is_inactive() {
            true if changes.size => Err(unavailable("resize")),
            true if changes.content && user.is_job() => Err(unavailable("write")),
            _ => Ok(()),
        }
    }
}

impl NamedNode {
    pub(super) fn is_inactive(&self, name: &str) -> bool {
        self.nodes.get(name).is_some_and(Node::is_inactive)
    }

    /// Some nodes and all that they stand on, from the top down.
    fn with_all_below(&self, names: &[String]) -> Vec<String> {
        let mut all = names.to_vec();
        let mut at = 0;
        while let Some(name) = all.get(at).cloned() {
            for one in self.uses.by(&name) {
                if !all.contains(&one.node) {
                    all.push(one.node.clone());
                }
            }
            at += 1;
        }
        self.top_down(all)
    }

    /// Whether a node stands on one that is active, but for some.
    fn has_active_parent(&self, name: &str, but: &[String]) -> bool {
        self.uses.of(name).any(|one| match &one.user {
            User::Node(above) => !self.is_inactive(above) && !but.contains(above),
            _ => false,
        })
    }

    /// The nodes that become inactive with some: all below them on which no active one stands.
    fn inactivated_with(&self, names: &[String]) -> Result<Vec<String>> {
        let mut all: Vec<String> = Vec::new();
        for name in self.with_all_below(names) {
            let has_parent = self.has_active_parent(&name, &all);
            if has_parent && names.contains(&name) {
                return Err(invalid("Node has active parent node"));
            }
            if !has_parent && !self.is_inactive(&name) {
                all.push(name);
            }
        }
        Ok(all)
    }

    /// Whether a node is opened by the options of the one above it, and only there.
    fn is_inside_another(&self, name: &str) -> bool {
        let is_backing = |one: &Use| one.wanted.role == "backing";
        let is_below = |one: &Use| matches!(one.user, User::Node(_));
        name.starts_with(MADE_UP)
            && self.uses.of(name).any(is_below)
            && !self.uses.of(name).any(is_backing)
    }
}

impl Nodes {
    /// Whether a node is inactive.
    pub fn is_inactive(&self, name: &str) -> bool {
        self.lock().is_inactive(name)
    }

    /// Whether a node is writable, or would be if it were active.
    pub fn is_writable_when_active(&self, name: &str) -> bool {
        let named = self.lock();
        let node = named.nodes.get(name);
        node.is_some_and(Node::is_writable_when_active)
    }

    /// The nodes that change if a node, or every one, becomes active or inactive.
    ///
    /// # Errors
    /// In QEMU's words, if there is no such node, or an active one stands on what is to be
    /// inactive.
    pub fn affected_by_activity(&self, name: Option<&str>, active: bool) -> Result<Vec<String>> {
        let named = self.lock();
        let names: Vec<String> = match name {
            Some(name) if named.nodes.contains_key(name) => vec![name.to_owned()],
            Some(name) => return Err(not_found(name)),
            None => {
                let is_root = |name: &&String| active || !named.has_active_parent(name, &[]);
                named.nodes.keys().filter(is_root).cloned().collect()
            }
        };
        if !active {
            return named.inactivated_with(&names);
        }
        let mut all = named.with_all_below(&names);
        all.retain(|name| named.is_inactive(name));
        Ok(all)
    }

    /// Makes nodes active or inactive, all at one moment: such as
    /// [`Nodes::affected_by_activity`] tells. Users go on with them.
    ///
    /// # Errors
    /// If a job works on one of them, one cannot be opened anew, or is locked by somebody: then
    /// all are as they were.
    pub async fn set_activity(&self, names: &[String], active: bool) -> Result<()> {
        if names.is_empty() {
            return Ok(());
        }
        self.check_activity_change(names)?;
        let changes = self.activity_changes(names, active);
        self.renew_all(changes).await
    }

    /// Opens a node anew, and makes it and others inactive with that.
    pub(super) async fn renew_with_activity(
        &self,
        name: &str,
        change: ReopenChanges,
        inactivated: &[String],
    ) -> Result<()> {
        self.check_activity_change(inactivated)?;
        let mut changes = self.activity_changes(inactivated, false);
        match changes.iter_mut().find(|(changed, _)| changed == name) {
            Some((_, with)) => {
                *with = ReopenChanges {
                    active: with.active,
                    ..change
                };
            }
            None => changes.push((name.to_owned(), change)),
        }
        self.renew_all(changes).await
    }

    /// Refuses nodes that cannot change.
    fn check_activity_change(&self, names: &[String]) -> Result<()> {
        let named = self.lock();
        for name in named.standing_directly(names) {
            named.check_no_job(&name)?;
        }
        for name in names {
            let node = named.nodes.get(name).ok_or_else(|| unknown_node(name))?;
            if node.is_filter {
                return Err(invalid(format!(
                    "Node '{name}' is busy: it is the filter of a job"
                )));
            }
        }
        Ok(())
    }

    /// What changes of nodes that are not opened by those above them.
    fn activity_changes(&self, names: &[String], active: bool) -> Vec<(String, ReopenChanges)> {
        let named = self.lock();
        let own = names.iter().filter(|name| !named.is_inside_another(name));
        let change = ReopenChanges {
            active: Some(active),
            ..ReopenChanges::default()
        };
        own.map(|name| (name.clone(), change.clone())).collect()
    }
}
