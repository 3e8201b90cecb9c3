//! The daemon without the program around it: nodes, exports, jobs, and the commands that
//! change them while they are used.
//!
//! The program adds the command line, the monitors, signals and sockets ([`ServerEnvironment`]); a
//! simulation drives the same commands on files of its own.
//!
//! Invariants:
//! - Commands run one at a time, and jobs change the graph only in their turn: whoever
//!   changes it holds [`Daemon::parts`]. Nodes are opened beside that (`parts.rs`).
//! - The end comes in one order: exports, the server, jobs, nodes.

mod askers;
mod chains;
mod chardev;
mod commands;
pub mod config;
mod daemon;
mod daemon_state;
mod effect;
mod event_limits;
mod events;
mod export;
mod failure;
pub mod http;
mod inet;
mod inherited;
mod jobs;
mod lifecycle;
mod monitor;
mod notices;
mod objects;
mod parts;
pub mod qmp;
mod schema;
mod server;
pub mod shown_bitmaps;
mod space;
mod state;

pub use chardev::{Port, backend_names};
pub use commands::{carry_out, enabled_oob, package};
pub use daemon::Daemon;
pub use daemon_state::DaemonState;
pub use events::{Events, Listener};
pub use export::Removal;
pub use failure::{Failure, need, refuse_rest};
pub use inet::{InetAddress, bind_failure};
pub use objects::object_help;
pub use parts::{HeldParts, Parts};
pub use server::{Notice, Server, ServerEnvironment};
pub use state::SavedState;

#[cfg(test)]
mod tests;
