//! `vellum daemon` as a service: a configuration that is read again, what systemd is told, sockets
//! that it hands over, and what comes back when it is started again.

mod bitmaps;
mod config;
#[path = "../qmp/dirty.rs"]
mod dirty;
#[path = "../../../export/tests/it/vhost_user_blk/guest.rs"]
mod guest;
mod led;
mod log;
mod lost;
mod place;
mod space;
mod state;
mod state_writes;
mod systemd;
mod upgrade;
