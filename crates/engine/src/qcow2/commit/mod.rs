//! In which order what is dirty reaches the disk.
//!
//! | file | what it does |
//! | --- | --- |
//! | [`barrier`] | the image file as metadata sees it: after a barrier that failed, none is believed and nothing written |
//! | [`coalesce`] | work that many ask for and one does: commits, write-back for a flush |
//! | [`epochs`] | tells when the requests that read host clusters at some moment are gone |
//! | [`flush`] | commits, one at a time: the steps of [`write_order`] |
//! | [`room`] | frees what can be freed for requests that find no room, and has them tried again |
//! | [`write_order`] | what may reach the disk before what, and when a dropped cluster may be used again |
//!
//! Invariants: data before the counts of its clusters, both before the entry that leads there,
//! with a barrier between; a cluster that an entry no longer leads to is free only after the
//! barrier behind that.

pub(crate) mod barrier;
pub(crate) mod coalesce;
pub(crate) mod epochs;
pub(crate) mod flush;
pub(crate) mod room;
pub(crate) mod write_order;
