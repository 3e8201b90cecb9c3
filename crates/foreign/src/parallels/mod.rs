//! Parallels' expandable images, with both of their signatures.
//!
//! A header, a table with a 32-bit entry for each cluster (BAT), and the clusters. An entry of 0 is a cluster that
//! reads as zeroes. With the newer signature entries count clusters of the file, with the older one sectors.
//!
//! What a power cut leaves: the mark that the image is in use, and clusters that nothing leads to. The mark is
//! durable before the first change and is taken back once all is durable. Entries are written after what
//! they lead to is durable. An image with the mark that is opened to be written to is checked and
//! mended first.
//!
//! The format extension is read for its dirty bitmaps where the image is only read. Else it is left alone: whoever
//! knows it finds in the header that the image was changed by a program that does not; its clusters
//! are not used for anything else.

mod check;
mod create;
mod extension;
mod header;
mod image;
mod layout;

pub use check::{check, repair};
pub use create::{CreateOptions, create};
pub use header::Header;
pub(crate) use image::read;
pub use image::{open, probe};
pub use layout::ParallelsLayout;
