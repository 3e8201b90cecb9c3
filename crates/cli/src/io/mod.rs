//! `vellum io`, also known as `qemu-io`: reads and writes an image by small commands, from the
//! command line or standard input.
//!
//! `options` parses the command line of the tool and `session` runs the commands. A command is
//! looked up in `command_table`, its words are parsed by `arguments`, and it is carried out by
//! `transfer` (reads and writes), `aio` (those that run beside other commands), `space`, `info`,
//! `image` (open, reopen, close) or `breakpoint`. `print` formats what they print.
//!
//! Invariants:
//! - Everything runs on the lane of the calling thread; asynchronous requests (`aio_read`,
//!   `aio_write`) are tasks of that lane.
//! - What is printed on standard output is what `qemu-io` prints: scripts compare it.
//! - A command reports its own failure ([`outcome`]); the session goes on and ends with 1.

mod aio;
mod arguments;
mod breakpoint;
mod command_table;
mod commands;
mod help_texts;
mod image;
mod info;
mod options;
mod outcome;
mod print;
mod program;
mod session;
mod space;
mod transfer;

pub use options::SPEC;
pub use program::main;
