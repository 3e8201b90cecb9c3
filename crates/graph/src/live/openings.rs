//! [`Openings`]: what is being opened, and the names that are kept for it.

use std::collections::{BTreeMap, BTreeSet};

use crate::live::bases::BaseKey;
use crate::node::opened::NodeKind;

/// What is being opened, by the node that was asked for.
#[derive(Debug, Default)]
pub(crate) struct Openings {
    pub(crate) by_root: BTreeMap<String, PendingNode>,
    /// The names of nodes of which the children are being opened, see [`NameClaim`](super::NameClaim).
    pub(crate) claims: BTreeSet<String>,
    /// What was opened for some that were given up.
    pub(crate) abandoned: Vec<NodeKind>,
}

#[derive(Debug, Default)]
pub(crate) struct PendingNode {
    /// The names that its options give.
    pub(crate) names: BTreeSet<String>,
    /// Backing files that others may stand on too, once they are shown.
    pub(crate) shared: BTreeMap<BaseKey, String>,
}

impl Openings {
    /// Whether a name is kept for a node that is being opened, for another root than this one.
    pub(crate) fn keep(&self, name: &str, root: Option<&str>) -> bool {
        let mut others = self
            .by_root
            .iter()
            .filter(|(other, _)| root != Some(*other));
        others.any(|(_, opening)| opening.names.contains(name))
    }

    /// Whether a node of this name is being opened, with whichever root.
    pub(crate) fn has_claim(&self, name: &str) -> bool {
        self.claims.contains(name)
    }

    /// The backing files that are opened with a root, and may be shared.
    pub(crate) fn shared_of(&mut self, root: &str) -> Option<&mut BTreeMap<BaseKey, String>> {
        self.by_root
            .get_mut(root)
            .map(|opening| &mut opening.shared)
    }

    pub(crate) fn all_shared(&mut self) -> impl Iterator<Item = &mut BTreeMap<BaseKey, String>> {
        self.by_root.values_mut().map(|opening| &mut opening.shared)
    }
}
