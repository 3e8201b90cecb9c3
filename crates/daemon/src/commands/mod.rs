//! The commands of a monitor: one line each in `table`, one file for what belongs
//! together. A command takes its arguments apart, refuses what is left, and only then
//! does something.
//!
//! Invariant: commands run one at a time, whichever monitor they come from.

mod amend;
mod answers;
mod backup;
mod bitmaps;
mod block_stats;
mod chardevs;
mod create;
mod exports;
mod graph;
mod jobs;
mod layers;
mod mirror;
mod named_block_nodes;
mod nodes;
mod objects;
mod reopen;
mod snapshots;
mod table;
mod targets;
mod transaction;

pub use table::{carry_out, enabled_oob, package};
pub(crate) use table::{exists, names, only_looks, write_out};
