//! Disk images of other programs, as block devices.
//!
//! Each format is a folder: pure codecs of what is on disk (no I/O, no panic on any bytes), a [`Layout`]
//! that says where guest bytes lie, and what makes images of the format. [`MappedDevice`] is the
//! device over any of them. Only `graph` uses this crate, and whoever embeds these formats.
//!
//! Invariants:
//! - Bytes from an image are not trusted (rule 12): sizes, offsets and counts are checked before use.
//! - No other file is opened because an image names it: whoever opens an image hands its files over.
//! - A mapping entry is written after the bytes that it leads to are durable.
#![forbid(unsafe_code)]
#![deny(clippy::missing_errors_doc)]

pub mod bochs;
pub mod cloop;
mod clusters;
#[cfg(test)]
#[path = "../tests/cuts/mod.rs"]
mod cuts;
mod device;
pub mod dmg;
mod entries;
mod facts;
mod fields;
mod inflate;
mod inflations;
mod joined;
mod layout;
pub mod ova;
mod paged;
pub mod parallels;
mod partial;
mod places;
pub mod qcow;
pub mod qed;
mod random_id;
mod two_level;
pub mod vdi;
pub mod vhdx;
pub mod vmdk;
pub mod vpc;
mod xml;

pub use device::{ForeignImage, MappedDevice};
pub use facts::{
    BackingName, CheckReport, ClusterCounts, CompressedWrites, Fact, Facts, Fix, StoredBitmap,
};
pub use layout::{Layout, NewBlock, Place, Run};
