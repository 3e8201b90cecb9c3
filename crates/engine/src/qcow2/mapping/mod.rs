//! From guest offsets to host offsets.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`l1`] | the L1 table, wholly in memory |
//! | [`l1_growth`] | a longer L1 table, in place or elsewhere |
//! | [`l2_tables`] | L2 tables: made when first needed, copied when a snapshot shares them |
//! | [`load_slices`] | brings slices into memory on a miss, and those behind it where a scan goes on |
//! | [`lookup`] | guest range to view (runs of one kind); no I/O: a lookup hits, or names the slice to load |
//! | [`packed`] | compact in-memory forms of a clean L2 slice; pure functions |
//! | [`runs`] | runs of plain L2 entries, taken as one |
//!
//! Whoever reads or writes guest data asks [`Image::view`](super::image::Image::view), which loads
//! what a lookup misses.
//!
//! Invariants: what an entry says is checked against the geometry before it is used; an L2 table
//! that a snapshot shares is copied before it changes.

pub(crate) mod l1;
pub(crate) mod l1_growth;
pub(crate) mod l2_tables;
pub(crate) mod load_slices;
pub(crate) mod lookup;
pub(crate) mod packed;
pub(crate) mod runs;
