//! [`MappedDevice`]: the block device over any `Layout`.
//!
//! ```text
//!   read     lookup -> one run: the storage's own request; several: side by side
//!   write    data in place, range held shared; else the blocks are held exclusive:
//!            allocate -> data (and what is around it) -> link, in memory
//!   flush    take what changed -> barrier -> write it -> barrier       (rule 1)
//! ```
//!
//! Invariants:
//! - An entry that was linked reaches the disk after a barrier that makes durable the bytes it
//!   leads to (rule 1). Host space that a mapping has left is not used again before the image is opened
//!   anew, so reads need no protection from those who free it (rule 5).
//! - What lies at a place of data is read and written by `Core::request` alone, which decrypts and encrypts it
//!   where the image is encrypted.
//! - Changes of one block take turns (rule 9); those of others run side by side.
//! - After a failed write of tables reads go on, and changes fail with the first reason (rule 11). For want of room
//!   alone they go on, too: the next commit writes what that one did not, as absolute bytes, once more.

mod commit;
mod commits;
mod core;
mod image;
mod inflated;
mod mapped;
mod plan;
mod read;
mod resize;
mod status;
mod write;
mod zero;

pub use image::ForeignImage;
pub use mapped::MappedDevice;
