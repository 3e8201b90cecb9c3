//! A disk for a guest without a copy through a socket: the vhost-user protocol, and behind it the
//! virtio block device, in the guest's own memory.
//!
//! A client (the virtual machine monitor) comes to a socket and hands over the guest's memory and
//! its queues. From then on requests go from the guest's memory to the device and back; the socket
//! is for changes alone.
//!
//! | file | what it does |
//! | --- | --- |
//! | `export.rs` | listens, and serves one client after the other; `options.rs`: how |
//! | `session.rs` | what a client has agreed upon and set up; `message.rs` is the codec, `channel.rs` the socket |
//! | `queue.rs` | one queue on a lane of its own: `ring.rs` (the rings), `chain.rs` (a request's memory), `request.rs` (what it asks for), `perform.rs` (doing it), `signals.rs` (telling the guest), `control.rs` (what the session has of it), `poll_window.rs` |
//! | `memory.rs` | addresses of the guest to memory; `dirty_log.rs`: what of it was written, for a guest that moves to another host |
//! | `in_flight.rs`, `unflushed.rs`, `recovery.rs` | what outlives a server that is killed: requests, and writes that wait for a flush |
//! | `config.rs`, `disk.rs` | what the guest is told of the disk |
//!
//! Invariant: nothing that a guest or client writes is trusted, and it may change at any time.
//! What is looked at is a copy; what is wrong ends the request, the queue or the session, with a
//! line that says so, and nobody else's.

mod chain;
mod channel;
mod config;
mod control;
mod descriptors;
mod dirty_log;
mod disk;
mod export;
mod in_flight;
mod memory;
mod message;
mod options;
mod perform;
mod poll_window;
mod queue;
mod recovery;
mod request;
mod ring;
mod session;
mod signals;
mod take_apart;
mod unflushed;

pub use config::SERIAL_BYTES;
pub use disk::Log;
pub use export::Export;
pub use options::Options;
#[doc(hidden)]
pub use take_apart::{TakenApart, take_apart};
