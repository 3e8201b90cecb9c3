//! `blockdev-reopen`: nodes get other options, several at one moment, all or none.
//!
//! What is not given returns to its default. What cannot change must be given as it is.

use vellum::Result;
use vellum::qcow2::AsQcow2;
use vellum_options::{Options, Scalar};

use crate::change::graph_change::GraphChange;
use crate::change::reopen_changes::ReopenChanges;
use crate::drivers;
use crate::live::nodes::Nodes;
use crate::live::state::GraphState;
use crate::live::uses::{Use, User};
use crate::merged_options::text;
use crate::node::driver::DriverFacts;
use crate::node::errors::{MADE_UP, invalid, unknown_node};
use crate::node::opened::NodeKind;

/// Options that every node may change, and those that only say which node is meant.
const COMMON: [&str; 8] = [
    "node-name",
    "driver",
    "read-only",
    "auto-read-only",
    "cache.direct",
    "cache.no-flush",
    "discard",
    "detect-zeroes",
];

/// What nodes stand on.
const ROLES: [&str; 8] = [
    "file",
    "backing",
    "image",
    "data-file",
    "raw",
    "test",
    "log",
    "header",
];

/// Options of one node.
#[derive(Debug, Clone)]
pub struct WantedOptions {
    name: String,
    options: Options,
    /// Other nodes below it, or none, by what they are to it.
    children: Vec<(String, Option<String>)>,
}

/// Whether an option may be another one than before, by the name of the driver.
pub fn may_change(driver: &str, key: &str) -> bool {
    let facts = drivers::facts(driver);
    COMMON.contains(&key) || facts.is_some_and(|facts| facts.may_change(key))
}

fn cannot_change(key: &str) -> vellum::Error {
    invalid(format!("Cannot change the option '{key}'"))
}

fn is_role(key: &str) -> bool {
    let role = key.split('.').next().unwrap_or_default();
    ROLES.contains(&role)
}

/// Refuses to change what cannot change of a node's own options.
fn check_options(driver: DriverFacts, old: &Options, new: &Options) -> Result<()> {
    let fixed = |key: &str| !is_role(key) && !COMMON.contains(&key) && !driver.may_change(key);
    for (key, _) in old.iter().filter(|(key, _)| fixed(key)) {
        if !new.contains(key) {
            return Err(invalid(format!(
                "Option '{key}' cannot be reset to its default value"
            )));
        }
    }
    for (key, value) in new.iter().filter(|(key, _)| fixed(key)) {
        let before = old.iter().find(|(other, _)| *other == key);
        if before.is_none_or(|(_, before)| text(before) != text(value)) {
            return Err(cannot_change(key));
        }
    }
    Ok(())
}

impl Nodes {
    /// Gives nodes other options, each those that its `node-name` names: all at one moment, or
    /// none.
    ///
    /// # Errors
    /// In QEMU's words, as far as it has some. Everything is as it was then.
    pub async fn reopen(&self, options: Vec<Options>) -> Result<()> {
        let changes = {
            let state = self.lock();
            let mut all: Vec<WantedOptions> = Vec::new();
            for options in options {
                let Some(name) = options.get_text("node-name").map(str::to_owned) else {
                    return Err(invalid("node-name not specified"));
                };
                if !state.nodes.contains_key(&name) {
                    return Err(invalid(format!(
                        "Failed to find node with node-name='{name}'"
                    )));
                }
                state.gather(&name, options, &mut all)?;
            }
            state.check_wanted(&mut all)?;
            let change = |one: WantedOptions| {
                let changes = ReopenChanges {
                    writable: None,
                    active: None,
                    children: one.children,
                    options: Some(one.options),
                };
                (one.name, changes)
            };
            all.into_iter().map(change).collect::<Vec<_>>()
        };
        let below = self.all_below(&changes);
        let change = GraphChange::reopening(changes).noted();
        let done = change.apply(self).await;
        if done.is_ok() {
            self.drop_unused(&below).await;
        }
        done
    }

    /// What some nodes stand on.
    fn all_below(&self, changes: &[(String, ReopenChanges)]) -> Vec<String> {
        let state = self.lock();
        let below = changes
            .iter()
            .flat_map(|(name, _)| state.with_below(name).into_iter().skip(1));
        below.map(str::to_owned).collect()
    }
}

impl GraphState {
    /// What options say of a node, and of those below it that were opened with it.
    fn gather(&self, name: &str, mut options: Options, all: &mut Vec<WantedOptions>) -> Result<()> {
        if let Some(active) = options.take_bool("active")?
            && active == self.is_inactive(name)
        {
            return Err(cannot_change("active"));
        }
        let mut below = Vec::new();
        for role in ROLES {
            let group = options.take_group(role);
            if group.is_empty() {
                continue;
            }
            let child = self.uses.by_as(name, role).map(|one| one.node.clone());
            let child = child.filter(|child| self.is_part_of(child, name));
            let Some(child) = child else {
                return Err(cannot_change(&format!("{role}.driver")));
            };
            let other_name = group
                .get_text("node-name")
                .is_some_and(|name| name != child);
            if other_name {
                return Err(cannot_change("node-name"));
            }
            if role != "backing" && child.starts_with(MADE_UP) {
                self.check_part(&child, &group)?;
                options.set_group(role, group);
            } else {
                options.set_text(role, &*child);
                below.push((child, group));
            }
        }
        all.retain(|one| one.name != name);
        all.push(WantedOptions {
            name: name.to_owned(),
            options,
            children: Vec::new(),
        });
        for (child, group) in below {
            self.gather(&child, group, all)?;
        }
        Ok(())
    }

    /// Refuses to change what cannot change of a node that only the one above it knows.
    fn check_part(&self, name: &str, new: &Options) -> Result<()> {
        let node = self.nodes.get(name).ok_or_else(|| unknown_node(name))?;
        let driver = node.opened.driver;
        if new.get_text("driver").is_some_and(|new| new != driver.name) {
            return Err(cannot_change("driver"));
        }
        match &node.origin {
            Some(origin) => check_options(driver, &origin.options, new),
            None => Ok(()),
        }
    }

    fn check_wanted(&self, all: &mut [WantedOptions]) -> Result<()> {
        for at in 0..all.len() {
            let one = all[at].clone();
            let driver = self.nodes[&one.name].opened.driver;
            self.check_not_watched(&one.name)?;
            if one
                .options
                .get_text("driver")
                .is_some_and(|new| new != driver.name)
            {
                return Err(cannot_change("driver"));
            }
            if !driver.is_reopened {
                return Err(invalid(format!(
                    "Block format '{}' used by node '{}' does not support reopening files",
                    driver.name, one.name
                )));
            }
            if let Some(origin) = &self.nodes[&one.name].origin {
                check_options(driver, &origin.options, &one.options)?;
            }
            for role in ROLES {
                self.check_child(at, role, driver, all)?;
            }
        }
        for at in 0..all.len() {
            self.check_users(&all[at], all)?;
        }
        Ok(())
    }

    /// Looks at what a node is to stand on by a role, and notes it.
    fn check_child(
        &self,
        at: usize,
        role: &str,
        driver: DriverFacts,
        all: &mut [WantedOptions],
    ) -> Result<()> {
        let name = all[at].name.clone();
        let current = self.uses.by_as(&name, role).map(|one| one.node.clone());
        let wanted = match all[at].options.take(role) {
            None if role == "backing" && driver.name == "qcow2" => {
                if current.is_some() || self.names_backing(&name) {
                    return Err(invalid(format!("backing is missing for '{name}'")));
                }
                None
            }
            // A part of the node, or nothing.
            None => return Ok(()),
            Some(Scalar::Null) => None,
            Some(value) => Some(text(&value)),
        };
        if let Some(below) = &wanted {
            if !self.nodes.contains_key(below) {
                return Err(unknown_node(below));
            }
            let may_differ = role == "backing" || role == "file" && driver.changes_file;
            if current.as_ref() != Some(below) && !may_differ {
                return Err(cannot_change(role));
            }
        }
        match (&wanted, role) {
            // What only the node knows is described by its options.
            (Some(below), "file") if below.starts_with(MADE_UP) => self.describe_part(&name, all),
            _ => all[at].children.push((role.to_owned(), wanted)),
        }
        Ok(())
    }

    /// Has a node keep its file as that was described.
    fn describe_part(&self, name: &str, all: &mut [WantedOptions]) {
        let origin = self.nodes.get(name).and_then(|node| node.origin.clone());
        if let Some(origin) = origin
            && let Some(one) = all.iter_mut().find(|one| one.name == name)
        {
            one.options
                .set_group("file", origin.options.clone().take_group("file"));
        }
    }

    fn names_backing(&self, name: &str) -> bool {
        let device = self.nodes.get(name).and_then(|node| node.device.clone());
        let kind = self.nodes.get(name).map(|node| &node.opened.kind);
        let device = device.or(match kind {
            Some(NodeKind::Device(device)) => Some(device.clone()),
            _ => None,
        });
        device.is_some_and(|device| {
            let image = device.as_qcow2();
            image.is_some_and(|image| image.header().backing_file.is_some())
        })
    }

    /// Refuses to make a node read-only to which somebody writes.
    fn check_users(&self, one: &WantedOptions, all: &[WantedOptions]) -> Result<()> {
        let is_read_only = |name: &str| {
            let wanted = all.iter().find(|one| one.name == name);
            wanted.is_some_and(|one| {
                let value = one.options.iter().find(|(key, _)| *key == "read-only");
                value
                    .is_some_and(|(_, value)| matches!(text(value).as_str(), "on" | "true" | "yes"))
            })
        };
        if !is_read_only(&one.name) {
            return Ok(());
        }
        // What becomes read-only too is asked for its own users.
        let stays = |user: &Use| !matches!(&user.user, User::Node(above) if is_read_only(above));
        match self.is_written(&one.name, stays) {
            true => Err(invalid(format!(
                "Read-only block node '{}' cannot support read-write users",
                one.name
            ))),
            false => Ok(()),
        }
    }
}
