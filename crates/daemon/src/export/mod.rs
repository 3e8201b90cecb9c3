//! `--export`, `block-export-add`: what all types have in common. Each type has a file, and a
//! variant of `description::Wanted` and of `Served`.

#[cfg_attr(
    not(feature = "http"),
    allow(dead_code, reason = "only HTTP looks at it")
)]
mod counted;
mod description;
mod ending;
mod fuse;
mod list;
mod nbd;
mod served;
mod surroundings;
mod vhost_user_blk;

pub(crate) use counted::{CountedExport, CountedExports};
pub(crate) use description::Description;
pub(crate) use fuse::is_same_place;
pub use list::Removal;
pub(crate) use list::{ExportInfo, ServerExports};
pub(crate) use surroundings::{ExportPlace, Origin};
