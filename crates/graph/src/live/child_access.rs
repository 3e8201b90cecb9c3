//! [`ChildAccess`]: what a node wants of one that it stands on, whoever its users are.

use crate::live::uses::{Changes, Passes};

/// What a node wants of one that it stands on, whoever its users are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChildAccess {
    pub(crate) changes: Changes,
    pub(crate) keeps: Changes,
    pub(crate) passes: Passes,
    /// What it writes by itself is what it has read there.
    pub(crate) rewrites: bool,
}

impl ChildAccess {
    /// It keeps this, and passes on what its users want.
    pub(crate) fn keeping(keeps: Changes) -> ChildAccess {
        ChildAccess {
            changes: Changes::NONE,
            keeps,
            passes: Passes::All,
            rewrites: false,
        }
    }
}
