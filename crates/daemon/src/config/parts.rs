//! What a configuration consists of: parts, each made by one command.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::{Map, Value};

use super::place::Place;

/// What a part is, in the order in which parts are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PartKind {
    /// A secret.
    Secret,
    /// A group of limits.
    Throttle,
    /// The NBD server.
    Server,
    /// A disk: the node of its name.
    Disk,
    /// What the backing chain of a disk may be.
    Chain,
    /// An export of a disk.
    Export,
}

/// A part by its kind and its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartKey {
    /// What it is.
    pub kind: PartKind,
    /// How it is called; the NBD server has no name.
    pub name: String,
}

impl PartKey {
    /// The part of a kind and a name.
    pub fn new(kind: PartKind, name: impl Into<String>) -> PartKey {
        PartKey {
            kind,
            name: name.into(),
        }
    }

    /// The NBD server.
    pub fn server() -> PartKey {
        PartKey::new(PartKind::Server, "")
    }
}

impl fmt::Display for PartKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match self.kind {
            PartKind::Secret => write!(f, "secret '{name}'"),
            PartKind::Throttle => write!(f, "throttle group '{name}'"),
            PartKind::Server => write!(f, "the NBD server"),
            PartKind::Disk => write!(f, "disk '{name}'"),
            PartKind::Chain => write!(f, "the chain of disk '{name}'"),
            PartKind::Export => write!(f, "export '{name}'"),
        }
    }
}

/// A part of a configuration.
#[derive(Debug, Clone)]
pub struct Part {
    /// What it is.
    pub key: PartKey,
    /// The arguments of the command that makes it, as QMP has them.
    pub arguments: Map<String, Value>,
    /// The parts that it stands on.
    pub needs: BTreeSet<PartKey>,
    /// Where it stands in the file.
    pub place: Place,
}

impl Part {
    /// Whether it is made as another one is.
    pub fn is_like(&self, other: &Part) -> bool {
        self.key == other.key && self.arguments == other.arguments
    }
}

/// Parts by their names.
#[derive(Debug, Clone, Default)]
pub struct Parts(BTreeMap<PartKey, Part>);

impl Parts {
    /// The part of a name.
    pub fn get(&self, key: &PartKey) -> Option<&Part> {
        self.0.get(key)
    }

    /// Puts a part in; one of the same name goes.
    pub fn put(&mut self, part: Part) {
        self.0.insert(part.key.clone(), part);
    }

    /// Takes a part out.
    pub fn remove(&mut self, key: &PartKey) {
        self.0.remove(key);
    }

    /// Notes where parts stand that are as they are in `others`: places move with every line above.
    pub(super) fn move_to(&mut self, others: &Parts) {
        for (key, part) in &mut self.0 {
            if let Some(other) = others.get(key).filter(|other| other.is_like(part)) {
                part.place = other.place;
            }
        }
    }

    /// Whether others stand on a part.
    pub(super) fn is_needed(&self, key: &PartKey) -> bool {
        self.0.values().any(|part| part.needs.contains(key))
    }

    /// Leaves out what is not among `others`, but for exports.
    pub fn leave_out_missing(&mut self, others: &Parts) {
        self.0
            .retain(|key, _| key.kind == PartKind::Export || others.get(key).is_some());
    }

    /// All but those of a kind.
    pub fn without(&self, kind: PartKind) -> Parts {
        let mut others = self.clone();
        others.0.retain(|key, _| key.kind != kind);
        others
    }

    /// The names of all, in the order of kinds.
    pub fn keys(&self) -> impl Iterator<Item = &PartKey> {
        self.0.keys()
    }

    /// All of them, each after those that it stands on.
    pub fn in_order(&self) -> Vec<&Part> {
        let mut ordered = Vec::with_capacity(self.0.len());
        let mut seen = BTreeSet::new();
        // What is to be looked at, and whether what it stands on was.
        let mut next: Vec<(&PartKey, bool)> = self.0.keys().rev().map(|key| (key, false)).collect();
        while let Some((key, is_ready)) = next.pop() {
            let Some(part) = self.0.get(key) else {
                continue;
            };
            if is_ready {
                ordered.push(part);
            } else if seen.insert(key) {
                next.push((key, true));
                next.extend(part.needs.iter().rev().map(|key| (key, false)));
            }
        }
        ordered
    }

    /// A part that stands on itself, by whatever is between.
    pub(super) fn circle(&self) -> Option<&Part> {
        self.0.values().find(|part| {
            let mut reached: BTreeSet<&PartKey> = part.needs.iter().collect();
            let mut next: Vec<&PartKey> = reached.iter().copied().collect();
            while let Some(key) = next.pop() {
                let below = self.0.get(key).into_iter().flat_map(|part| &part.needs);
                next.extend(below.filter(|key| reached.insert(key)));
            }
            reached.contains(&part.key)
        })
    }
}
