//! `vellum daemon`, also known as `qemu-storage-daemon`: nodes, exports and monitors as
//! the command line describes them, until a signal or a monitor's client ends it.
//!
//! Without a monitor what the command line says is all there is, and nodes are wired for
//! good; with one, or with a file that may be read again (`config.rs`), they can be changed
//! while they are used (`vellum_graph::Nodes`). Options for parts that do not exist are refused by name.
//!
//! Invariant: the end comes in one order, whatever caused it: exports that no node stands on, jobs, the
//! other exports (the last one first, and nodes that stand on it before it), the server, nodes, and last the
//! monitors, whose clients hear of all that.

mod arguments;
mod config;
mod part_help;
mod program;
mod service;
mod state;

pub use arguments::SPEC;
pub use program::main;
pub(crate) use program::{Program, parse_options};
