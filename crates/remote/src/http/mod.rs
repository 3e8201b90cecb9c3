//! Files of web servers: HTTP/1.1 ranges, over many connections.
//!
//! [`open()`] asks for the first bytes, and learns from the answer the length,
//! the version and whether the server knows ranges ([`source`] asks, [`answer`] looks at what
//! comes). If it does not, the whole file goes to a temporary one at once ([`spool`]).
//!
//! Invariants:
//! - Credentials go to the server that the URL names, and to no other that it leads to.
//! - No byte is taken of an answer whose range and version are not those that were asked for.

mod answer;
mod open;
mod options;
mod source;
mod spool;

pub(crate) use open::{First, open};
pub use options::{Credentials, HttpOptions};
pub(crate) use source::Source;
