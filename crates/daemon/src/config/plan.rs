//! [`plan`]: the smallest set of requests that leads from parts in force to those that are wanted.
//!
//! What belongs together is a *change*: a disk that is made anew, the exports that it has, disks that
//! stand on it. If a step of a change fails, its steps are undone, and others go on. Steps of all changes
//! come in one order, so that what one gives up (a name, a socket, the lock of a file) is free for
//! another: limits are made and changed, exports go, disks go, the server changes, disks are opened
//! anew and made, exports are made, limits go.
//!
//! Invariants:
//! - A part that is the same in both, and stands on nothing that goes, is in no step.
//! - A step that is undone in the reverse order leads back to what was in force.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::{Map, Value, json};
use vellum_graph::change::may_change;

use super::parts::{Part, PartKey, PartKind, Parts};
use super::place::Place;

/// What is asked of the daemon.
#[derive(Debug, Clone)]
pub enum Request {
    /// To make a part.
    Make(Part),
    /// To have the part of this name be so from now on.
    Change(Part),
    /// To take the part of this name away.
    Remove(PartKey),
}

impl Request {
    /// The part that it is about.
    pub fn key(&self) -> &PartKey {
        match self {
            Request::Make(part) | Request::Change(part) => &part.key,
            Request::Remove(key) => key,
        }
    }

    /// The command of QMP that does the same.
    pub fn command(&self) -> &'static str {
        match (self, self.key().kind) {
            (Request::Make(_), PartKind::Secret | PartKind::Throttle) => "object-add",
            (Request::Make(_), PartKind::Server) => "nbd-server-start",
            (Request::Make(_), PartKind::Disk) => "blockdev-add",
            (Request::Make(_), PartKind::Export) => "block-export-add",
            (Request::Change(_), PartKind::Throttle) => "qom-set",
            (Request::Change(_), _) => "blockdev-reopen",
            (Request::Remove(_), PartKind::Secret | PartKind::Throttle) => "object-del",
            (Request::Remove(_), PartKind::Server) => "nbd-server-stop",
            (Request::Remove(_), PartKind::Disk) => "blockdev-del",
            (Request::Remove(_), PartKind::Export) => "block-export-del",
            (_, PartKind::Chain) => "x-vellum-set-chain-policy",
        }
    }
}

impl fmt::Display for Request {
    /// As a client of QMP would send it, if it makes a part.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Request::Make(part) => {
                let request = json!({"execute": self.command(), "arguments": part.arguments});
                write!(f, "{request}")
            }
            Request::Change(_) | Request::Remove(_) => {
                write!(f, "{} of {}", self.command(), self.key())
            }
        }
    }
}

/// A request, and how it is undone.
#[derive(Debug, Clone)]
pub struct Step {
    /// What is asked for.
    pub request: Request,
    /// What is asked for to take it back.
    pub undo: Request,
    /// The number of the change.
    pub change: usize,
    /// Where the part stands in the file, unless it does not any more.
    pub place: Option<Place>,
}

/// What becomes of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Kept,
    Added,
    Removed,
    /// It is told of what is different.
    Changed,
    /// It goes and comes.
    Replaced,
}

/// The steps from `old` to `new`.
pub fn plan(old: &Parts, new: &Parts) -> Vec<Step> {
    let fates = fates(old, new);
    let changes = changes(old, new, &fates);
    let planner = Planner {
        old,
        new,
        fates,
        changes,
    };
    planner.steps()
}

struct Planner<'a> {
    old: &'a Parts,
    new: &'a Parts,
    fates: BTreeMap<PartKey, Fate>,
    changes: BTreeMap<PartKey, usize>,
}

fn fates(old: &Parts, new: &Parts) -> BTreeMap<PartKey, Fate> {
    let keys: BTreeSet<&PartKey> = old.keys().chain(new.keys()).collect();
    let fate = |key: &PartKey| match (old.get(key), new.get(key)) {
        (Some(was), Some(part)) if was.is_like(part) => Fate::Kept,
        (Some(was), Some(part)) if can_change(was, part) => Fate::Changed,
        (Some(_), Some(_)) => Fate::Replaced,
        (Some(_), None) => Fate::Removed,
        (None, _) => Fate::Added,
    };
    let mut fates: BTreeMap<PartKey, Fate> = keys
        .into_iter()
        .map(|key| (key.clone(), fate(key)))
        .collect();
    loop {
        let stands_on_what_goes = |key: &PartKey| {
            let parts = [old.get(key), new.get(key)].into_iter().flatten();
            let mut needs = parts.flat_map(|part| &part.needs);
            needs.any(|below| {
                is_held(below) && matches!(fates.get(below), Some(Fate::Replaced | Fate::Removed))
            })
        };
        let found = fates.iter().find(|(key, fate)| {
            matches!(fate, Fate::Kept | Fate::Changed) && stands_on_what_goes(key)
        });
        let Some((key, _)) = found else {
            return fates;
        };
        fates.insert(key.clone(), Fate::Replaced);
    }
}

/// Whether a part cannot go while others stand on it. Secrets are read once; limits are changed in
/// their place, and go when nobody keeps them.
fn is_held(key: &PartKey) -> bool {
    matches!(key.kind, PartKind::Disk | PartKind::Server)
}

/// Whether a part can be told of what is different.
fn can_change(was: &Part, part: &Part) -> bool {
    match part.key.kind {
        PartKind::Throttle => true,
        PartKind::Disk => can_reopen(&was.arguments, &part.arguments),
        PartKind::Secret | PartKind::Server | PartKind::Chain | PartKind::Export => false,
    }
}

/// Whether only options differ that `blockdev-reopen` changes.
fn can_reopen(was: &Map<String, Value>, node: &Map<String, Value>) -> bool {
    let driver = node
        .get("driver")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let keys: BTreeSet<&String> = was.keys().chain(node.keys()).collect();
    keys.into_iter()
        .all(|key| match (was.get(key), node.get(key)) {
            (was, now) if was == now => true,
            // The node below, which is described here too.
            (Some(Value::Object(was)), Some(Value::Object(now))) if now.contains_key("driver") => {
                can_reopen(was, now)
            }
            (was, now) => {
                let inside = [was, now]
                    .into_iter()
                    .flatten()
                    .filter_map(Value::as_object);
                let mut inside = inside.flat_map(Map::keys).peekable();
                let is_fixed = matches!(key.as_str(), "driver" | "node-name");
                match inside.peek() {
                    _ if is_fixed => false,
                    None => may_change(driver, key),
                    Some(_) => inside.all(|member| may_change(driver, &format!("{key}.{member}"))),
                }
            }
        })
}

/// The number of the change that each part which is not kept belongs to.
fn changes(old: &Parts, new: &Parts, fates: &BTreeMap<PartKey, Fate>) -> BTreeMap<PartKey, usize> {
    let moving: Vec<&PartKey> = fates
        .iter()
        .filter(|(_, fate)| **fate != Fate::Kept)
        .map(|(key, _)| key)
        .collect();
    // What is new leaves nothing behind that would have to come back.
    let had = |key: &PartKey| fates.get(key).is_some_and(|fate| *fate != Fate::Added);
    let mut changes: BTreeMap<PartKey, usize> = moving
        .iter()
        .enumerate()
        .map(|(at, key)| ((*key).clone(), at))
        .collect();
    for key in moving.iter().filter(|key| had(key)) {
        let parts = [old.get(key), new.get(key)].into_iter().flatten();
        for below in parts
            .flat_map(|part| &part.needs)
            .filter(|below| is_held(below) && had(below))
        {
            if let (Some(&one), Some(&other)) = (changes.get(*key), changes.get(below)) {
                let (low, high) = (one.min(other), one.max(other));
                changes
                    .values_mut()
                    .filter(|at| **at == high)
                    .for_each(|at| *at = low);
            }
        }
    }
    changes
}

impl Planner<'_> {
    fn steps(&self) -> Vec<Step> {
        let old: Vec<&Part> = self.old.in_order();
        let new: Vec<&Part> = self.new.in_order();
        let mut steps = Vec::new();
        let making = |kinds: &[PartKind], steps: &mut Vec<Step>| {
            let wanted = new.iter().filter(|part| kinds.contains(&part.key.kind));
            steps.extend(wanted.filter_map(|part| self.making(part)));
        };
        let removing = |kinds: &[PartKind], steps: &mut Vec<Step>| {
            let gone = old
                .iter()
                .rev()
                .filter(|part| kinds.contains(&part.key.kind));
            steps.extend(gone.filter_map(|part| self.removing(part)));
        };
        let changing = |kind: PartKind, steps: &mut Vec<Step>| {
            let changed = new.iter().filter(|part| part.key.kind == kind);
            steps.extend(changed.filter_map(|part| self.changing(part)));
        };
        // A secret of the same name goes first: it is no longer looked at.
        let replaced = old.iter().filter(|part| part.key.kind == PartKind::Secret);
        let replaced = replaced.filter(|part| self.fate(part) == Fate::Replaced);
        steps.extend(replaced.filter_map(|part| self.removing(part)));
        making(&[PartKind::Secret, PartKind::Throttle], &mut steps);
        changing(PartKind::Throttle, &mut steps);
        removing(&[PartKind::Export], &mut steps);
        removing(&[PartKind::Chain], &mut steps);
        removing(&[PartKind::Disk], &mut steps);
        removing(&[PartKind::Server], &mut steps);
        making(&[PartKind::Server], &mut steps);
        changing(PartKind::Disk, &mut steps);
        making(&[PartKind::Disk], &mut steps);
        making(&[PartKind::Chain], &mut steps);
        making(&[PartKind::Export], &mut steps);
        let last = old
            .iter()
            .rev()
            .filter(|part| self.fate(part) == Fate::Removed);
        let last =
            last.filter(|part| matches!(part.key.kind, PartKind::Secret | PartKind::Throttle));
        steps.extend(last.filter_map(|part| self.removing(part)));
        steps
    }

    fn fate(&self, part: &Part) -> Fate {
        self.fates.get(&part.key).copied().unwrap_or(Fate::Kept)
    }

    fn step(&self, request: Request, undo: Request) -> Step {
        let key = request.key();
        Step {
            change: self.changes.get(key).copied().unwrap_or_default(),
            place: self.new.get(key).map(|part| part.place),
            request,
            undo,
        }
    }

    fn making(&self, part: &Part) -> Option<Step> {
        let is_made = matches!(self.fate(part), Fate::Added | Fate::Replaced);
        let (make, remove) = (
            Request::Make(part.clone()),
            Request::Remove(part.key.clone()),
        );
        is_made.then(|| self.step(make, remove))
    }

    fn removing(&self, part: &Part) -> Option<Step> {
        let is_removed = matches!(self.fate(part), Fate::Removed | Fate::Replaced);
        let (make, remove) = (
            Request::Make(part.clone()),
            Request::Remove(part.key.clone()),
        );
        is_removed.then(|| self.step(remove, make))
    }

    fn changing(&self, part: &Part) -> Option<Step> {
        let was = self.old.get(&part.key)?;
        let (change, back) = (Request::Change(part.clone()), Request::Change(was.clone()));
        (self.fate(part) == Fate::Changed).then(|| self.step(change, back))
    }
}
