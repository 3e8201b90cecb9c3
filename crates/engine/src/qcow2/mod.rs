//! qcow2 images. Each kind of thought has one room; see docs/ARCHITECTURE.md.

pub mod check;
pub mod create;
pub mod decompress;
pub mod info;

mod alloc;
mod area;
mod bitmaps;
mod cache;
mod cut;
mod device;
mod fault;
mod grow;
mod image;
mod inflight;
mod l1;
mod l1_growth;
mod load;
mod map;
mod open;
mod options;
mod order;
mod plan;
mod read;
mod readers;
mod refcounts;
mod resize;
mod sparse;
mod status;
mod tables;
mod write;
mod zero;

pub use device::Qcow2;
pub use open::read_header;
pub use options::{Backing, CacheOptions, OpenOptions};
