//! A disk, or what has changed of one, as a stream of bytes (FORMAT.md, section 9c). Vellum's own.
//!
//! ```text
//! stream | header | record | record | ... | end record |
//! record | head, 64 bytes | payload |
//! ```
//!
//! All numbers are big-endian. Records stand in the order of the disk's offsets and do not overlap.
//!
//! Invariants:
//! - Nothing of a record is believed before its head's checksum agrees, which also covers which
//!   stream it belongs to and which record of it this is; its payload has a hash in its head.
//! - A checkpoint, and the end, carry the hash of the header and all heads before: so of the
//!   stream up to there.
//! - Whatever a record says lies inside the disk, behind the record before.

mod header;
mod records;

pub use header::{Header, MAX_HEADER_BYTES, PRELUDE_BYTES, StreamId};
pub use records::{HEAD_BYTES, MAX_DATA_BYTES, Reader, Record, SECTOR_BYTES, Writer, payload_hash};
