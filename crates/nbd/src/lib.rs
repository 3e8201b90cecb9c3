//! The Network Block Device protocol: what server and client have in common, and
//! the client ([`client`]): another program's disk as a storage.
//!
//! [`proto`], [`wire`], [`option`], [`request`], [`reply_encode`] and [`reply_decode`] are the
//! protocol itself, pure functions over bytes; [`receive_buffer`] and [`channel`] carry it.
//!
//! Invariants:
//! - Bytes from a peer are never trusted. Decoders are total functions,
//!   and no length that a peer names is allocated before it was checked.
//! - The kernel's sockets, the clock, threads and names are reached only through `lane::net`,
//!   `lane::now`, `lane::sleep` and the options of client and server, so that the simulator runs
//!   both sides as they are on connections and a clock of its own.
#![deny(clippy::missing_errors_doc)]

pub mod channel;
pub mod client;
pub mod option;
pub mod proto;
pub mod receive_buffer;
pub mod reply_decode;
pub mod reply_encode;
pub mod request;
pub mod wire;

pub use channel::{Channel, Secured, Upgrade};
