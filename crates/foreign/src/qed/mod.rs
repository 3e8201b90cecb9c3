//! QED, QEMU's enhanced disk format, which came between qcow2 and what qcow2 is now.
//!
//! A header of some clusters with the name of a backing file in it, a first table (L1) of tables (L2), and these and the
//! clusters in the order in which they were made. All tables have one size, some clusters. There is no count of
//! references.
//!
//! What a power cut leaves: the flag that says that the image has to be checked, and clusters at the end of
//! the file that nothing leads to. The flag is durable before the first change and is taken back once all
//! is durable. Entries are written after what they lead to is durable, so a check finds nothing to mend
//! beside the flag after our own writes; other programs rely on the check. An image with the flag that
//! is opened to be written to is checked and mended first, and its end is cut off where nothing leads to it.

mod check;
mod create;
mod header;
mod image;
mod layout;

pub use check::{check, repair};
pub use create::{CreateOptions, create};
pub use header::Header;
pub(crate) use image::read;
pub use image::{facts, open, probe};
pub use layout::QedLayout;
