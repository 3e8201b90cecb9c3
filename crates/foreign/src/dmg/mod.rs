//! Apple's disk images (UDIF), to be read.
//!
//! A file ends with a trailer of 512 bytes. It leads to a list of tables, one for each partition, in an XML property list or in
//! a resource fork. Their rows are chunks of the disk: zeroes, bytes as they are, or compressed ones, with zlib, bzip2,
//! LZFSE or LZMA (in xz's container). QEMU reads the last one not, and Apple's oldest, ADC, nobody does here.
//!
//! Chunks have any sizes up to 64 MiB; what the device sees are blocks of a fixed size, which are put together from
//! the chunks that they touch. Chunks are inflated on all cores, as many at a time as
//! there is room for, each once for all who ask for it meanwhile; the last one is kept.
//!
//! Images of this kind are never changed here, so there is nothing to say of a crash.

mod chunk;
mod decompress;
mod image;
mod layout;
mod list;
mod trailer;

pub use chunk::{Chunk, Kind};

pub use image::{open, probe_name};
pub use layout::DmgLayout;
pub use trailer::Trailer;
