//! `vellum nbd`, also known as `qemu-nbd`: serves one image to NBD clients, or lists the exports of
//! another server.
//!
//! `arguments` parses the command line; `serve` opens the image, listens and serves, on sockets of
//! its own or on those that `activation` takes over; `list` is the client behind `--list`. What it
//! has in common with the daemon is in `server`.
//!
//! Invariant: an image that was opened is closed, whatever fails after that.

mod arguments;
mod list;
mod program;
mod serve;

pub use arguments::SPEC;
pub use program::main;
