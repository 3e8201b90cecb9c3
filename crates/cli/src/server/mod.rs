//! What the servers, `nbd`, `daemon`, `mount` and `serve`, have in common: opening images, sockets to listen on, signals that
//! end the program, going to the background, and the file with the process id.
//!
//! Only these use this module; it knows none of them.

mod activation;
mod close;
mod daemonize;
mod failure;
mod image;
mod limits;
mod listen;
mod log;
mod pid_file;
mod signals;
mod socket;
mod start;

pub use activation::{
    activated_sockets, handed_unix, keep_sockets, left_sockets, take_by_name, take_sockets,
};
pub use close::close;
pub use daemonize::{Process, Ready, daemonize};
pub use failure::Failure;
pub use image::{ABOUT_ROWS, IMAGE_ROWS, ServedImage};
pub use limits::allow_many_files;
pub use listen::{bad_port, listen_tcp, listen_unix};
pub use log::{failures, log};
pub use pid_file::write_pid_file;
pub use signals::{catch_signals, catch_these, next_signal, stop_on_signal};
pub use socket::check_free;
pub use start::{absolute, announce, start};
