//! What the objects of a repository hold, in bytes: no I/O, no panic on any bytes, and no more memory
//! than a small multiple of what is decoded.
//!
//! - [`segment`]: chunks of disks, and the list of them behind these.
//! - [`piece`]: where the chunks of a GiB of a disk are.
//! - [`hash_list`]: the lists of a push's segments, so that chunks are found without looking into each.
//! - [`manifest`]: what a disk was at one time; the only objects that change what a repository holds.
//!
//! Numbers are big-endian. docs/FORMAT.md has the layout.

pub mod hash_list;
pub mod manifest;
mod names;
pub mod piece;
pub mod segment;

pub use names::{
    CHUNK_BYTES, Hash, HexHash, MOST_DISK_BYTES, PIECE_CHUNKS, PushId, SEGMENT_CHUNKS,
};
pub(crate) use names::{array, be32, be64, damaged, from_hex};
