//! How a node came to be, to open it once more with some things changed.

use vellum_options::{CacheMode, OpenFlags, Options};

use crate::node::file_node::CommonOptions;
use crate::node::file_policy::FilePolicy;
use crate::node::place::NodePlace;

/// What a missing driver means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The format is found out from the content.
    Image,
    /// It is a file.
    Protocol,
}

/// How a node came to be, to make it once more with some things changed.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) options: Options,
    pub(crate) role: Role,
    pub(crate) flags: OpenFlags,
    pub(crate) policy: FilePolicy,
    pub(crate) place: NodePlace,
}

impl Origin {
    /// The mode that the node was opened with.
    pub(crate) fn cache(&self) -> CacheMode {
        let flags = &self.flags;
        let common = CommonOptions::of(&self.options, flags);
        common.map_or(flags.cache, |common| common.child_flags(flags).cache)
    }
}
