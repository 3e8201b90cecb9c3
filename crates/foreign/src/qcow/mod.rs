//! qcow, the first version, before qcow2.
//!
//! A header, the name of a backing file, a first table of leaves (L1), and then leaves (L2), clusters and
//! compressed clusters in the order in which they were made. There is no count of references: what was
//! replaced is lost until the image is copied.
//!
//! What a power cut leaves: space at the end of the file that nothing leads to. Entries are written after
//! what they lead to is durable. There is no flag, no check and nothing to mend.
//!
//! The guest's data may be encrypted: each sector of a cluster by its guest offset, with AES-CBC. Tables are not,
//! and neither are compressed clusters, which QEMU writes to such images and which are only read here.

mod create;
mod header;
mod image;
mod layout;

pub use create::{CreateOptions, create};
pub use header::Header;

pub use image::{OpenOptions, facts, open, probe};
pub use layout::QcowLayout;
