//! Disks as files: `vellum mount` and the exports of type `fuse`, used through the kernel.
//!
//! They need root, `/dev/fuse`, loop devices, and the programs of `cargo xtask setup`.

mod daemon;
mod disk;
mod killed;
mod loop_mount;
mod place;
mod transport;
mod unprivileged;
