//! L2 slices and refcount blocks in memory.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`cache`] | `TableCache`: tables by a budget of bytes; shards, eviction, ghosts; which are dirty |
//! | [`readahead`] | tells scans from their misses |
//!
//! `mapping` and `alloc` read and change tables through it; `commit` says when they are written.
//!
//! Invariant: a dirty table is not evicted.
//!
//! A table is cached in slices of 4 KiB whatever `l2-cache-entry-size` says (less where a cluster is
//! smaller); the option is checked, and sizes are rounded by it, as in QEMU. Without a size the L2
//! cache starts with 256 KiB and grows up to QEMU's default while evicted tables are missed.

pub(crate) mod cache;
pub(crate) mod readahead;
