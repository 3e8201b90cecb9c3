//! Formats of other programs (`vellum-foreign`): how they are opened, made and checked by name.
//!
//! A new one is a file here and a line in `table.rs`.
//!
//! Invariant: a file that an image names (a backing file, an extent) is opened by this crate, as far as
//! the policy allows it (rule 12); the formats themselves open nothing.

pub(crate) mod format;
mod only_read;
mod opening;
mod parallels;
mod qcow;
mod qed;
mod table;
mod vdi;
mod vhdx;
mod vmdk;
mod vpc;

pub use crate::node::foreign_image::{
    change_identity, facts, keep_identity, set_backing_file, stored_bitmaps, tells_clusters,
    told_dirty,
};
pub use format::{Creation, ForeignFormat, New, Opening, Pending, QmpKind, QmpOption};
pub(crate) use only_read::{BOCHS, CLOOP, DMG};
pub(crate) use opening::open;
pub(crate) use parallels::FORMAT as PARALLELS;
pub(crate) use qcow::FORMAT as QCOW;
pub(crate) use qed::FORMAT as QED;
pub use table::{check, compresses, find, has_backing};
pub(crate) use vdi::FORMAT as VDI;
pub use vellum_foreign::{
    BackingName, CheckReport, CompressedWrites, Fact, Facts, Fix, ForeignImage,
};
pub(crate) use vhdx::FORMAT as VHDX;
pub(crate) use vmdk::FORMAT as VMDK;
pub(crate) use vpc::FORMAT as VPC;
