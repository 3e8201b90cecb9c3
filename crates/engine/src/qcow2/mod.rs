//! qcow2 images. Each kind of thought has one room; see docs/ARCHITECTURE.md.

pub mod check;
pub mod create;
pub mod info;

mod ahead;
mod alloc;
mod batch;
mod bitmaps;
mod blank;
mod cache;
mod compressed;
mod data_cache;
mod decompress;
mod decompressed;
mod device;
mod drain;
mod fault;
mod free;
mod group;
mod grow;
mod image;
mod inflight;
mod l1;
mod lazy;
mod load;
mod map;
mod open;
mod options;
mod order;
mod packed;
mod plan;
mod prefetch;
mod read;
mod readers;
mod refcounts;
mod reserve;
mod scan;
mod sparse;
mod status;
mod tables;
mod write;
mod zero;

pub use ahead::AheadOptions;
pub use device::{CacheUsage, Qcow2};
pub use open::read_header;
pub use options::{Backing, CacheOptions, OpenOptions};
