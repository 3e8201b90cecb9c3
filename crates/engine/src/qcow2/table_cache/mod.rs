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

pub(crate) mod cache;
pub(crate) mod readahead;
