//! Changes of the graph while requests run through it.
//!
//! Invariants:
//! - A change that fails leaves the graph as it was. Where not even the old state can be
//!   had again (a file that is gone), users of the node get errors, and no other bytes.
//! - Users are held up only while the nodes that they use are exchanged (`drain.rs`).

mod activity;
mod adding;
mod backing_header;
mod blockdev_reopen;
mod children;
mod drain;
mod front;
mod graph_change;
mod rebase;
pub(crate) mod reopen_changes;
mod reopen_nodes;
mod resize;
mod snapshot;
#[cfg(test)]
mod tests;
mod writable;

pub use blockdev_reopen::may_change;
pub use drain::DrainedUsers;
pub use snapshot::Snapshot;
