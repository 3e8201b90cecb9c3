//! Exports: a [`vellum::BlockDevice`] served to clients.
//!
//! [`nbd`] speaks the Network Block Device protocol over unix and TCP sockets.
//!
//! Invariant: bytes from a client are never trusted. A client that breaks the
//! protocol, floods, stalls or vanishes harms nobody but itself.
#![deny(clippy::missing_errors_doc)]

pub mod nbd;
mod slice;

pub use slice::Slice;
