//! The commands: one row each in `table`, one file a family.
//!
//! A command is a request and a function that carries it out. Monitors and HTTP ask by name, in JSON, which
//! `table` has parsed into the request; the configuration, chain policies and the state file call the
//! functions with requests of their own ([`change`]), unless what they ask for begins a job: the state file
//! records the JSON of that.
//!
//! Invariants:
//! - All of a request is parsed before anything is done.
//! - What a command changes is in the state file before it is answered (`table::settle`).

mod amend;
mod answers;
mod backup;
mod bitmaps;
mod block_stats;
mod chardevs;
mod create;
pub(crate) mod exports;
mod graph;
pub(crate) mod job_verbs;
mod jobs;
mod layers;
mod mirror;
mod named_block_nodes;
pub(crate) mod nodes;
pub(crate) mod objects;
pub(crate) mod reopen;
mod request;
mod snapshots;
mod table;
mod targets;
mod transaction;

pub use table::{carry_out, enabled_oob, package};
pub(crate) use table::{change, effect, exists, names, write_out};
