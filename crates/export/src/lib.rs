//! Exports: a [`vellum::BlockDevice`] served to clients.
//!
//! [`nbd`] speaks the Network Block Device protocol over unix and TCP sockets; [`fuse`] shows the
//! device as a regular file; [`vhost_user_blk`] is a disk in a guest's memory.
//!
//! Invariant: bytes from a client are never trusted. A client that breaks the
//! protocol, floods, stalls or vanishes harms nobody but itself.
#![deny(clippy::missing_errors_doc)]

pub mod accounting;
pub mod fair_depth;
pub mod fuse;
pub mod nbd;
mod room;
pub mod size_turns;
mod slice;
pub mod unflushed_logs;
pub mod vhost_user_blk;

pub use room::{RoomNotice, WhenFull};
pub use slice::Slice;
