//! What there is to say of nodes.

use vellum_options::CacheMode;

use super::{Nodes, Origin, RequiredAccess, User};
use crate::file_node::CommonOptions;
use crate::graph::NodeKind;

impl NodeKind {
    /// The name of its file, or of what else it shows.
    pub(super) fn shown_name(&self) -> String {
        match self {
            NodeKind::Device(device) => device.info().name,
            NodeKind::Storage(storage) => storage.name().to_owned(),
        }
    }
}

impl Origin {
    /// The mode that the node was opened with.
    pub(super) fn cache(&self) -> CacheMode {
        let flags = &self.around.flags;
        let common = CommonOptions::of(&self.options, flags);
        common.map_or(flags.cache, |common| common.child_flags(flags).cache)
    }
}

impl Nodes {
    /// Who uses which node, and for what: the number of the use, the user, the node, and what is
    /// wanted of it, also by those who use it through the user.
    pub fn uses(&self) -> Vec<(u64, User, String, RequiredAccess)> {
        let named = self.lock();
        let is_shown = |name: &str| named.nodes.contains_key(name);
        let uses = named.uses_with_reach().into_iter();
        // Those of nodes that are being opened are nobody else's business.
        let uses = uses.filter(|one| match &one.user {
            User::Node(above) => is_shown(above) && is_shown(&one.node),
            _ => true,
        });
        uses.map(|one| (one.id, one.user, one.node, one.wanted))
            .collect()
    }

    /// The names of all nodes, each after those that it stands on.
    pub fn bottom_up(&self) -> Vec<String> {
        let named = self.lock();
        let mut names = named.top_down(named.nodes.keys().cloned().collect());
        names.reverse();
        names
    }
}
