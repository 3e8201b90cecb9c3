//! Guest bytes of parts of clusters that need COW, which wait for the rest of their cluster.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`batch`] | writes several small clusters back at once |
//! | [`buffer`] | keeps the bytes, by budget, until their cluster is whole, a flush comes or room is needed |
//! | [`room_below`] | whether the host has room for what waits: else writes go past the buffer |
//! | [`writeback`] | writes clusters to their new places, with what has to be copied, in the background |
//!
//! Invariants: reads see what is buffered; a flush writes it back before it says success.
//!
//! Rule 8: whoever changes the mapping of a cluster, or answers questions about it, writes it back
//! first.

pub(crate) mod batch;
pub(crate) mod buffer;
pub(crate) mod room_below;
pub(crate) mod writeback;
