//! A regular file on which a disk appears: a FUSE server for one file.
//!
//! [`Export::new`] mounts over a file and serves it from threads of its own, each a lane with a
//! descriptor of its own (`export`, and `options` for how). `proto` is the messages, `greeting` the
//! first of them, `mount` and `clone` the way to the kernel, `session` one descriptor's service,
//! `file` what is done to the disk. There is no library between: those that there are bring threads
//! that block, and requests here run on lanes. `queue` is how requests come where the kernel has FUSE
//! over io_uring.
//!
//! Invariants:
//! - The kernel is trusted, but no message is read beyond its end.
//! - The threads that serve a mount never use it, nor wait for one who does.

mod clone;
mod export;
mod file;
mod greeting;
mod mount;
mod mount_id;
mod options;
mod proto;
mod queue;
mod session;

pub use export::Export;
pub use mount::remove_dead_mounts;
pub use options::{AllowOther, ExportOptions, Transport};
