//! The Network Block Device protocol: what server and client have in common, and
//! the client ([`client`]): another program's disk as a storage.
//!
//! [`proto`], [`wire`], [`option`], [`request`], [`reply`] and [`answer`] are the
//! protocol itself, pure functions over bytes; [`input`] and [`channel`] carry it.
//!
//! Invariants:
//! - Bytes from a peer are never trusted. Decoders are total functions,
//!   and no length that a peer names is allocated before it was checked.
//! - The kernel's sockets, the clock, threads and names are reached only through `lane::net`,
//!   `lane::now`, `lane::sleep` and the options of client and server, so that the simulator runs
//!   both sides as they are on connections and a clock of its own.

pub mod answer;
pub mod channel;
pub mod client;
pub mod input;
pub mod option;
pub mod proto;
pub mod reply;
pub mod request;
pub mod wire;

pub use channel::{Channel, Secured, Upgrade};
