//! VPC, or VHD: the format of Virtual PC, and of Hyper-V before VHDX. Dynamic, fixed and differencing images.
//!
//! ```text
//!   fixed     | bytes of the disk ...                                        | footer |
//!   dynamic   | footer | header | table | bitmap block | bitmap block | ...  | footer |
//! ```
//!
//! Crash safety: a dynamic image has its footer twice, at its beginning, where it never
//! changes, and at its end. Before a block is put where the footer is, another footer is written
//! behind it, durably, for some blocks at once; the file ends with a footer at any time then, and
//! what lies before it and is no block's is given back when the image is closed. A block's bitmap is written
//! when it gets its place, and its entry in the table when the bitmap and what the guest has
//! written are durable. A sector of the table is whole or as before, and so is what it leads to.
//!
//! Blocks of which a differencing image has only some sectors are copied whole when they are written to:
//! the bitmap gets all its bits when the bytes are durable.
//!
//! The parent of a differencing image is opened by whoever opens the image: [`parent()`] reads its names.
//! (QEMU takes such an image for a dynamic one, and what is the parent's for zeroes.)

mod bitmap;
mod create;
mod errors;
mod footer;
mod geometry;
mod header;
mod image;
mod layout;
mod parent;
mod space;
#[cfg(test)]
mod tests;

pub use create::{CreateOptions, Subformat, create};
pub(crate) use errors::invalid;
pub use footer::SizeCalculation;
pub use layout::{OpenOptions, VpcLayout, open, parent};
pub use parent::Parent;
