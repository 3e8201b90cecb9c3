//! Whether what users want of nodes goes together: also what they want by way of the nodes that lie
//! between.
//!
//! Whoever wants something of a node wants it of what that node stands on too, as far as
//! [`Passes`] says. So a use has two sides: what its user wants itself ([`Use::wanted`]), and what
//! those want who reach the node through it.
//!
//! Invariants:
//! - Of the users of one node none changes what another one needs to stay as it is, whichever
//!   way they reach it; who would is refused, and what was noted of him is gone.
//! - Nothing is wanted through an inactive node: nobody changes it, or relies on it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use vellum::nodes::Link;
use vellum::{Error, ErrorKind, Result};

use crate::live::nodes::Nodes;
use crate::live::state::GraphState;
use crate::live::uses::{Changes, Keeps, Passes, Use, User};
use crate::node::driver::DriverFacts;
use crate::node::errors::{MADE_UP, busy, cycle, invalid_target};
use crate::node::place::NodePlace;

/// What the users of a node want, for what it stands on.
#[derive(Debug, Clone, Copy, Default)]
struct Reach {
    changes: Changes,
    keeps: Changes,
    /// Whether what it stands on by its backing file has to stay what it reads as.
    keeps_backing: bool,
    is_used: bool,
}

impl Reach {
    fn add(&mut self, one: &Use) {
        self.changes = self.changes.or(one.wanted.changes);
        self.keeps = self.keeps.or(one.kept_below());
        self.keeps_backing |= one.kept_below().content && one.keeps_below != Keeps::Files;
        self.is_used = true;
    }

    /// What of it reaches what is below a use of that kind.
    fn through(self, passes: Passes) -> (Changes, Changes) {
        let (changes, keeps) = (self.changes, self.keeps);
        match passes {
            Passes::All => (changes, keeps),
            Passes::AllAndKeeps if self.is_used => (changes, Changes::ALL),
            Passes::AllAndKeeps | Passes::Nothing => (Changes::NONE, Changes::NONE),
            // Whoever needs content to stay needs all that it is made of.
            Passes::Reading if self.keeps_backing => (Changes::NONE, Changes::ALL),
            Passes::Reading => (Changes::NONE, Changes::NONE),
        }
    }
}

impl GraphState {
    /// Notes a use, and numbers it.
    ///
    /// # Errors
    /// If it gets in the way of others, or makes nodes stand on each other in a circle.
    pub(crate) fn add_use(&mut self, new: Use) -> Result<u64> {
        self.check_no_cycle(&new.user, &new.node, &new.wanted.role)?;
        let id = self.uses.add(new);
        if let Err(error) = self.check_use(id) {
            self.uses.remove(id);
            return Err(error);
        }
        Ok(id)
    }

    /// As [`GraphState::add_use`], for a node that is opened at `place`.
    pub(crate) fn add_use_at(&mut self, place: &NodePlace, new: Use) -> Result<u64> {
        match place.reverts {
            true => Ok(self.uses.add(new)),
            false => self.add_use(new),
        }
    }

    /// Changes a use; if that gets in the way of others, it stays as it was.
    pub(crate) fn change_use(&mut self, id: u64, change: impl FnOnce(&mut Use)) -> Result<()> {
        let Some(one) = self.uses.get_mut(id) else {
            return Ok(());
        };
        let old = one.clone();
        change(one);
        let checked = self.check_use(id);
        if checked.is_err()
            && let Some(one) = self.uses.get_mut(id)
        {
            *one = old;
        }
        checked
    }

    /// Whether a node is another one, or stands on it, whatever the nodes in between are to each other.
    pub(crate) fn stands_on(&self, name: &str, other: &str) -> bool {
        name == other || self.with_below(name).contains(&other)
    }

    /// Refuses to have a user use a node that stands on the user.
    pub(crate) fn check_no_cycle(&self, user: &User, node: &str, role: &str) -> Result<()> {
        let User::Node(above) = user else {
            return Ok(());
        };
        // No node stands on one that has no users, which spares most openings the walk.
        let is_used = self.uses.of(above).next().is_some();
        match above == node || is_used && self.stands_on(node, above) {
            true => Err(cycle(node, above, role)),
            false => Ok(()),
        }
    }

    /// As [`GraphState::check_no_cycle`], for users that are about to be switched to a node.
    pub(crate) fn check_led(&self, links: &[(u64, Arc<Link>)], node: &str) -> Result<()> {
        links
            .iter()
            .try_for_each(|(id, _)| self.check_led_one(*id, node))
    }

    /// As [`GraphState::check_led`], for one use.
    pub(crate) fn check_led_one(&self, id: u64, node: &str) -> Result<()> {
        match self.uses.get(id) {
            Some(one) => self.check_no_cycle(&one.user, node, &one.wanted.role),
            None => Ok(()),
        }
    }

    /// Refuses a node as the target of a job that copies `source` there, if what is written to the one changes
    /// what the other one, or an image that stands on the target, shows. Filters and formats in between make no
    /// difference.
    fn check_target(&self, target: &str, source: &str) -> Result<()> {
        let is_written = |from: &str, to: &str| self.written_with(from).contains(&to);
        if is_written(target, source) || is_written(source, target) {
            return Err(invalid_target(target, source));
        }
        for name in self.changed_with(target) {
            let mut uses = self.uses.of(name);
            busy(target, uses.find_map(Use::backing_blocker))?;
        }
        Ok(())
    }

    /// A node, and those by way of which it is written, which are all that it stands on but backing files.
    fn written_with<'a>(&'a self, name: &'a str) -> Vec<&'a str> {
        let not_backing = |one: &&Use| one.wanted.role != "backing";
        reached(name, |above| {
            let below = self.uses.by(above).filter(not_backing);
            below.map(|one| one.node.as_str()).collect()
        })
    }

    /// The nodes that are as long as one that they stand on, and note that as they are opened: as in QEMU they
    /// follow it to another size. Those below a node that has to keep its size are left out.
    pub(crate) fn following_size(&self, name: &str) -> Vec<String> {
        let has_driver = |name: &str, is_wanted: fn(&DriverFacts) -> bool| {
            let node = self.nodes.get(name);
            node.is_some_and(|node| is_wanted(&node.opened.driver))
        };
        let can_be_reopened = |name: &&str| {
            let together = self.standing_directly(&[(*name).to_owned()]);
            let mut together = together.iter();
            together.all(|one| has_driver(one, |it| it.follows_size || it.name == "throttle"))
        };
        // What only the node above knows is opened with that.
        let is_part = name.starts_with(MADE_UP);
        let above = self.changed_with(name).into_iter().skip(1);
        let above = above.filter(|_| !is_part);
        let following = above.filter(|one| has_driver(one, |it| it.follows_size));
        following
            .filter(can_be_reopened)
            .map(str::to_owned)
            .collect()
    }

    /// A node, and those that stand on it by anything but their backing files: they show what is written
    /// there.
    fn changed_with<'a>(&'a self, name: &'a str) -> Vec<&'a str> {
        reached(name, |below| {
            let above = self.uses.of(below).filter_map(|one| match &one.user {
                User::Node(above) if one.wanted.role != "backing" => Some(above.as_str()),
                _ => None,
            });
            above.collect()
        })
    }

    /// Refuses what a use wants, of its node and of those below, where it gets in the way of others.
    fn check_use(&self, id: u64) -> Result<()> {
        let Some(one) = self.uses.get(id) else {
            return Ok(());
        };
        // An export keeps the size only once it is there, which shows in what is told.
        let change_first = matches!(one.user, User::Export(_));
        let mut known = BTreeMap::new();
        let mut reached: BTreeMap<u64, (Changes, Changes)> = BTreeMap::new();
        let mut todo = VecDeque::from([self.seen_by_others(one, &mut known)]);
        while let Some(one) = todo.pop_front() {
            let keeps = one.wanted.keeps.or(one.kept_below());
            // Whoever only reads is in nobody's way, and a backing file has many who do.
            if (one.wanted.changes, keeps) == (Changes::NONE, Changes::NONE) {
                continue;
            }
            for other in self.uses.of(&one.node).filter(|other| other.id != one.id) {
                let other = self.seen_by_others(other, &mut known);
                check(&one, &other, change_first || one.id < other.id)?;
            }
            if self.is_inactive(&one.node) {
                continue;
            }
            let mut reach = Reach::default();
            reach.add(&one);
            for child in self.uses.by(&one.node) {
                let (changes, keeps) = reach.through(child.passes);
                let before = reached.entry(child.id).or_default();
                let now = (before.0.or(changes), before.1.or(keeps));
                if std::mem::replace(before, now) != now {
                    let mut below = child.clone();
                    (below.wanted.changes, below.wanted.keeps) = now;
                    todo.push_back(below);
                }
            }
        }
        Ok(())
    }

    /// All uses, each with all that is wanted by way of it.
    pub(crate) fn uses_with_reach(&self) -> Vec<Use> {
        let mut known = BTreeMap::new();
        let uses = self.uses.iter();
        uses.map(|one| self.with_reach(one, &mut known)).collect()
    }

    /// Whether somebody writes to a node, be it by way of others, whose use `counts`.
    pub(crate) fn is_written(&self, name: &str, counts: impl Fn(&Use) -> bool) -> bool {
        let mut known = BTreeMap::new();
        let mut users = self.uses.of(name).filter(|one| counts(one));
        users.any(|one| self.with_reach(one, &mut known).wanted.changes.content)
    }

    /// A use with all that is wanted by way of it. `known` is what was found out before.
    fn with_reach(&self, one: &Use, known: &mut BTreeMap<String, Reach>) -> Use {
        let mut whole = one.clone();
        if let User::Node(above) = &one.user {
            let (changes, keeps) = self.reach(above, known).through(one.passes);
            whole.wanted.changes = whole.wanted.changes.or(changes);
            whole.wanted.keeps = whole.wanted.keeps.or(keeps);
        }
        whole
    }

    /// A use with what others may see of it, and of what is wanted by way of it.
    fn seen_by_others(&self, one: &Use, known: &mut BTreeMap<String, Reach>) -> Use {
        let mut seen = one.clone();
        if one.rewrites {
            seen.wanted.changes = Changes::NONE;
        }
        self.with_reach(&seen, known)
    }

    /// What the users of a node want of what it stands on.
    fn reach(&self, name: &str, known: &mut BTreeMap<String, Reach>) -> Reach {
        if let Some(reach) = known.get(name) {
            return *reach;
        }
        let mut all = vec![name.to_owned()];
        let mut seen = BTreeSet::from([name.to_owned()]);
        let mut at = 0;
        while let Some(below) = all.get(at).cloned() {
            for one in self.uses.of(&below) {
                if let User::Node(above) = &one.user
                    && !known.contains_key(above)
                    && seen.insert(above.clone())
                {
                    all.push(above.clone());
                }
            }
            at += 1;
        }
        let mut last = Reach::default();
        for name in self.top_down(all) {
            last = Reach::default();
            if !self.is_inactive(&name) {
                for one in self.uses.of(&name) {
                    last.add(&self.with_reach(one, known));
                }
            }
            known.insert(name, last);
        }
        // All others stand above it.
        last
    }
}

impl Nodes {
    /// Refuses a node as the target of a backup of `source`, if what is written to the one changes what the other
    /// one shows, or an image that stands on the target.
    ///
    /// # Errors
    /// Says which nodes are in the way.
    pub fn check_backup_target(&self, target: &str, source: &str) -> Result<()> {
        self.lock().check_target(target, source)
    }

    /// As [`Nodes::check_backup_target`], for a mirror, whose users may go on with the target: it must not stand
    /// on the source by its backing file either.
    ///
    /// # Errors
    /// As [`Nodes::check_backup_target`].
    pub fn check_mirror_target(&self, target: &str, source: &str) -> Result<()> {
        let state = self.lock();
        state.check_target(target, source)?;
        match state.stands_on(target, source) {
            true => Err(invalid_target(target, source)),
            false => Ok(()),
        }
    }

    /// The images that stand on a node by their backing files, whatever filters and formats are in between.
    pub fn images_over(&self, name: &str) -> Vec<String> {
        let state = self.lock();
        let changed = state.changed_with(name).into_iter();
        let uses = changed.flat_map(|node| state.uses.of(node));
        let image = |one: &Use| match &one.user {
            User::Node(image) if one.wanted.role == "backing" => Some(image.clone()),
            _ => None,
        };
        uses.filter_map(image).collect()
    }

    /// Has nobody change some of what lies below a node that a job uses, but by that node.
    ///
    /// # Errors
    /// If somebody does.
    pub fn keep_below(&self, id: u64, keeps: Keeps) -> Result<()> {
        self.lock().change_use(id, |one| one.keeps_below = keeps)
    }
}

/// The nodes that are reached from one, itself among them. Each is looked at once.
fn reached<'a>(name: &'a str, next: impl Fn(&'a str) -> Vec<&'a str>) -> Vec<&'a str> {
    let mut all = vec![name];
    let mut known = BTreeSet::from([name]);
    let mut at = 0;
    while let Some(name) = all.get(at).copied() {
        all.extend(next(name).into_iter().filter(|node| known.insert(*node)));
        at += 1;
    }
    all
}

/// Refuses a use that gets in the way of another one. Of two conflicts, one is told: what `new`
/// changes, or else what it keeps. Of two uses the later one is asked first, as in QEMU, what it
/// leaves to the other.
fn check(new: &Use, other: &Use, change_first: bool) -> Result<()> {
    let change = new.wanted.changes.both(other.wanted.keeps);
    let keep = other.wanted.changes.both(new.wanted.keeps);
    let (what, changer, keeper) = match (change, keep) {
        (Some(what), _) if change_first => (what, new, other),
        (_, Some(what)) => (what, other, new),
        (Some(what), None) => (what, new, other),
        (None, None) => return Ok(()),
    };
    let message = format!(
        "Permission conflict on node '{}': permissions '{what}' are both required by {} and \
         unshared by {}.",
        new.node,
        changer.describe(),
        keeper.describe()
    );
    Err(Error::new(ErrorKind::Denied, "use node", message).target(&*new.node))
}

#[cfg(test)]
mod tests {
    use super::super::RequiredAccess;
    use super::*;

    fn one(user: User, node: &str, role: &str, changes: Changes, keeps: Changes) -> Use {
        let wanted = RequiredAccess {
            role: role.into(),
            changes,
            keeps,
        };
        Use::new(user, node, wanted, None)
    }

    #[test]
    fn a_writer_and_one_who_needs_rest_are_told_apart() {
        let export = User::Export("e".into());
        let export = one(export, "n", "root", Changes::CONTENT, Changes::SIZE);
        let id = "j".to_owned();
        let job = User::Job { id, kind: "stream" };
        let role = "intermediate node";
        let job = one(job, "n", role, Changes::NONE, Changes::CONTENT);
        let above = User::Node("above".into());
        let above = one(above, "n", "backing", Changes::NONE, Changes::NONE);
        let expected = "Permission conflict on node 'n': permissions 'write' are both required by \
                        an unnamed block device (uses node 'n' as 'root' child) and unshared by \
                        stream job 'j' (uses node 'n' as 'intermediate node' child).";
        let text = |checked: Result<()>| checked.unwrap_err().message().to_owned();
        assert_eq!(text(check(&job, &export, false)), expected);
        assert_eq!(text(check(&export, &job, true)), expected);
        check(&above, &export, false).unwrap();
        check(&above, &job, false).unwrap();
    }

    /// Each node of a ladder is reached by two ways from the one above it: as many paths as no
    /// walk over all of them would end.
    #[test]
    fn many_ways_to_a_node_are_looked_at_once() {
        let mut state = GraphState::default();
        let none = Changes::NONE;
        for step in 0..64 {
            for side in ["left", "right"] {
                let above = User::Node(step.to_string());
                let below = (step + 1).to_string();
                state.add_use(one(above, &below, side, none, none)).unwrap();
            }
        }
        let writer = User::Export("writer".into());
        let writes = one(writer, "0", "root", Changes::CONTENT, none);
        let id = state.add_use(writes.clone()).unwrap();
        let keeper = User::Export("keeper".into());
        let keeps = one(keeper, "64", "root", none, Changes::CONTENT);
        let refused = state.add_use(keeps.clone()).unwrap_err();
        assert!(refused.message().contains("node '63'"), "{refused}");
        state.uses.remove(id);
        state.add_use(keeps).unwrap();
        state.add_use(writes).unwrap_err();
    }
}
