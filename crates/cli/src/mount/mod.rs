//! `vellum mount`: shows the disk in an image as a regular file, until it is unmounted or a
//! signal comes.
//!
//! `arguments` parses the command line. What it has in common with other servers is in `server`.
//!
//! Invariant: an image that was opened is closed, whatever fails after that, and after the last
//! request on it.

mod arguments;
mod program;

pub use arguments::SPEC;
pub use program::main;
