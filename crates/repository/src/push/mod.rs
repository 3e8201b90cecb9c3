//! A disk goes into a repository: what is nowhere in it yet is sent, then the manifest.
//!
//! - `plan`: what is read of the disk, and what has not changed.
//! - `segments`, `map`: what becomes of the chunks.
//! - `upload`: objects on their way.
//!
//! The stages of a chunk run side by side, and keep their order: read and hashed, looked for among what is
//! known, compressed, put into a segment, sent. Memory: 32 MiB of what is read, twice that, and eight
//! segments on their way.
//!
//! Invariant: the manifest is put after all else is there.

mod map;
mod pipeline;
mod plan;
mod segments;
mod upload;

pub use pipeline::{PushOptions, Pushed, Since, push};
