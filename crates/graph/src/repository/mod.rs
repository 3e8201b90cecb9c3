//! Disks in repositories: the store of a node's options, and disks as users name them ([`Named`]). The names themselves are
//! [`vellum_options::repository_name`]'s.

#[cfg(feature = "s3")]
mod bucket;
mod named;
mod tracking;

pub use named::Named;
pub(crate) use named::{another_disk, refuse_writes, take_disk, take_objects, take_push};
pub use tracking::{Tracking, dirty_of};
