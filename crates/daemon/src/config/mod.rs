//! `--config FILE`: disks and exports for those who do not speak QMP.
//!
//! ```toml
//! [daemon]
//! monitors = ["/run/vellum/qmp.sock"]
//! metrics = ["unix:/run/vellum/http.sock"]
//! nbd = { path = "/run/vellum/nbd.sock" }
//!
//! [throttle.slow]
//! iops-total = 500
//!
//! [[disk]]
//! name = "a"
//! image = "a.qcow2"
//! format = "qcow2"
//! throttle = "slow"
//! [[disk.export]]
//! type = "nbd"
//! writable = true
//! ```
//!
//! `read.rs` makes parts of the text (`section.rs`, `disk.rs`), each with the arguments of the command that
//! makes it and the place where it stands; `plan.rs` compares parts that are in force with those that are
//! wanted; `apply.rs` carries the difference out by the same functions as the commands of a monitor. The first
//! two do no I/O but for reading the file, and know nothing of the running daemon.
//!
//! Invariants:
//! - A file with a mistake changes nothing.
//! - What is the same in both is not touched: an unchanged file has an empty plan.
//! - A change that fails leaves what it concerns as it was.

mod apply;
mod disk;
mod parts;
mod place;
mod plan;
mod read;
mod section;

pub use apply::{Applied, InForce};
pub use parts::{Part, PartKey, PartKind, Parts};
pub use place::{Mistake, Place};
pub use plan::{Request, Step, plan};
pub use read::{Config, Listener, Monitor, OnError};

#[cfg(test)]
mod plan_tests;
#[cfg(test)]
mod tests;
