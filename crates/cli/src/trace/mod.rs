//! `-T`, `--trace`: events of our own code, written as they happen, as QEMU's programs write
//! theirs.
//!
//! The libraries emit events through the crate `tracing`; nobody hears them, and an event costs a
//! look at one number, until a pattern names one. `events` lists their names, which are QEMU's
//! where an event of QEMU's means the same, and `subscriber` writes them.
//!
//! Invariant: names and texts in a line may come from images and clients; none of them steers a
//! terminal or begins a line.

mod events;
mod log;
mod options;
mod subscriber;

pub use log::{LogFormat, start as start_log};
pub use options::{list, take, take_for_server};
