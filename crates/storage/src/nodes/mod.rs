//! Storages that stand on other storages, or on nothing: the nodes from which
//! tests and users build graphs. One file a node; options and QEMU's words for
//! what is wrong with them are the business of `vellum-graph`.

pub mod debug;
pub mod log_writes;
pub mod null;
pub mod preallocate;
pub mod throttle;
pub mod verify;
pub mod watch;
