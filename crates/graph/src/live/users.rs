//! Who stands on a node, and whether it can be exchanged, or opened anew, under them.

use std::sync::Arc;

use vellum::Result;
use vellum::nodes::Link;
use vellum_storage::file::FileStorage;

use crate::live::node::Node;
use crate::live::state::GraphState;
use crate::live::uses::{Use, User};
use crate::node::errors::{MADE_UP, busy, invalid, not_exchangeable, unknown_node};

impl GraphState {
    /// The links of a node's users but some.
    pub(crate) fn links(&self, name: &str, spared: &[User]) -> Result<Vec<(u64, Arc<Link>)>> {
        if !self.nodes.contains_key(name) {
            return Err(unknown_node(name));
        }
        let users = self.uses.of(name);
        let users = users.filter(|one| !spared.contains(&one.user));
        let link = |one: &Use| Some((one.id, one.link.clone()?));
        Ok(users.filter_map(link).collect())
    }

    pub(crate) fn jobs(&self) -> Vec<User> {
        let users = self.uses.iter().map(|one| &one.user);
        users.filter(|user| user.is_job()).cloned().collect()
    }

    /// Refuses a node that a job works on, or another image stands on.
    pub(crate) fn check_free(&self, name: &str) -> Result<()> {
        // As in QEMU, of several who are in the way the last one is told.
        busy(name, self.uses.of(name).filter_map(Use::blocker).last())
    }

    /// Refuses a node that a job works on.
    pub(crate) fn check_no_job(&self, name: &str) -> Result<()> {
        busy(name, self.uses.of(name).find_map(Use::job))
    }

    /// Refuses a node that a job works on, but for the target of a mirror, to which the job has a link.
    pub(crate) fn check_not_watched(&self, name: &str) -> Result<()> {
        let mut uses = self.uses.of(name).filter(|one| !one.is_target_of_mirror());
        busy(name, uses.find_map(Use::job))
    }

    /// Why nothing new can stand on a node whose content a job is changing: it would not
    /// stay what it was.
    pub(crate) fn changed_by_job(&self, name: &str) -> Option<String> {
        let users = self.uses.of(name);
        let mut changing = users.filter(|one| one.wanted.changes.content);
        changing.find_map(Use::job)
    }

    /// The nodes that stand on some without a link, by whatever is between, and these, from the top
    /// down: they are opened anew together.
    pub(crate) fn standing_directly(&self, names: &[String]) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        for name in names {
            if !all.contains(name) {
                all.push(name.clone());
            }
        }
        let mut at = 0;
        while let Some(below) = all.get(at).cloned() {
            for (above, _) in self.direct_users(&below) {
                if !all.contains(&above) {
                    all.push(above);
                }
            }
            at += 1;
        }
        self.top_down(all)
    }

    /// The nodes that stand on one without a link, and what it is to them.
    pub(crate) fn direct_users(&self, name: &str) -> Vec<(String, String)> {
        let direct = |one: &Use| match (&one.user, &one.link) {
            (User::Node(above), None) => Some((above.clone(), one.wanted.role.clone())),
            _ => None,
        };
        self.uses.of(name).filter_map(direct).collect()
    }

    /// Refuses a node on which others stand without a link.
    pub(crate) fn check_exchangeable(&self, name: &str) -> Result<()> {
        match self.direct_users(name).first() {
            None => Ok(()),
            Some((_, role)) => Err(not_exchangeable(name, role)),
        }
    }

    /// Refuses nodes that cannot be opened anew: a job works with them, or they belong to the one
    /// above alone. `but`: one that stays as it is.
    pub(crate) fn check_reopenable(&self, names: &[String], but: Option<&str>) -> Result<()> {
        self.check_all_shown(names)?;
        for name in names {
            let node = self.nodes.get(name).ok_or_else(|| unknown_node(name))?;
            if node.front.is_some() {
                // Whoever put something there works with the device that would be closed.
                self.check_no_job(name)?;
            }
            self.check_past_below(name)?;
            let users = self.direct_users(name);
            if name.starts_with(MADE_UP)
                && let Some((_, role)) = users.first()
            {
                return Err(not_exchangeable(name, role));
            }
            if but != Some(name.as_str()) && node.origin.is_none() {
                return Err(invalid(format!("Node '{name}' cannot be opened anew")));
            }
        }
        Ok(())
    }

    /// The children of some nodes that were opened with them, and have names of their own: what
    /// these do not say they inherit.
    pub(crate) fn with_own_children(&self, names: &[String]) -> Vec<String> {
        let mut all = names.to_vec();
        let mut at = 0;
        while let Some(name) = all.get(at).cloned() {
            for one in self.uses.by(&name) {
                if self.inherits(&one.node, &name, &one.wanted.role)
                    && !one.node.starts_with(MADE_UP)
                    && !all.contains(&one.node)
                {
                    all.push(one.node.clone());
                }
            }
            at += 1;
        }
        all
    }

    /// Some nodes, and the filters that lead from one of them to another.
    pub(crate) fn with_filters_between(&self, names: &[String]) -> Vec<String> {
        let mut all = names.to_vec();
        for name in names {
            for below in self.with_below(name) {
                let is_filter = self.nodes.get(below).is_some_and(Node::is_filter_driver);
                let leads_on = || {
                    let mut further = self.with_below(below).into_iter();
                    further.any(|node| names.iter().any(|name| name == node))
                };
                let is_in = all.iter().any(|name| name == below);
                if is_filter && !is_in && leads_on() {
                    all.push(below.to_owned());
                }
            }
        }
        all
    }

    /// Whether a node was opened as a part of the one above it.
    pub(crate) fn inherits(&self, name: &str, above: &str, role: &str) -> bool {
        role != "backing" && self.is_part_of(name, above)
    }

    /// Whether the options of a node described the one below it too.
    pub(crate) fn is_part_of(&self, name: &str, above: &str) -> bool {
        let owner = |name: &str| self.nodes.get(name).map(|node| node.owner.as_str());
        owner(name) == owner(above) && owner(name) != Some(name)
    }

    /// The open files of a node and of those that only it knows.
    pub(crate) fn files_of(&self, name: &str) -> Vec<Arc<FileStorage>> {
        let Some(node) = self.nodes.get(name) else {
            return Vec::new();
        };
        let mut files: Vec<_> = node
            .opened
            .files
            .iter()
            .map(|one| one.file.clone())
            .collect();
        for one in self.uses.by(name) {
            if one.wanted.role != "backing" && one.node.starts_with(MADE_UP) {
                files.extend(self.files_of(&one.node));
            }
        }
        files
    }

    /// Whether a node is not open, since it could neither be opened anew nor as it was.
    pub(crate) fn is_lost(&self, name: &str) -> bool {
        self.nodes.get(name).is_some_and(|node| node.is_lost)
    }

    /// Notes that a node could neither be opened anew nor as it was. It goes on standing on what was below
    /// it and is still there; without links, so that it is opened anew with that.
    pub(crate) fn note_lost(&mut self, name: &str, below: &[Use]) {
        if let Some(node) = self.nodes.get_mut(name) {
            node.is_lost = true;
        }
        for one in below {
            if self.nodes.contains_key(&one.node) {
                self.uses.add(Use {
                    link: None,
                    ..one.clone()
                });
            }
        }
    }

    /// Forgets what a node stands on: the uses, and files that only it knows.
    pub(crate) fn forget_below(&mut self, name: &str) {
        let below = self.uses.by(name);
        let below: Vec<_> = below
            .map(|one| (one.node.clone(), one.wanted.role.clone()))
            .collect();
        self.uses.remove_by(name);
        for (below, role) in below {
            if role != "backing" && below.starts_with(MADE_UP) {
                self.forget_below(&below);
                self.nodes.remove(&below);
            }
        }
    }
}

impl GraphState {
    /// Refuses to open a node anew with what only it knows, if that would begin a second time.
    pub(crate) fn check_past_below(&self, name: &str) -> Result<()> {
        let below = self.uses.by(name);
        for one in below.filter(|one| one.node.starts_with(MADE_UP)) {
            let driver = self.nodes.get(&one.node).map(|node| node.opened.driver);
            if let Some(driver) = driver.filter(|driver| driver.has_past) {
                let why = format!(
                    "the '{}' node below it has no name to be kept by",
                    driver.name
                );
                return busy(name, Some(why));
            }
            self.check_past_below(&one.node)?;
        }
        Ok(())
    }
}
