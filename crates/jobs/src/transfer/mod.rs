//! A disk as a stream of records ([`vellum_format::stream`]): [`send()`] makes one, [`receive()`]
//! applies one. Where the bytes go to and come from is the caller's.
//!
//! Invariants:
//! - Nothing of a record is written before its checksum and its payload's hash have agreed, and so
//!   have those of all records before it.
//! - What [`receive()`] tells of as durable is: everything the stream says of the disk before there
//!   was written, and a flush came after it.
//! - Memory is bounded by the pieces in flight, of 1 MiB each, whatever the stream says.

mod pack;
mod receive;
mod send;
mod walk;

pub use receive::{Input, ReceiveError, ReceiveOptions, receive};
pub use send::{SendError, SendOptions, Sent, send};
