//! Checks an image, and repairs it: counts what refers to each cluster and compares
//! that with the refcounts on disk.
//!
//! Every table is read once, in the order of the file and many at a time: the
//! refcounts first, which are kept in memory in a dense form, then the L1 tables
//! of the disk and of its snapshots, then each L2 table, however many L1 tables
//! share it. Nothing is looked up on disk for a single entry, so the work grows
//! with the metadata and not with what it says.
//!
//! Messages, counts and the order of both are QEMU's.
//!
//! | file | what it does |
//! | --- | --- |
//! | `request`, `report` | a check or repair as a whole; what it reports |
//! | `walk` | follows everything that the header leads to, but for the refcount blocks, and counts references |
//! | `team` | counts the references of L2 tables on all cores; what is wrong is left to `walk` |
//! | `tally`, `counts`, `chunk` | the references to clusters; counts in as little memory as they need |
//! | `l2_tables`, `parts` | which L2 tables there are, for a part of the file at a time, so that memory is bounded |
//! | `areas` | where metadata lies that is no L2 table |
//! | `source`, `tables`, `stored` | the image as its header describes it; many tables read at once; the refcounts on disk |
//! | `compare`, `findings`, `outcome` | compares counts and references; counts and reports what is found |
//! | `refcounts` | the order of a check and of a repair |
//! | `fix_refcounts`, `rebuild` | repair of single refcounts in their blocks, or of all of them in new places |
//! | `place`, `beyond` | where new metadata may be put; what points behind the end of the file |
//! | `repair` | the small writes of a repair: entries that are given up, the header's marks |
//! | `cut_short` | what of the disk lies beyond the end of a file that was cut off |
//! | `copied`, `snapshots`, `bitmaps` | repair of the copied flags, of the snapshot table, of bitmaps |
//!
//! Invariants:
//! - [`check`] writes nothing.
//! - Memory is bounded by the clusters of the file, a few bits each (with wide refcounts up to
//!   8 bytes), whatever its tables say.
//! - A repair writes new metadata only where nothing lies by the references and by the refcounts,
//!   or behind the end where nothing points; it raises counts before it lowers any, and changes a
//!   table only if nothing else lies in its clusters. What read as zeroes goes on doing so. Cut off
//!   anywhere, it leaves an image that the next repair puts right.

mod areas;
mod beyond;
pub(in crate::qcow2) mod bitmaps;
mod chunk;
mod compare;
mod copied;
pub(super) mod counts;
pub(super) mod cut_short;
mod findings;
mod fix_refcounts;
mod l2_tables;
mod outcome;
pub(in crate::qcow2) mod parts;
mod place;
mod rebuild;
mod refcounts;
mod repair;
mod report;
mod request;
mod snapshots;
pub(super) mod source;
pub(super) mod stored;
pub(super) mod tables;
mod tally;
mod team;
#[cfg(test)]
mod tests;
mod walk;

pub use cut_short::{CutShort, cut_short};
pub use report::{CheckOptions, CheckReport, Finding, FindingKind, FindingSink, Fix, ProgressSink};
pub(crate) use request::repair_dirty;
pub use request::{check, drop_write_log, repair};
