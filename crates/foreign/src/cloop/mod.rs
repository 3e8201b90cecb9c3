//! Compressed images for Linux' `cloop`, to be read.
//!
//! A header that begins as a shell script, the size of a block and the number of blocks, one offset for
//! each block and one for the end, then the blocks, each a zlib stream.
//!
//! The offsets are checked when an image is opened, and read again, two at a time, when a block is: so
//! an image with very many of them takes no memory.
//!
//! Images of this kind are never changed here, so there is nothing to say of a crash.

mod header;
mod image;
mod layout;

pub use header::Header;
pub use image::{open, probe};
pub use layout::CloopLayout;
