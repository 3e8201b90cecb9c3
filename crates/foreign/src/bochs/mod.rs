//! Growing disk images of Bochs, to be read.
//!
//! A header of 512 bytes, a catalog of 32-bit entries, then extents in the order in which they were
//! made: a bitmap of the sectors that were written, and all sectors. Sectors that were not written read
//! as zeroes.
//!
//! Images of this kind are never changed here, so there is nothing to say of a crash.

mod header;
mod image;
mod layout;

pub use header::Header;
pub use image::{open, probe};
pub use layout::BochsLayout;
