//! Changes of the graph while requests run through it.
//!
//! Invariants:
//! - A change that fails leaves the graph as it was. Where not even the old state can be
//!   had again (a file that is gone), users of the node get errors, and no other bytes.
//! - Users are held up only while the nodes that they use are exchanged (`drain.rs`).

mod activity;
mod adding;
mod children;
mod drain;
mod rebase;
mod redirect;
mod renew;
pub(crate) mod renewed;
pub(crate) mod reopen;
mod resize;
mod snapshot;
#[cfg(test)]
mod tests;
mod writable;

pub use drain::DrainedUsers;
pub use reopen::may_change;
