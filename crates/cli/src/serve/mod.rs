//! `vellum serve`: one disk in the ways that are asked for, an NBD socket, a vhost-user socket, a
//! regular file, and what to type to use it.
//!
//! `arguments` parses the command line, `lines` writes what clients are told. What it has in common
//! with other servers is in `server`.
//!
//! Invariant: an image that was opened is closed, whatever fails after that, and after the last
//! request on it.

mod arguments;
mod lines;
mod program;

pub use arguments::SPEC;
pub use program::main;
